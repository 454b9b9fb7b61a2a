"""`apex.fp16_utils`: half precision by hand, as scripts had it before `amp`.

FP16_Optimizer is refused: `amp.initialize(model, optimizer, opt_level="O2")` does what it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from instep.process.torch_private.modules import BatchNorm
from instep.process.torch_private.tensors import flatten_dense_tensors, unflatten_dense_tensors
from instep.training.amp.errors import PrecisionError

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
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


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters and buffers of a module, without those of its parts."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
            if tensor.grad is not None:
                tensor.grad = tensor.grad.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model in place but for batch normalisation with weights; returns the model."""
    for module in network.modules():
        if not (isinstance(module, BatchNorm) and module.affine):
            convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """A model in float16 but for batch normalisation; it casts the tensors that it is given."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Tensor) -> Any:
        """The model's own."""
        return self.network(*(each.half() for each in inputs))


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


class LossScaler:
    """A loss scale that stays as it is."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """What a loss is multiplied by."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """False: a scale that is chosen once is never too large."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing."""

    def scale_gradient(
        self, module: nn.Module, grad_in: Sequence[Tensor], grad_out: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The gradients of a module's inputs, scaled: a backward hook."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Call backward on the scaled loss."""
        torch.autograd.backward(loss * self.loss_scale, retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that shrinks when a gradient is not finite, and grows when none was for long.

    Args:
        init_scale: the first scale.
        scale_factor: what it shrinks and grows by; it does not go below 1.
        scale_window: after so many steps without overflow it grows.
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        super().__init__(init_scale)
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.cur_iter = 0
        self.last_overflow_iter = -1

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient has a number that is not finite. Ranks that share their gradients
        find the same."""
        grads = [each.grad for each in params if each.grad is not None]
        return not all(bool(grad.isfinite().all()) for grad in grads)

    def update_scale(self, overflow: bool) -> None:
        """Count a step, and change the scale."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
