"""Of which rows the normalising layers of replicas take their statistics: the patches of torch's
functions that compute them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm as torch_batchnorm
from torch.utils.weak import WeakTensorKeyDictionary

from instep.distributed import numbers
from instep.distributed.communication.transport import get_transport
from instep.distributed.flight_record.recorder import recorder
from instep.distributed.flight_record.script_line import warn_at_script_line
from instep.errors import TrainingError
from instep.process.patching import Function, Patch, PatchHandle
from instep.process.process_value import ProcessValue
from instep.process.torch_private.compiler import disable_compile
from instep.process.torch_private.modules import BatchNorm, InstanceNorm
from instep.training import forward_calls
from instep.training.batches.registry import may_be_share, note_collective
from instep.training.forward_calls import Scope, replica_of_part
from instep.training.normalization import batchnorm

statistics_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Of which rows a normalising layer takes the statistics, by its parameters and buffers."""
_has_warned = ProcessValue(False)


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
    scope = _scope(running_mean, weight) if training else None
    if scope == "global":
        return batchnorm.batch_norm(*rest, **kwargs)
    if training and scope is None and running_mean is not None and not torch.is_grad_enabled():
        _look_at_other(input)
    try:
        output: Tensor = original(*rest, **kwargs)
    except ValueError:
        if training and scope is None:
            _check_other(input)
        raise
    return output


@disable_compile
def _look_at_other(x: Tensor) -> None:
    """Warn once if this rank's share of a batch is in the statistics of a model in no replica."""
    if _has_warned.value or get_transport().size == 1 or not may_be_share(x):
        return
    _has_warned.value = True
    warn_at_script_line(
        "a model that is no replica is called in training mode with this rank's share of a batch: "
        "its batch statistics stay this rank's own. Call instep.replicate(model) before, as for "
        "torch.optim.swa_utils.update_bn(loader, model). [INS708]"
    )


def _check_other(x: Tensor) -> None:
    """Raise TrainingError where torch refuses this rank's share of a batch, which is one row."""
    if len(x) == 1 and get_transport().size > 1 and may_be_share(x):
        raise TrainingError(
            "batch normalisation in training needs more than one value per channel, and this "
            "rank has one row of the batch. The model is no replica, so its statistics are of "
            "this rank's rows only. Call instep.replicate(model) before, as for "
            "torch.optim.swa_utils.update_bn(loader, model), or model.eval(). [INS708]"
        )


def _sync_batch_norm(original: Function, module: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """A replica's nn.SyncBatchNorm is a batch normalisation like any other, on the CPU too."""
    is_own = module in replica_of_part or _is_trial()
    output: Tensor = (BatchNorm.forward if is_own else original)(module, x)
    return output


def _instance_norm(
    original: Function,
    input: Tensor,  # noqa: A002  (torch's name)
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Running statistics become the mean over the instances of the whole batch."""
    rest = (weight, bias, use_input_stats, *args)
    is_global = use_input_stats and _scope(running_mean, weight) == "global"
    if running_mean is None or running_var is None or not is_global:
        output: Tensor = original(input, running_mean, running_var, *rest, **kwargs)
        return output
    own = running_mean.clone(), running_var.clone()
    output = original(input, *own, *rest, **kwargs)
    _write_mean((running_mean, running_var), own, len(input))
    return output


@disable_compile
def _write_mean(tensors: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], rows: int) -> None:
    """Write into `tensors` the mean over all rows, from `own`, the mean over this rank's."""
    if not torch.is_grad_enabled():
        note_collective()
    if forward_calls.current_candidates().is_placeholder:
        rows, own = 0, (torch.zeros_like(own[0]), torch.zeros_like(own[1]))
    mine = numbers.join([each.detach().double() * rows for each in own], rows)
    with recorder.with_detail("running statistics"):
        total = numbers.sum_over_ranks(mine, get_transport())
    means = numbers.to_tensor(total[:-1] / total[-1], torch.float64).split(len(own[0]))
    with torch.no_grad():
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean)


def _is_trial() -> bool:
    call = forward_calls.current()
    return call is not None and call.trial is not None


def _scope(*tensors: Tensor | None) -> Scope | None:
    if _is_trial():
        return "rank"
    for tensor in tensors:
        if tensor is not None and tensor in statistics_of:
            known: Scope = statistics_of[tensor]
            return known
    call = forward_calls.current()
    return None if call is None else call.statistics


PATCHES = [
    Patch(torch_batchnorm.SyncBatchNorm, "forward", _sync_batch_norm, compile="skip"),
    Patch(nn.functional, "batch_norm", _batch_norm, compile="skip"),
]


def patch_tracked_instance_norm(model: nn.Module) -> None:
    """Replace the function of instance normalisation if `model` tracks its statistics: compiled
    models have a graph less without it."""
    layers = (layer for layer in model.modules() if isinstance(layer, InstanceNorm))
    if any(layer.track_running_stats for layer in layers):
        _patch_instance_norm()


@functools.cache
def _patch_instance_norm() -> None:
    PatchHandle([Patch(nn.functional, "instance_norm", _instance_norm, compile="skip")])
