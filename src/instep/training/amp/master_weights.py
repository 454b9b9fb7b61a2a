"""Float32 copies of half-precision parameters, which the optimizer updates instead of them."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from instep.distributed.communication.collectives import broadcast_coalesced
from instep.distributed.communication.objects import all_gather_object
from instep.distributed.communication.transport import get_transport
from instep.training.amp.levels import HALVES
from instep.training.buckets.reducer import reducer_of
from instep.training.drift.bit_sums import bit_sums, combine
from instep.training.replicas import copy_of

_master_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Weak references to master weights by their parameters; optimizers hold the master weights."""


def master_of(parameter: Tensor) -> MasterWeight | None:
    """The master weight of a parameter, while its optimizer exists."""
    reference = _master_of.get(parameter)
    return None if reference is None else reference()


class MasterWeight:
    """A half-precision parameter of the model and its float32 copy.

    The copy begins with the digits that the parameter had before it was cast, where they are known:
    a checkpoint may be loaded before the cast.
    """

    def __init__(self, parameter: Tensor, before: Tensor | None) -> None:
        self.parameter = parameter
        value = parameter.detach() if before is None else before
        self.copy = value.to(torch.float32, copy=True).requires_grad_()
        self._version = parameter._version
        _master_of[parameter] = ref(self)
        copy_of[parameter] = ref(self.copy)

    def read_parameter(self) -> None:
        """Copy what a broadcast or a checkpoint has written into the parameter.

        An element that rounds to the parameter's keeps all its digits.
        """
        if self.parameter._version == self._version:
            return
        self.take(self.copy)
        self._version = self.parameter._version

    def take(self, digits: Tensor) -> None:
        """Take these digits where they round to the parameter, and none where they do not."""
        with torch.no_grad():
            same = digits.to(self.parameter.dtype) == self.parameter
            self.copy.copy_(torch.where(same, digits, self.parameter.to(torch.float32)))

    def write_parameter(self) -> None:
        """Round the copy into the parameter."""
        with torch.no_grad():
            self.parameter.copy_(self.copy)
        self._version = self.parameter._version

    def begin_backward(self, scale: float) -> None:
        """Prepare for a backward of a scaled loss, which adds to the copy's gradient.

        If that gradient may be this rank's part of a sum that is still to be made, it is moved to
        the parameter's gradient, which is summed.
        """
        self.read_parameter()
        kept = self.copy.grad
        if kept is None or self._is_grad_complete():
            self.parameter.grad = None
        else:
            self.parameter.grad = (kept * scale).to(self.parameter.dtype)
            self.copy.grad = None

    def scaled_grad(self) -> Tensor | None:
        """The parameter's gradient after backward, still scaled, in float32."""
        grad = self.parameter.grad
        return None if grad is None else grad.detach().to(torch.float32)

    def add_grad(self, grad: Tensor) -> None:
        """Add an unscaled gradient."""
        self.copy.grad = grad if self.copy.grad is None else self.copy.grad.add_(grad)

    def _is_grad_complete(self) -> bool:
        reducer = reducer_of.get(self.parameter)
        if reducer is None:
            return get_transport().size == 1
        return not reducer.has_partial_grad(self.parameter)


def share_digits(masters: list[MasterWeight]) -> None:
    """Give all ranks rank 0's digits: who has broadcast the parameters has broadcast no more of
    them than half precision holds. Collective."""
    if get_transport().size == 1:
        return
    for master in masters:
        master.read_parameter()
    copies = [master.copy.detach() for master in masters]
    seen = all_gather_object(([tuple(copy.shape) for copy in copies], combine(bit_sums(copies))))
    if all(each == seen[0] for each in seen) or any(each[0] != seen[0][0] for each in seen):
        return  # they are equal, or the ranks' models are not replicas
    of_rank_0 = [copy.clone() for copy in copies]
    broadcast_coalesced(of_rank_0)
    for master, digits in zip(masters, of_rank_0, strict=True):
        master.take(digits)


# ------------------------------------------------------------- state dictionaries in float32


def save_in_float32(model: nn.Module) -> None:
    """Let `state_dict` of a model and its parts hold float32, from the master weights if there are
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
            master.read_parameter()
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
