"""Parameters that are updated together: each rank its parts, which then travel to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from instep.distributed.communication.transport import Transport
from instep.training.errors import CannotShardError
from instep.training.optimizer_shards.host_copy import HostCopy
from instep.training.optimizer_shards.layout import Part

Divide = Callable[[Sequence[Tensor], int], list[list[Part]]]
State = dict[str, Any]


class StepBucket:
    """Parameters of one group, dtype and device, divided between the ranks.

    `slices` are this rank's parts as the optimizer knows them: views of the parameters. A part
    that is a whole parameter keeps its shape.
    """

    def __init__(self, parameters: Sequence[Tensor], divide: Divide, transport: Transport) -> None:
        self.parameters = list(parameters)
        self._transport = transport
        self._parts = divide(self.parameters, transport.size)
        self._own = self._parts[transport.rank]
        self._layouts = [_layout(parameter) for parameter in self.parameters]
        self._copy = HostCopy()
        self.slices: list[Tensor] = []

    def update_slices(self, state: dict[Tensor, State]) -> None:
        """Let the slices have the parameters' memory; `state`: the slices' state."""
        self._check()
        if not self._copy.slices:
            addresses = [each.data_ptr() for each in self.slices]
            # The first step, one after a common copy, or somebody has assigned `.data`.
            if addresses != [part.address for part in self._own]:
                self._replace_slices([self._slice(p, p.parameter) for p in self._own], state)

    def prepare(self, state: dict[Tensor, State]) -> None:
        """Let the slices have the parameters' memory and gradients for a step. Collective."""
        self._check()
        self._share(state)
        self.update_slices(state)
        for part, each in zip(self._own, self.slices, strict=True):
            grad = part.parameter.grad
            each.grad = None if grad is None else self._slice(part, self._dense(part, grad))

    def gather(self) -> None:
        """Let each parameter that has a gradient have its new value on every rank. Collective.

        A backward through what was computed from the old value is an error, as in one process.
        """
        for own in self.slices:
            own.grad = None
        if self._copy.slices:
            self._copy.publish()
        else:
            self._transport.all_gather_each(
                [
                    [part.view(part.parameter) for part in parts if part.parameter.grad is not None]
                    for parts in self._parts
                ]
            )
        increment_version([each for each in self.parameters if each.grad is not None])

    def _check(self) -> None:
        for parameter, layout in zip(self.parameters, self._layouts, strict=True):  # on all ranks
            if _layout(parameter) != layout:
                raise CannotShardError(
                    f"a parameter of shape {tuple(parameter.shape)} has other strides, another "
                    "dtype or device than at the first step of its divided optimizer. Convert the "
                    "model before it, or load the optimizer's state dict into a new optimizer."
                )
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise CannotShardError(
                    "a parameter has a sparse gradient, of which instep.shard(optimizer) cannot "
                    "tell the ranks' parts. Use sparse=False, or leave this optimizer undivided."
                )

    def _share(self, state: dict[Tensor, State]) -> None:
        """Let the ranks of a host have one copy of the parameters, if they can. Collective."""
        before = self._copy.slices
        self._copy.prepare([self.parameters], lambda: self._own, self._transport, self.slices)
        slices = self._copy.slices
        if slices and slices is not before:
            pairs = zip(self._own, slices[0], strict=True)
            self._replace_slices([_in_shape(*each) for each in pairs], state)

    def _replace_slices(self, slices: list[Tensor], state: dict[Tensor, State]) -> None:
        before, self.slices = self.slices, slices
        for old, new in zip(before, slices, strict=False):
            if old in state:
                state[new] = state.pop(old)

    def full_state(self, state: dict[Tensor, State]) -> dict[Tensor, State]:
        """The state of whole parameters, on every rank. Collective."""
        known = [state.get(each, {}) for each in self.slices]
        own = [
            {name: _describe(value, each) for name, value in entries.items()}
            for entries, each in zip(known, self.slices, strict=True)
        ]
        gathered = self._transport.all_gather_object(own)
        described = [
            [*zip(parts, entries, strict=True)]
            for parts, entries in zip(self._parts, gathered, strict=True)
        ]
        full, names = _allocate(chain.from_iterable(described))
        for name, dtype in names:
            values = [
                [
                    part.view(full[part.parameter][name])
                    for part, entry in of_rank
                    if entry.get(name) is dtype
                ]
                for of_rank in described
            ]
            mine = [
                self._flat(part, entries[name])
                for part, entries, entry in zip(self._own, known, own, strict=True)
                if entry.get(name) is dtype
            ]
            for value, own_value in zip(values[self._transport.rank], mine, strict=True):
                value.copy_(own_value)
            self._transport.all_gather_each(values)
        return full

    def own_state(self, full: dict[Tensor, State]) -> Iterator[tuple[Tensor, State]]:
        """This rank's slices with their state, out of that of whole parameters."""
        for part, each in zip(self._own, self.slices, strict=True):
            if part.parameter in full:
                yield (
                    each,
                    {
                        name: self._own_value(part, value)
                        for name, value in full[part.parameter].items()
                    },
                )

    def _own_value(self, part: Part, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape != part.parameter.shape:  # such as Adam's `step`, which steps write to
            return value.clone()
        return self._slice(part, self._dense(part, value)).clone()

    def _slice(self, part: Part, tensor: Tensor) -> Tensor:
        return tensor.detach() if part.is_whole else part.view(tensor)

    def _flat(self, part: Part, value: Tensor) -> Tensor:
        """A value for each element of a slice, in the order of the parameter's memory."""
        return part.view(self._dense(part, value)) if part.is_whole else value

    def _dense(self, part: Part, tensor: Tensor) -> Tensor:
        """`tensor` with the strides of the parameter."""
        if tensor.stride() == part.parameter.stride():
            return tensor
        return torch.empty_like(part.parameter, dtype=tensor.dtype).copy_(tensor)


def _allocate(
    described: Iterable[tuple[Part, dict[str, Any]]],
) -> tuple[dict[Tensor, State], list[tuple[str, torch.dtype]]]:
    """States of whole parameters, by what the ranks tell of their parts (`_describe`): values for
    each element are still to be filled in. And the names and dtypes of these."""
    full: dict[Tensor, State] = {}
    names: dict[tuple[str, torch.dtype], None] = {}
    for part, entry in described:
        for name, value in entry.items():
            of_parameter = full.setdefault(part.parameter, {})
            if not isinstance(value, torch.dtype):
                of_parameter.setdefault(name, value.on(part.parameter.device))
                continue
            names[name, value] = None
            if name not in of_parameter:
                of_parameter[name] = torch.empty_like(part.parameter, dtype=value)
    return full, list(names)


def _in_shape(part: Part, values: Tensor) -> Tensor:
    """1-D values of a part; in the shape of the parameter if it is all of it."""
    parameter = part.parameter
    return values.as_strided(parameter.shape, parameter.stride()) if part.is_whole else values


def _layout(parameter: Tensor) -> tuple[object, ...]:
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.device


class _Value(NamedTuple):
    """A value of a state that is not one for each element, as a rank sends it."""

    value: Any
    device_type: str = ""
    """Of a tensor, which is sent by the CPU: another rank may not have the device."""

    def on(self, device: torch.device) -> Any:
        """The value; a tensor of a device of this type is on `device`."""
        return self.value.to(device) if self.device_type == device.type else self.value


def _describe(value: Any, own: Tensor) -> Any:
    """What a rank tells of a value: the dtype if it has one for each element, else a _Value."""
    if not isinstance(value, Tensor):
        return _Value(value)
    return value.dtype if value.shape == own.shape else _Value(value.to("cpu"), value.device.type)
