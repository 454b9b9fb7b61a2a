"""`apex.fp16_utils`: half precision by hand, as scripts had it before `amp`.

FP16_Optimizer is refused: `amp.initialize(model, optimizer, opt_level="O2")` does what it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from instep.process.torch_private import BatchNorm, flatten_dense_tensors, unflatten_dense_tensors
from instep.training.amp.errors import PrecisionError

__all__ = [
    "BN_convert_float",
    "FP16_Optimizer",
    "clip_grad_norm",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]


class tofp16(nn.Module):  # noqa: N801  # Apex's name
    """A module that casts its input to float16."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Of any shape."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:  # noqa: N802  # Apex's name
    """Cast all batch normalisation in a module back to float32, in place; returns the module."""
    for each in module.modules():
        if isinstance(each, BatchNorm):
            each.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """The module in float16 but for batch normalisation, behind a cast of its input."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """A model's parameters that are trained, and float32 copies of them for the optimizer.

    `flat_master`: one copy for all, 1-D; they must have one dtype.
    """
    model_params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    if flat_master:
        flat = flatten_dense_tensors([p.detach() for p in model_params]).float()
        masters: list[Tensor] = [nn.Parameter(flat)]
    else:
        masters = [nn.Parameter(p.detach().clone().float()) for p in model_params]
    for master in masters:
        master.grad = torch.zeros_like(master) if flat_master else None
    return model_params, masters


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of the parameters to those of their float32 copies."""
    grads = [p.grad for p in model_params]
    if flat_master:
        present = [grad for grad in grads if grad is not None]
        master_params[0].grad = flatten_dense_tensors(present).to(master_params[0].dtype)
        return
    for master, grad in zip(master_params, grads, strict=True):
        master.grad = None if grad is None else grad.detach().to(master.dtype)


def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the float32 copies to the parameters."""
    values: Sequence[Tensor] = master_params
    if flat_master:
        values = unflatten_dense_tensors(master_params[0].detach(), tuple(model_params))
    with torch.no_grad():
        for parameter, value in zip(model_params, values, strict=True):
            parameter.copy_(value)


def to_python_float(t: Any) -> Any:
    """The number in a tensor, or the first of a list."""
    return t.item() if hasattr(t, "item") else t[0]


class FP16_Optimizer:  # noqa: N801  # Apex's name
    """Refused: raises PrecisionError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise PrecisionError(
            "apex.fp16_utils.FP16_Optimizer is not there. "
            'amp.initialize(model, optimizer, opt_level="O2") keeps float32 master weights.'
        )
