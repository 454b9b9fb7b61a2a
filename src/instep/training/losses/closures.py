"""The losses of closures, for optimizers that decide by them: LBFGS, and its line search.

A closure returns the loss of this rank's rows, so each rank would decide otherwise. The optimizer
gets that of the whole batch instead: the sum of the ranks' losses by the weights that their
gradients have.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from instep.distributed.communication.scopes import scope_number
from instep.distributed.communication.transport import get_transport
from instep.distributed.numbers import gather_values
from instep.distributed.watchdog.call_stack import script_line
from instep.errors import TrainingError
from instep.process.process_value import ProcessValue
from instep.training.autograd_graph import Root
from instep.training.buckets.reducer import reducer_of
from instep.training.drift.optimizers import parameters_of

Closure = Callable[[], Any]
Noted = list[tuple[float, float]]
"""Numbers on which backward is called, each with this rank's weight of it."""

_noted = ProcessValue[Noted | None](None)


def note_loss(roots: Iterable[Root], weight: float) -> None:
    """Backward is called on these, with this weight."""
    if _noted.value is not None:
        tensors = (root for root in roots if isinstance(root, Tensor))
        _noted.value.extend((each.item(), weight) for each in tensors if each.numel() == 1)


def follow_steps() -> None:
    """From now on LBFGS of a replica's parameters gets the losses of whole batches."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not isinstance(optimizer, LBFGS) or get_transport().size == 1 or scope_number() is not None:
        return None
    if not any(each in reducer_of for each in parameters_of(optimizer)):
        return None
    if len(args) > 1:
        return (args[0], functools.partial(_loss_of_batch, args[1]), *args[2:]), kwargs
    if "closure" not in kwargs:
        return None
    return args, {**kwargs, "closure": functools.partial(_loss_of_batch, kwargs["closure"])}


def _loss_of_batch(closure: Closure) -> Any:
    """What the closure returns, for the whole batch; a tensor without a graph, or a number.

    It is replaced if it is the sum of the losses on which the closure has called backward.
    Collective. Raises TrainingError on every rank if it is not, and differs between the ranks.
    """
    noted: Noted = []
    with _noted.set_to(noted):
        loss = closure()
    value = loss.item() if isinstance(loss, Tensor) else float(loss)
    own = sum(each for each, _ in noted)
    is_own = bool(noted) and (math.isclose(value, own, rel_tol=1e-5) or math.isnan(value))
    part = sum(each * weight for each, weight in noted if weight)  # 0 x NaN of a placeholder
    by_rank = gather_values([value, part, is_own], get_transport())
    values, parts, are_own = zip(*by_rank, strict=True)
    if all(are_own):
        total = sum(parts)
    elif len({repr(each) for each in values}) == 1:
        total = value
    else:
        seen = "; ".join(f"{each:.6g} on rank {rank}" for rank, each in enumerate(values))
        raise TrainingError(
            f"the closure of the step at {script_line()} returned different losses ({seen}), by "
            "which the optimizer decides how far to go. Return the loss on which it has called "
            "backward, which instep sums over the ranks, or a value that is the same on all of "
            "them, such as that of instep.Mean."
        )
    return loss.detach().new_tensor(total) if isinstance(loss, Tensor) else total
