"""Batch statistics inside of a divided call: those of the whole batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from instep.process.patching import Function
from instep.process.torch_compile import disable_compile
from instep.training import batchnorm
from instep.unedited.sharded_call import region


def batch_norm(
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
    """torch.nn.functional.batch_norm."""
    answer = _of_whole_batch if training and region.is_inside() else original
    output: Tensor = answer(
        input, running_mean, running_var, weight, bias, training, *args, **kwargs
    )
    return output


@disable_compile
def _of_whole_batch(*args: Any, **kwargs: Any) -> Tensor:
    return batchnorm.batch_norm(*args, **kwargs)


def sync_batch_norm(original: Function, module: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """torch.nn.SyncBatchNorm.forward: to the script there is one process, whose batch is whole."""
    output: Tensor = _BatchNorm.forward(module, x)
    return output
