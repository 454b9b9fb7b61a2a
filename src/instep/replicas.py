"""A model kept in step: the same parameters everywhere, the gradient of the global batch."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, get_args
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from instep import batchnorm, gradients
from instep.agreement import agree_on_each
from instep.blocks import enter_forward, leave_forward, mark
from instep.collectives import broadcast_all, check_reachable, transport
from instep.errors import ReplicatedTwiceError, TrainingError
from instep.seams import Function, step_in

M = TypeVar("M", bound=nn.Module)
BatchStatistics = Literal["global", "rank"]

_replicas: WeakSet[nn.Module] = WeakSet()
"""Every module of every replicated model."""
_statistics_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Where batch statistics come from, by the parameters and buffers of replicated models."""
_mode_of: WeakKeyDictionary[nn.Module, BatchStatistics] = WeakKeyDictionary()
"""The same by the replicated models themselves."""
_calls: list[BatchStatistics] = []
"""The same for their calls that are under way."""


def replicate(model: M, *, batch_statistics: BatchStatistics = "global") -> M:
    """Keep `model` in step on all ranks.

    Parameters and buffers become rank 0's. From now on every backward through the model leaves in
    `.grad` the gradient of the global batch (up to the rounding of sums in another order), and
    batch normalisation in training uses the statistics of the global batch.

    Args:
        model: any module; on the rank's own device. The optimizer may exist already.
        batch_statistics: "global", or "rank" to leave batch statistics to each rank's rows, which
            is faster and not the same as one process.

    Returns:
        `model` itself: no wrapper, no prefix in its state dict, its children untouched.

    Raises ReplicatedTwiceError, DisagreementError (a parameter differs in name, shape or dtype
    between ranks), WrongDeviceError, TrainingError. Collective.
    """
    if batch_statistics not in get_args(BatchStatistics):
        raise ValueError(f"batch_statistics is 'global' or 'rank', not {batch_statistics!r}.")
    way = transport()
    tensors = _sound_tensors(model)
    agree_on_each(
        [(name, f"{tuple(t.shape)} {t.dtype}") for name, t in tensors.items()],
        "Build the same model on every rank before instep.replicate.",
    )
    _replicas.update(model.modules())
    if way.size == 1:
        return model
    broadcast_all(list(tensors.values()))
    for tensor in tensors.values():
        _statistics_of[tensor] = batch_statistics
    gradients.Reducer(list(model.parameters()), way)
    model.register_forward_pre_hook(_enter, prepend=True, with_kwargs=True)
    model.register_forward_hook(_leave, always_call=True)
    _mode_of[model] = batch_statistics
    step_in(torch.autograd, "backward", gradients.backward)
    step_in(nn.functional, "batch_norm", _batch_norm)
    return model


def _sound_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers by name, if the model can be replicated."""
    for name, module in model.named_modules():
        if module in _replicas:
            raise ReplicatedTwiceError(f"{name or 'the model'} ({type(module).__name__})")
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise TrainingError(
                f"{name} has no shape yet; call the model once before instep.replicate."
            )
        check_reachable(tensor)
    return tensors


# Hooks are module-level functions that look the module up: a deep copy or an unpickled model
# carries them and is not a replica.


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if module in _mode_of:
        enter_forward((args, kwargs))
        _calls.append(_mode_of[module])


def _leave(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
    if module in _mode_of:
        _calls.pop()
        mark(output, leave_forward())


def _batch_norm(
    original: Function,
    input: Tensor,  # noqa: A002  (torch's name)
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    rest = (input, running_mean, running_var, weight, bias, training, *args)
    if training and _statistics(running_mean, weight) == "global":
        return batchnorm.batch_norm(*rest, **kwargs)
    output: Tensor = original(*rest, **kwargs)
    return output


def _statistics(*tensors: Tensor | None) -> BatchStatistics | None:
    for tensor in tensors:
        if tensor is not None and tensor in _statistics_of:
            known: BatchStatistics = _statistics_of[tensor]
            return known
    return _calls[-1] if _calls else None
