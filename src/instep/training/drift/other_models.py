"""Models in no replica that each rank trains on its own rows of the batches.

Of a replica the ranks have the sum of their gradients. Of another model each has its own, unless
the script brings them together itself; then they are equal where its optimizer has stepped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.distributed import neighbors
from instep.distributed.communication.transport import get_transport
from instep.distributed.flight_record.script_line import warn_at_script_line
from instep.process.exit_status import format_ranks
from instep.process.torch_private.distributed import is_fsdp_parameter
from instep.training.batches import progress
from instep.training.drift.comparison import has_replicas, is_of_replica
from instep.training.drift.optimizers import after_each_step, follow_optimizers, parameters_of

_STEPS = 4
"""So many steps of an optimizer are looked at. In the first ones a gradient may be zero still."""
_MAX_GRADIENTS = 16
_TOLERANCE = 1e-3
"""Sums of ranks that round differently differ by less, those of gradients of other rows by more."""
_optimizer_numbers = count()


@dataclass
class _Steps:
    """The steps of an optimizer that were looked at."""

    number: int
    """Of the optimizer, the same on ranks that step with the same ones."""
    steps: int = 0
    requested: int = 0
    """How many batches this rank had requested at the last step."""
    backwards: int = 0
    """How many backwards of replicas there were before it."""


_steps_of: WeakKeyDictionary[Optimizer, _Steps] = WeakKeyDictionary()


def follow_other_models() -> None:
    """From now on, look at what optimizers train."""
    if get_transport().size > 1:
        _follow()


@functools.cache
def _follow() -> None:
    follow_optimizers()
    after_each_step(_look)


def _look(optimizer: Optimizer) -> None:
    """Warn if gradients of what is in no replica are not those of a neighbor. Not collective."""
    if not progress.is_followed():
        return
    seen = _steps_of.get(optimizer)
    if seen is None:
        seen = _steps_of[optimizer] = _Steps(next(_optimizer_numbers))
    if seen.steps == _STEPS:
        return
    now = progress.current
    has_batch = now.requested > seen.requested
    # Beside a replica it is compared with this one, where that is compared.
    is_beside = now.backwards > seen.backwards or (has_replicas() and not seen.steps)
    seen.steps, seen.requested, seen.backwards = seen.steps + 1, now.requested, now.backwards
    if not has_batch or is_beside:
        return
    parameters = parameters_of(optimizer)
    if any(is_of_replica(p) or is_fsdp_parameter(p) for p in parameters):
        return
    gradients = [p.grad for p in parameters if type(p.grad) is Tensor][:_MAX_GRADIENTS]
    shapes = [[*gradient.shape] for gradient in gradients]
    mine = [number for gradient in gradients for number in _sums(gradient)]
    key = f"gradients of optimizer {seen.number}, step {seen.steps}"
    for rank, (their_shapes, theirs) in neighbors.show(key, (shapes, mine)):
        if shapes == their_shapes and _are_others(mine, theirs):
            seen.steps = _STEPS
            warn_at_script_line(
                f"{format_ranks((get_transport().rank, rank))} step with different "
                f"gradients, since what this {type(optimizer).__name__} trains is in no replica: "
                "each rank trains a model of its own on its rows of what instep.shard has divided. "
                "Call model = instep.replicate(model) before the loop. [INS718]"
            )
            return


def _sums(gradient: Tensor) -> Iterator[float]:
    """The sum of its elements and of their absolute values."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    yield float(values.sum(dtype=torch.float32))
    yield float(values.abs().sum(dtype=torch.float32))


def _are_others(mine: list[float], theirs: list[float]) -> bool:
    """Whether these sums are those of other gradients."""
    for k in range(0, len(mine), 2):
        limit = _TOLERANCE * max(mine[k + 1], theirs[k + 1])
        if math.isfinite(limit) and any(abs(mine[j] - theirs[j]) > limit for j in (k, k + 1)):
            return True
    return False
