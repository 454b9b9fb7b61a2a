"""Float32 copies of half-precision parameters: what the optimizer steps instead of them."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from instep.distributed.communication.transport import get_transport
from instep.training.amp.levels import HALVES
from instep.training.buckets.reducer import reducer_of

_master_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Weak references to masters, by their parameters; optimizers hold the masters."""


def master_of(parameter: Tensor) -> Master | None:
    """The master of a parameter, while its optimizer lives."""
    reference = _master_of.get(parameter)
    return None if reference is None else reference()


class Master:
    """A half-precision parameter of the model and its float32 copy."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.copy = parameter.detach().to(torch.float32).requires_grad_()
        self._version = parameter._version
        _master_of[parameter] = ref(self)

    def follow(self) -> None:
        """Take over what somebody else wrote into the parameter: a broadcast, a checkpoint.

        An element that the copy rounds to is left as it is, with all its digits.
        """
        if self.parameter._version == self._version:
            return
        with torch.no_grad():
            same = self.copy.to(self.parameter.dtype) == self.parameter
            self.copy.copy_(torch.where(same, self.copy, self.parameter.to(torch.float32)))
        self._version = self.parameter._version

    def lead(self) -> None:
        """Round the copy into the parameter."""
        with torch.no_grad():
            self.parameter.copy_(self.copy)
        self._version = self.parameter._version

    def begin(self, scale: float) -> None:
        """Before a backward of a scaled loss: what is in the copy's gradient will be added to.

        Where it may be this rank's part of a sum over ranks that is still to come, it goes through
        the parameter's gradient once more, for whoever sums that.
        """
        self.follow()
        kept = self.copy.grad
        if kept is None or self._grad_is_whole():
            self.parameter.grad = None
        else:
            self.parameter.grad = (kept * scale).to(self.parameter.dtype)
            self.copy.grad = None

    def take(self) -> Tensor | None:
        """After it: the parameter's gradient, still scaled, in float32."""
        grad = self.parameter.grad
        return None if grad is None else grad.detach().to(torch.float32)

    def keep(self, grad: Tensor) -> None:
        """Add a gradient that is no longer scaled."""
        self.copy.grad = grad if self.copy.grad is None else self.copy.grad.add_(grad)

    def _grad_is_whole(self) -> bool:
        reducer = reducer_of.get(self.parameter)
        if reducer is None:
            return get_transport().size == 1
        return not reducer.has_partial_grad(self.parameter)


# --------------------------------------------------------------- a model's state is in float32


def save_in_float32(model: nn.Module) -> None:
    """Let `state_dict` of a model and its parts hold float32: the master copies where there are
    any, so that a checkpoint loses no digit."""
    for module in model.modules():
        module.register_state_dict_post_hook(_to_float32)
        module.register_load_state_dict_pre_hook(_from_float32)


def _to_float32(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for name, tensor in _own(module).items():
        key = prefix + name
        if key not in state or tensor is None or tensor.dtype not in HALVES:
            continue
        master = master_of(tensor)
        if master is None:
            state[key] = tensor.detach().to(torch.float32)
        else:
            master.follow()
            state[key] = master.copy.detach()


def _from_float32(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name, tensor in _own(module).items():
        given = state.get(prefix + name)
        master = None if tensor is None else master_of(tensor)
        if master is not None and isinstance(given, Tensor) and given.shape == tensor.shape:
            with torch.no_grad():
                master.copy.copy_(given)


def _own(module: nn.Module) -> dict[str, Any]:
    return {**module._parameters, **module._buffers}
