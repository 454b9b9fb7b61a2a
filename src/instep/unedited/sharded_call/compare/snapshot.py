"""The state that a forward may change besides its outputs, so that it can be run twice."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

from torch import Tensor, nn

from instep.process.torch_private.compiler import COMPILER_NOTES
from instep.process.torch_private.modules import BatchNorm, InstanceNorm
from instep.process.torch_private.tensors import set_version_counter
from instep.training.drift.bit_sums import bit_sums, is_comparable
from instep.training.pytree import versions
from instep.training.random_streams import RNGStates
from instep.unedited.objects.graph_node import is_same
from instep.unedited.sharded_call.compare import graph_difference
from instep.unedited.sharded_call.compare.rounding import relative_error
from instep.unedited.sharded_call.plan.bound_call import AttributePlace, BoundCall
from instep.unedited.sharded_call.plan.module_state.object_graph import (
    ObjectGraph,
    is_variable,
    join,
)
from instep.unedited.sharded_call.plan.whole_reasons import FREEZES, ReasonKind, WholeReason
from instep.unedited.sharded_call.run.random_numbers import TorchGeneratorStates
from instep.unedited.sharded_call.run.sharded_output import ShardedOutput
from instep.unedited.sharded_call.shards.module_tables import address_of

BufferKey = tuple[int, str]
"""Which of the modules, and the buffer's name there."""


class BufferState(NamedTuple):
    """A buffer, its memory, what was there and the node of autograd that computed it."""

    buffer: Tensor
    data: Tensor
    value: Tensor
    node: Any

    @classmethod
    def of(cls, tensor: Tensor) -> BufferState:
        """The state that this tensor has now."""
        return cls(tensor, tensor.data, tensor.detach().clone(), tensor.grad_fn)


class BufferDistance(NamedTuple):
    """How far a buffer is from the one that it should be."""

    relative: float
    """Relative to its own norm."""
    to_spread: float
    """The same, but of a running mean relative to the standard deviations: a mean may be zero by
    mathematics, as behind a layer without bias whose inputs are normed, and is then all rounding.
    """


DRAWS_OUTSIDE_TORCH = "its forward draws from numpy's or Python's random numbers"
_TRAINED, _FROZEN = "its parameters", "its frozen parameters"
_moving: WeakSet[nn.Module] = WeakSet()
"""Modules whose forward moves frozen parameters, as MoCo's second network follows the first, or
others by `.data`, as a norm that is bounded: from the next comparison on their parameters are set
back and compared as buffers are."""


def _find_unique(modules: Iterable[tuple[str, nn.Module]], table: str) -> dict[str, Tensor]:
    """The parameters or buffers in these modules' tables, each once: what `named_parameters` and
    `named_buffers` find, without their walks through the modules."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, part in modules:
        for name, tensor in getattr(part, table).items():
            if tensor is not None and id(tensor) not in found:
                found[id(tensor)] = join(path, name), tensor
    return dict(found.values())


def _without_notes(attributes: dict[str, Any]) -> dict[str, Any]:
    """These attributes of a tensor, but those that torch.compile writes there."""
    return {k: v for k, v in attributes.items() if not k.startswith(COMPILER_NOTES)}


def buffer_states(parts: Sequence[nn.Module]) -> dict[BufferKey, BufferState]:
    """The buffers of a module and its parts as they are now. The parameters of a module that moves
    them are among them."""
    moves = parts[0] in _moving
    return {
        (k, name): BufferState.of(kept)
        for k, part in enumerate(parts)
        for name, kept in (*part._buffers.items(), *part._parameters.items())
        if kept is not None and (moves or name in part._buffers)
    }


def buffer_errors(
    actual: Mapping[BufferKey, BufferState],
    expected: Mapping[BufferKey, BufferState],
    kept: Container[BufferKey],
) -> dict[BufferKey, BufferDistance]:
    """How far the buffers are apart that two forwards have left, but for those of `kept` that have
    a graph: they are joined and compared as outputs are."""
    both = actual.keys() & expected.keys()
    keys = [key for key in both if key not in kept or actual[key].node is None]
    return {key: _buffer_error(key, actual, expected) for key in keys}


def _buffer_error(
    key: BufferKey,
    actual: Mapping[BufferKey, BufferState],
    expected: Mapping[BufferKey, BufferState],
) -> BufferDistance:
    value, right = actual[key].value, expected[key].value
    part, name = key
    variance = expected.get((part, "running_var"))
    spread = 0.0
    if name == "running_mean" and variance is not None:
        spread = float(variance.value.double().sqrt().norm())
    return BufferDistance(relative_error(value, right), relative_error(value, right, spread))


class Snapshot:
    """The state before or after a forward of this call, or a backward.

    `others`: what leads to more of it, with paths (see `ObjectGraph`).
    """

    def __init__(self, call: BoundCall, others: Sequence[tuple[str, Any]] = ()) -> None:
        module, self._kept = call.module, frozenset(call.kept)
        self._names, self._parts = zip(*module.named_modules(), strict=True)
        self._parameters = {
            self._path(k, name): parameter
            for k, part in enumerate(self._parts)
            for name, parameter in part._parameters.items()  # a script's table has no iterator
        }
        modules = [*zip(self._names, self._parts, strict=True)]
        self._own = _find_unique(modules, "_parameters")
        buffers = _find_unique(modules, "_buffers")
        written_into = {**self._parameters, **buffers}
        namespaces = {path: vars(x) for path, x in written_into.items() if x is not None}
        self._attributes = {path: _without_notes(kept) for path, kept in namespaces.items()}
        """What the script has written into parameters and buffers themselves."""
        self._made = {*self._names, *self._parameters}
        self._torch, self._others = TorchGeneratorStates(), RNGStates.capture()
        self._buffer_versions = {
            buffer: buffer._version for buffer in buffers.values() if not buffer.is_inference()
        }
        self.buffers = buffer_states(self._parts)
        written = [(path, namespaces[path]) for path, kept in self._attributes.items() if kept]
        self.graph = ObjectGraph(dict(modules), [*call.functions, *others, *written])
        self._tensors = self._leaf_states() if others else []
        """Parameters, and tensors that others lead to: a backward may change them; a forward must
        not."""
        self._buffer_versions |= {x: x._version for x, *_ in self._tensors}
        self._trained = [p.requires_grad for p in self._own.values()]
        self._versions = {
            "its input": versions(call.tensors),
            **{what: versions(kept) for what, kept in self._fixed_parameters().items()},
        }
        self._by_data: list[tuple[str, list[Tensor], list[int]]] = []
        """What a forward may change without a new version, with checksums."""
        self._changed_by_data: list[str] = []
        """What of that has others since then."""

    def _fixed_parameters(self) -> dict[str, list[Tensor]]:
        """The parameters that a forward must not change."""
        kept = [] if self._parts[0] in _moving else [*self._own.values()]
        return {
            _TRAINED: [p for p in kept if p.requires_grad],
            _FROZEN: [p for p in kept if not p.requires_grad],
        }

    def _leaf_states(self) -> list[BufferState]:
        """Those of parameters and of the leaves in `graph`, without what is in `buffers`."""
        kept = {id(state.buffer) for state in self.buffers.values()}
        found = [x for x, _, _ in self.graph.tensors.values() if x.grad_fn is None]
        unique = {id(x): x for x in (*found, *self._own.values())}
        return [
            BufferState.of(x) for x in unique.values() if id(x) not in kept and not x.is_inference()
        ]

    def note_values(self, call: BoundCall) -> None:
        """Note what the forward must not change by `.data`, too: that has no new version."""
        own = {id(tensor) for tensor in (*self._own.values(), *call.module.buffers())}
        plain = [x for x in call.tensors if not isinstance(x, ShardedOutput)]
        kept = {"its input": plain, **self._fixed_parameters()}
        for key, (tensor, path, _) in self.graph.tensors.items():
            if key not in own:
                kept[f"the {path}" if is_variable(path) else f"the tensor {path}"] = [tensor]
        for what, tensors in kept.items():
            comparable = [tensor for tensor in tensors if is_comparable(tensor)]
            self._by_data.append((what, comparable, bit_sums(comparable).tolist()))

    def note_changes(self) -> None:
        """Note which of these values are others now."""
        self._changed_by_data = [
            what for what, kept, bits in self._by_data if bit_sums(kept).tolist() != bits
        ]

    def restore(self) -> None:
        """Set everything back, except inputs, and parameters that must not change."""
        self._others.restore()
        self._torch.restore()
        for (k, name), (buffer, data, value, node) in self.buffers.items():
            if node is None and buffer.grad_fn is not None:  # it was computed in place since then
                buffer.detach_()
            # A forward may assign `.data`; an observer of quantization makes room for channels.
            if buffer.shape != value.shape or address_of(buffer) != address_of(data):
                buffer.data = data
            buffer.data.copy_(value)
            part = self._parts[k]
            table: dict[str, Any] = part._parameters if name in part._parameters else part._buffers
            table[name] = buffer
        for _, data, value, _ in self._tensors:
            data.copy_(value)
        # What autograd had saved is what it was again.
        set_version_counter(tuple(self._buffer_versions), tuple(self._buffer_versions.values()))
        self.graph.restore()

    def is_random(self, after: Snapshot) -> bool:
        """Whether a forward in between drew from a generator of torch."""
        own = graph_difference.is_random(self.graph, after.graph)
        return own or not self._torch.same(after._torch)

    def draws_outside_torch(self, after: Snapshot) -> bool:
        """Whether a forward in between drew from numpy's or Python's global generators."""
        return not self._others.equals_except_torch(after._others)

    def has_other_values(self, after: Snapshot) -> bool:
        """Whether a forward in between changed a plain value that it keeps."""
        return graph_difference.has_other_values(self.graph, after.graph)

    def has_other_buffers(self, after: Snapshot) -> bool:
        """Whether a forward in between changed a buffer that is no running statistic of a layer of
        torch's."""
        return any(
            not isinstance(self._parts[k], BatchNorm | InstanceNorm)
            and (k, name) in after.buffers
            and not state.value.equal(after.buffers[k, name].value)
            for (k, name), state in self.buffers.items()
        )

    def has_changed(self, after: Snapshot) -> bool:
        """Whether anything has changed in between, what `note_changes` has noted included."""
        return (
            graph_difference.has_changed(self.graph, after.graph)
            or bool(self._changed_by_data)
            or self.buffers.keys() != after.buffers.keys()
            or any(not x.value.equal(after.buffers[k].value) for k, x in self.buffers.items())
        )

    def find_change(self, after: Snapshot, kept: Sequence[AttributePlace]) -> WholeReason | None:
        """Say what a forward in between changed that rules out sharding, what `note_changes` has
        noted included; None if nothing.

        `kept`: attributes that it may set to tensors.
        """
        return (
            self._find_new_part(after)
            or self._find_side_effect(after)
            or self._find_write(after)
            or WholeReason.of(self._find_graph_change(after, kept))
        )

    def _find_new_part(self, after: Snapshot) -> WholeReason | None:
        for made in sorted(after._made - self._made):
            what = "part" if made in after._names else "parameter"
            return WholeReason(f"its forward makes the {what} {made}", ReasonKind.MAKES_PART)
        for name, parameter in after._parameters.items():
            if parameter is not self._parameters[name]:
                text = f"its forward makes the parameter {name} anew"
                return WholeReason(text, ReasonKind.SETS_UP)
        return None

    def _find_side_effect(self, after: Snapshot) -> WholeReason | None:
        for name, attributes in after._attributes.items():
            if not is_same(attributes, self._attributes.get(name, {})):
                what = "parameter" if name in self._parameters else "buffer"
                text = f"its forward sets attributes of the {what} {name}"
                return WholeReason(text, ReasonKind.SIDE_EFFECT)
        for key, state in self.buffers.items():
            # What was computed anew is joined as attributes are.
            is_same_object = key in after.buffers and after.buffers[key].buffer is state.buffer
            if is_same_object and state.node is not after.buffers[key].node:
                text = f"its forward computes its buffer {self._path(*key)} in place, with a graph"
                return WholeReason(text, ReasonKind.LASTING)
        return FREEZES if self._trained != after._trained else None

    def _find_write(self, after: Snapshot) -> WholeReason | None:
        changed = [what for what, seen in self._versions.items() if seen != after._versions[what]]
        moved = {*changed} <= {_FROZEN}  # an optimizer inside of a forward has a state of its own
        changed += self._changed_by_data
        if not changed:
            return None
        kind = ReasonKind.LASTING
        if changed[0] in (_TRAINED, _FROZEN):
            kind = ReasonKind.CHANGES_PARAMETERS
        if moved and {*changed} <= {_TRAINED, _FROZEN}:
            kind = ReasonKind.MOVES_PARAMETERS
            _moving.add(self._parts[0])
        return WholeReason(f"its forward changes {changed[0]} in place", kind)

    def _find_graph_change(self, after: Snapshot, kept: Sequence[AttributePlace]) -> str | None:
        places = {(self._parts[k], name) for k, name in kept}
        change = graph_difference.find_change(self.graph, after.graph, self._parts, places)
        if change is None and (taken := after.graph.find_iterator()):
            return f"its forward may take the next value of a {taken} for a part of the batch"
        if change is None and (path := after.graph.find_shared_memory()):
            return f"its forward may write to memory that processes share ({path})"
        return change

    def buffer_errors(self, expected: Snapshot) -> dict[BufferKey, BufferDistance]:
        """How far the buffers are apart that two forwards have left (see `buffer_errors`)."""
        return buffer_errors(self.buffers, expected.buffers, self._kept)

    def find_difference(
        self, expected: Snapshot, before: Snapshot, far: Container[BufferKey], tolerance: float
    ) -> str | None:
        """Say in which state two forwards from the state `before` have not left the same; None if
        in all.

        `far`: the buffers that are further apart than rounding explains.
        """
        if not self._torch.same(expected._torch):
            return "its random numbers are not those of the whole batch"
        if self.draws_outside_torch(expected):
            return DRAWS_OUTSIDE_TORCH
        if others := self.buffers.keys() ^ expected.buffers.keys():
            return f"its forward makes the buffer {self._path(*min(others))}"
        for key in self.buffers:
            if key in far:
                kind = "parameter" if key[1] in self._parts[key[0]]._parameters else "buffer"
                return f"its {kind} {self._path(*key)} differs"
        return graph_difference.find_difference(self.graph, expected.graph, before.graph, tolerance)

    def _path(self, part: int, name: str) -> str:
        return join(self._names[part], name)
