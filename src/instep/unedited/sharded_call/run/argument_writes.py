"""What a forward leaves for the script beside its outputs, and is joined as they are.

- Items that it adds to the dicts among its arguments, replaces in them, or removes. The models of
  sentence-transformers and of tensordict return their results so. A sharded call gets dicts of its
  own rows; what it has written there is written into the script's dicts.
- Tensors to which it sets attributes of its module and the parts: a term of the loss, say. A buffer
  counts as one where it is computed with a graph; others are state, compared by their values.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from typing import Any

from torch import Tensor, nn

from instep.training.pytree import (
    PLAIN,
    ValueSnapshot,
    attributes_of,
    flatten,
    is_cache,
    is_column,
    is_value,
    leaves_of,
    unflatten,
)
from instep.unedited.objects.graph_node import HOOK_TABLES, is_table
from instep.unedited.sharded_call.plan.bound_call import AttributePlace, BoundCall
from instep.unedited.sharded_call.plan.module_state.module_properties import computes_weight
from instep.unedited.sharded_call.run.sharded_output import ShardedOutput


@dataclass(frozen=True)
class Written:
    """What a forward returned, and what it wrote into its arguments."""

    output: Any
    """None where it returned an argument."""
    returned: int | None
    """Which of the arguments it returned."""
    items: tuple[dict[Any, Any], ...]
    """Of each dict, the items that are new or replaced."""
    removed: tuple[dict[Any, None], ...]
    """Of each dict, the keys that it has no longer."""
    kept: dict[AttributePlace, Any]
    """The attributes that were looked at: last, so that their tensors are the last ones."""


class Unset(Enum):
    """In place of what is in an attribute that the forward did not set."""

    UNSET = auto()


class ArgumentWatch:
    """The arguments of a call, and the attributes in which it is known to keep tensors, before a
    forward that may change them."""

    def __init__(self, call: BoundCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call, self._attributes = call, _attributes(call)
        self._arguments = [*args, *kwargs.values()]
        self._dicts = _dicts(self._arguments)
        self._given = [dict(each.items()) for each in self._dicts]
        self._plain = list(map(_plain_attributes, self._dicts))
        self._rest = [ValueSnapshot(value) for value in self._watched() if _is_mutable(value)]

    def _watched(self) -> list[Any]:
        """All but the dicts."""
        others = [each for each in self._arguments if not _is_open(each)]
        inside = chain.from_iterable(given.values() for given in self._given)
        return [*others, *inside]

    def has_other_changes(self) -> bool:
        """Whether something else was changed than items of the dicts."""
        has_attributes = self._plain == list(map(_plain_attributes, self._dicts))
        return not (has_attributes and all(snapshot.is_current() for snapshot in self._rest))

    def result(self, output: Any, found: Sequence[AttributePlace] = ()) -> Any:
        """`output`, or `Written` where items were changed, or the call's module keeps tensors in
        attributes; `found`: those of which that was not known."""
        items, removed = [], []
        for each, given in zip(self._dicts, self._given, strict=True):
            new = {k: v for k, v in each.items() if k not in given or v is not given[k]}
            items.append(new)
            removed.append(dict.fromkeys(k for k in given if k not in each))
        kept = {
            place: _unset(value) if value is self._attributes.get(place, Unset.UNSET) else value
            for place, value in _attributes(self._call, found).items()
        }
        if not any(items) and not any(removed) and not kept:
            return output
        places = [k for k, each in enumerate(self._arguments) if each is output]
        returned = places[0] if places else None
        given_back = output if returned is None else None
        return Written(given_back, returned, tuple(items), tuple(removed), kept)

    def restore_items(self) -> None:
        """Let each of the dicts have the items again that it had."""
        for each, items in zip(self._dicts, self._given, strict=True):
            for key in [key for key in each if key not in items]:
                del each[key]
            for key, value in items.items():
                if key not in each or each[key] is not value:
                    each[key] = value


def run_whole(call: BoundCall) -> Any:
    """The whole forward with copies of the script's dicts; returns what `result` does."""
    fresh = call.with_leaves(call.leaves)
    watch = ArgumentWatch(fresh, fresh.args, fresh.kwargs)
    return watch.result(fresh.run_whole())


def write_back(value: Any, call: BoundCall) -> Any:
    """Write into the script's dicts and the module's attributes what a sharded call wrote; returns
    what the call returns."""
    if not isinstance(value, Written):
        return value
    arguments = [*call.args, *call.kwargs.values()]
    for each, items, removed in zip(_dicts(arguments), value.items, value.removed, strict=True):
        for key in removed:
            if key in each:  # a dict may be given twice
                del each[key]
        for key, item in items.items():
            each[key] = item
    for (part, name), kept in value.kept.items():
        if not any(isinstance(leaf, Unset) for leaf in leaves_of(kept)):
            namespace = _namespace(call.parts[part], name)
            is_rows = isinstance(kept, ShardedOutput) and namespace is not call.parts[part].__dict__
            namespace[name] = kept.full_tensor() if is_rows else kept
    return value.output if value.returned is None else arguments[value.returned]


def with_tensor_attributes(output: Any, call: BoundCall) -> Any:
    """What a call returned to the script, and the attributes in which it keeps tensors."""
    return Written(output, None, (), (), _attributes(call)) if call.kept else output


def attributes_with_graphs(
    call: BoundCall, places: Iterable[AttributePlace]
) -> set[AttributePlace]:
    """Those of these attributes whose tensors have a graph, from which a forward may go on."""
    return {
        (part, name)
        for part, name in places
        for leaf in leaves_of(attribute_value(call.parts[part], name))
        if type(leaf) is Tensor and leaf.grad_fn is not None
    }


class TensorAttributes:
    """The attributes of a call's module before a forward that may set some to tensors."""

    def __init__(self, call: BoundCall) -> None:
        self._call = call
        self._before = [{**part._buffers, **part.__dict__} for part in call.parts]

    def find(self) -> tuple[AttributePlace, ...]:
        """The attributes that were set to tensors, or to containers of tensors and values, and the
        buffers that were set to tensors with a graph."""
        return tuple(
            (k, name)
            for k, (part, before) in enumerate(zip(self._call.parts, self._before, strict=True))
            for name, value in (*part.__dict__.items(), *_computed_buffers(part))
            if value is not before.get(name)
            and name not in HOOK_TABLES
            and not is_table(part, name)
            and not isinstance(value, PLAIN)
            and not computes_weight(part, name)
            and has_only_tensors(value)
        )


def has_only_tensors(value: Any) -> bool:
    """Whether this is a tensor, or some in containers, and beside them only plain values."""
    leaves = leaves_of(value)
    return any(isinstance(leaf, Tensor) for leaf in leaves) and all(
        isinstance(leaf, Tensor) or is_value(leaf) or is_column(leaf) for leaf in leaves
    )


def _unset(value: Any) -> Any:
    leaves, structure = flatten(value)
    return unflatten([Unset.UNSET] * len(leaves), structure)


def _attributes(
    call: BoundCall, others: Sequence[AttributePlace] = ()
) -> dict[AttributePlace, Any]:
    places = (*call.kept, *others)
    return {(k, name): attribute_value(call.parts[k], name) for k, name in places}


def attribute_value(part: nn.Module, name: str) -> Any:
    """What is in an attribute that a forward may set to tensors, or in such a buffer; None if
    nothing."""
    return _namespace(part, name).get(name)


def _namespace(part: nn.Module, name: str) -> dict[str, Any]:
    return part._buffers if name in part._buffers else part.__dict__


def _computed_buffers(part: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers of a module that have a graph, by name."""
    buffers = part._buffers.items()
    return [(name, x) for name, x in buffers if x is not None and x.grad_fn is not None]


def find_computed_buffer(call: BoundCall, nodes: Container[int]) -> str:
    """The name of a buffer of the call's module that was computed by these nodes of autograd, and
    that its forward is not known to set so; "" if there is none."""
    for k, part in enumerate(call.parts):
        for name, buffer in _computed_buffers(part) if part._buffers else ():
            node = buffer.grad_fn
            if (k, name) not in call.kept and node is not None and node._sequence_nr() in nodes:
                return name
    return ""


def _dicts(arguments: Sequence[Any]) -> list[MutableMapping[Any, Any]]:
    return [each for each in arguments if _is_open(each)]


def _is_open(argument: Any) -> bool:
    return isinstance(argument, MutableMapping) and not is_cache(argument)


def _plain_attributes(value: Any) -> dict[str, Any]:
    return {name: v for name, v in attributes_of(value).items() if is_value(v)}


def _is_mutable(argument: Any) -> bool:
    return not (isinstance(argument, Tensor) or is_value(argument))
