"""The parameters and buffers that each shard of a rank sees in a module.

Each shard has aliases of the parameters. The buffers belong to the first shard, as they do to the
only one of another rank; the others have copies of them, which are forgotten.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class _Slot(NamedTuple):
    """A name in the table of a part of the module, or a place where it keeps a parameter."""

    table: Any
    name: Any
    value: Tensor


class ModuleTables:
    """The tables of a module and its parts during one call.

    Args:
        parts: the module that is called, and those in it.
        shards: how many this rank has.
        stored: parameters that the module keeps beside its tables, too: what they are in, their
            name or index there, and the parameter.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        shards: int,
        stored: Sequence[tuple[Any, Any, Tensor]],
    ) -> None:
        self._recurrent = [part for part in parts if isinstance(part, nn.RNNBase)]
        self._parameters: list[_Slot] = []
        self._frozen: list[_Slot] = []
        for part in parts:
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    slots = self._parameters if parameter.requires_grad else self._frozen
                    slots.append(_Slot(part._parameters, name, parameter))
        self._stored = [_Slot(*place) for place in stored]
        self._replaced: list[_Slot] = []
        self._aliases: list[dict[int, Tensor]] = []
        self._addresses: list[int] = []
        self._buffers: list[_Slot] = []
        self._copies: list[list[Tensor]] = []
        """Of each shard, its buffers; those of the first are the module's."""
        self._shown = 0
        if shards > 1:
            self._buffers = [
                _Slot(part._buffers, name, buffer)
                for part in parts
                for name, buffer in part._buffers.items()
                if buffer is not None
            ]
            own = [slot.value for slot in self._buffers]
            others = [[buffer.detach().clone() for buffer in own] for _ in range(shards - 1)]
            self._copies = [own, *others]

    def trained_parameters(self) -> list[Tensor]:
        """The parameters that require a gradient, each once."""
        slots = (*self._parameters, *self._stored)
        return list({id(slot.value): slot.value for slot in slots}.values())

    def replace(self, parameters: Sequence[Tensor], aliases: Sequence[Sequence[Tensor]]) -> None:
        """For each shard, what `show` puts in the place of these parameters."""
        keys = list(map(id, parameters))
        self._aliases = [dict(zip(keys, each, strict=True)) for each in aliases]
        places = [*self._parameters, *self._stored]
        self._replaced = [slot for slot in places if id(slot.value) in self._aliases[0]]
        self._addresses = _addresses_of(self._aliases[0].values())

    def show(self, shard: int) -> None:
        """From now on the module has the parameters and buffers of this shard."""
        if self._copies and shard != self._shown:
            self._copies[self._shown] = [slot.table[slot.name] for slot in self._buffers]
            for slot, copy in zip(self._buffers, self._copies[shard], strict=True):
                slot.table[slot.name] = copy
        self._shown = shard
        if self._aliases:
            aliases = self._aliases[shard]
            for table, name, parameter in self._replaced:
                table[name] = aliases[id(parameter)]
            _refresh_flat_weights(self._recurrent)

    def find_new_parameter(self) -> str:
        """The name of one that the forward of the shown shard has made; "" if there is none."""
        if not self._aliases:  # then it stays
            return ""
        aliases = self._aliases[self._shown]
        for table, name, parameter in self._parameters:
            # A script's table has no `get`.
            if name not in table or table[name] is not aliases[id(parameter)]:
                return str(name)
        return ""

    def find_trained_parameter(self) -> str:
        """The name of one that was frozen and is trained since the forward; "" if there is none."""
        return next((str(slot.name) for slot in self._frozen if slot.value.requires_grad), "")

    def restore(self) -> None:
        """Show the module's own parameters again, and the buffers as the first shard left them."""
        own = self._aliases[0] if self._aliases else {}
        pairs = zip(own, self._addresses, _addresses_of(own.values()), strict=True)
        moved = {key for key, before, after in pairs if before != after}  # by `weight.data = ...`
        for slot in self._replaced if moved else ():
            if id(slot.value) in moved:
                slot.value.data = own[id(slot.value)].data
        self._aliases = self._aliases and [{id(s.value): s.value for s in self._replaced}]
        self.show(0)


def _addresses_of(tensors: Collection[Tensor]) -> list[int]:
    """Where the memory of each begins, in a tenth of the time that `address_of` takes."""
    try:
        return [tensor.data_ptr() for tensor in tensors]
    except (NotImplementedError, RuntimeError):
        return [address_of(tensor) for tensor in tensors]


def address_of(tensor: Tensor) -> int:
    """Where a tensor's memory begins; 0 if it is not a plain one."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.data_ptr() if is_plain else 0


def _refresh_flat_weights(recurrent: Sequence[nn.RNNBase]) -> None:
    """Recurrent layers keep a list of their weights, and weak references by which their forward
    tells whether it is out of date. To read a parametrised weight would compute it, which may move
    its buffers: it is out of date in each forward."""
    for part in recurrent:
        weights = [
            part._parameters.get(name, part.__dict__.get(name, kept))
            for name, kept in zip(part._flat_weights_names, part._flat_weights, strict=True)
        ]
        part._flat_weights = weights
        part._flat_weight_refs = [None if w is None else weakref.ref(w) for w in weights]
