"""Items that a forward adds to the dicts among its arguments, replaces in them, or removes.

The models of sentence-transformers and of tensordict return their results so. A sharded call gets
dicts of its own rows; what it has written there is joined like an output, and written into the
script's dicts.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor

from instep.training.pytree import ValueSnapshot, attributes_of, is_cache, is_value
from instep.unedited.sharded_call.plan.bound_call import BoundCall


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


class ArgumentWatch:
    """The arguments of a call, before a forward that may change them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._arguments = [*args, *kwargs.values()]
        self._dicts = _dicts(self._arguments)
        self._given = [dict(each.items()) for each in self._dicts]
        self._rest = [ValueSnapshot(value) for value in self._watched() if _is_mutable(value)]

    def _watched(self) -> list[Any]:
        """All but the items of the dicts."""
        others = [each for each in self._arguments if not _is_open(each)]
        inside = chain.from_iterable(given.values() for given in self._given)
        return [*others, *inside, [_plain_attributes(each) for each in self._dicts]]

    def has_other_changes(self) -> bool:
        """Whether something else was changed than items of the dicts."""
        return not all(snapshot.is_current() for snapshot in self._rest)

    def result(self, output: Any) -> Any:
        """`output`, or `Written` where items were changed."""
        items, removed = [], []
        for each, given in zip(self._dicts, self._given, strict=True):
            new = {k: v for k, v in each.items() if k not in given or v is not given[k]}
            items.append(new)
            removed.append(dict.fromkeys(k for k in given if k not in each))
        if not any(items) and not any(removed):
            return output
        places = [k for k, each in enumerate(self._arguments) if each is output]
        returned = places[0] if places else None
        kept = output if returned is None else None
        return Written(kept, returned, tuple(items), tuple(removed))


class ArgumentDicts:
    """The items of the dicts among the arguments of a call, to be set back."""

    def __init__(self, call: BoundCall) -> None:
        self._items = [(each, dict(each)) for each in _dicts([*call.args, *call.kwargs.values()])]

    def restore(self) -> None:
        """Let each have the items again that it had."""
        for each, items in self._items:
            for key in [key for key in each if key not in items]:
                del each[key]
            for key, value in items.items():
                if key not in each or each[key] is not value:
                    each[key] = value


def run_whole(call: BoundCall) -> Any:
    """The whole forward with copies of the script's dicts; returns what `result` does."""
    fresh = call.with_leaves(call.leaves)
    watch = ArgumentWatch(fresh.args, fresh.kwargs)
    return watch.result(fresh.run_whole())


def write_back(value: Any, call: BoundCall) -> Any:
    """Write into the script's dicts what a sharded call wrote; returns what the call returns."""
    if not isinstance(value, Written):
        return value
    arguments = [*call.args, *call.kwargs.values()]
    for each, items, removed in zip(_dicts(arguments), value.items, value.removed, strict=True):
        for key in removed:
            each.pop(key, None)
        each.update(items)
    return value.output if value.returned is None else arguments[value.returned]


def _dicts(arguments: Sequence[Any]) -> list[MutableMapping[Any, Any]]:
    return [each for each in arguments if _is_open(each)]


def _is_open(argument: Any) -> bool:
    return isinstance(argument, MutableMapping) and not is_cache(argument)


def _plain_attributes(value: Any) -> dict[str, Any]:
    return {name: v for name, v in attributes_of(value).items() if is_value(v)}


def _is_mutable(argument: Any) -> bool:
    return not (isinstance(argument, Tensor) or is_value(argument))
