"""Attributes of a module that change between its calls: flags, numbers, and which objects it has.

They are looked at before each call and after it. What the script changes in between calls for a
comparison; what a forward changes is compared where the call is (see `CacheEntry.is_sampled`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from itertools import chain
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import numpy as np
from torch import nn

from instep.training.pytree import PLAIN
from instep.unedited.objects.code_changes import CodeChanges
from instep.unedited.objects.file_changes import FileChanges
from instep.unedited.objects.graph_node import HOOK_TABLES
from instep.unedited.objects.namespaces import (
    OTHER_OBJECT,
    Counters,
    Items,
    Key,
    Table,
    changed_tables,
    is_sequence,
    table_of,
    table_of_class,
)
from instep.unedited.objects.number_expressions import NumberChanges, NumberExpressions
from instep.unedited.objects.script_code import is_of_script
from instep.unedited.sharded_call.plan.module_state.object_graph import ObjectGraph
from instep.unedited.sharded_call.plan.module_state.readable_attributes import readable_attributes

MAX_TABLES = 512
"""How many containers beside the modules are looked at before each call."""
MAX_VALUES = 16
"""A flag with more values counts as a number."""
FEW_CHANGES = 4
STABLE_CALLS = 8
"""A number that stays for this many calls calls for a comparison whenever it changes, as an epoch
does; a step counter only ever more seldom."""
WATCHED_CALLS = 256
"""For so many calls after a change the ranks agree on whether there is one, before each call."""
MAX_IDLE = 16
"""A module is forgotten after so many looks at others: what is known of it may lead back to it."""

_ABSENT = object()
_PARTS: Key = ("", 0, "parts")
_CODE: Key = ("", 0, "code")
_FILES: Key = ("", 0, "files")


def is_compared_change(changes: int, calls: int) -> bool:
    """Whether the `changes`-th change of a number within so many calls calls for a comparison."""
    is_stable = changes * STABLE_CALLS <= calls
    return changes <= FEW_CHANGES or is_stable or changes.bit_count() == 1


class AttributeChanges:
    """The attributes of a module and of what they lead to."""

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)  # `_watched` must not keep it
        self._tables: list[Table] = []
        self._items: list[Items] = []
        self._counters = Counters(())
        self._code = CodeChanges(())
        self.files = FileChanges()
        """Those that the forward reads."""
        self._part_tables: list[Iterable[nn.Module | None]] = []
        self._parts: tuple[nn.Module | None, ...] = ()
        self._classes: tuple[type, ...] = ()
        self._known: dict[Key, Any] = {}
        self._changed: dict[Key, Any] = {}
        """The flags that are not as they were at first, and their values."""
        self._values: dict[Key, set[Any]] = {}
        self._changes: dict[Key, int] = {}
        self._numbers: dict[Key, NumberChanges] = {}
        self._computed: dict[str, NumberChanges] = {}
        self._ignored: set[Key] = set()
        """Those that change by the clock, at other times on each rank."""
        self.recent: dict[Key, str] = {}
        """What the script has changed since the last call, and to what."""
        self.calls = 0
        self._watched_until = WATCHED_CALLS
        self.last_look = 0
        self.flags: frozenset[tuple[Key, Any]] = frozenset()
        """What tells calls apart that must not share a plan."""
        self.due = 0
        """How often numbers have changed in a way that calls for a comparison."""
        self._may_read_any = False
        """Whether something else than the module's forward may read its attributes in a call."""
        self._first: dict[Key, Any] = {}
        self._look_anew()
        self._first = dict(self._known)

    def update(self) -> None:
        """Before a call: note what the script has changed since the last one."""
        self.calls, self.last_look = self.calls + 1, _watched.note_call()
        self.recent = {}
        found = self._find_changes(by_script=True)
        if self.files.has_changed():
            found[_FILES] = OTHER_OBJECT
        for key, value in found.items():
            if key not in self._ignored:
                self.recent[key] = "" if value is OTHER_OBJECT else repr(value)
                self._note(key, value)
        if not self._expressions.places:
            return
        for text, value, is_due in self._expressions.changes(self._computed, self._is_stable):
            key = ("expression", 0, text)
            if key not in self._ignored:
                self.recent[key] = repr(value)
                self.due += is_due

    def _is_stable(self, changes: int) -> bool:
        return changes * STABLE_CALLS <= self.calls

    @property
    def is_watched(self) -> bool:
        """Whether the ranks agree on the changes before this call."""
        return self.calls <= self._watched_until

    def keep_watching(self) -> None:
        """On some rank there was a change."""
        self._watched_until = self.calls + WATCHED_CALLS

    def ignore(self, keys: Iterable[Key]) -> None:
        """Look at these no more: they change at other times, or to other values, on each rank."""
        for key in keys:
            self._ignored.add(key)
            self._changed.pop(key, None)
        self.flags = frozenset(self._changed.items())

    def read_any(self) -> dict[Key, Any]:
        """Look at the attributes, too, that the forward does not name: others may read them in a
        call. Returns what is new."""
        if self._may_read_any:
            return {}
        self._may_read_any = True
        found = self._look_anew()
        self._first = self._known | self._first
        return found

    def skip(self) -> None:
        """After a call: take its changes for granted."""
        self._find_changes(by_script=False)

    def _find_changes(self, *, by_script: bool) -> dict[Key, Any]:
        found = self._counters.find_changes()
        parts = tuple(chain.from_iterable(self._part_tables))
        classes = (type(self._module()), *map(type, parts))
        if self._parts != parts or self._classes != classes:
            found[_PARTS] = OTHER_OBJECT
        for items in self._items:
            if items.has_changed():
                items.update()
                found[*items.key, "items"] = OTHER_OBJECT
        if self._code.has_changed() and by_script:
            found[_CODE] = OTHER_OBJECT
            return self._look_anew() | found
        try:
            changed = changed_tables(self._tables)
            resized = [table for table in changed if table.is_resized()]
        except Exception:  # one is gone, or the script's value cannot be compared, as a tensor
            return found | self._look_anew()
        if resized or _PARTS in found:
            found |= {(*table.key, "length"): OTHER_OBJECT for table in resized}
            return found | self._look_anew()
        for table in changed:
            now = table.get(table.where)
            for name, old, new in zip(table.names, table.values, now, strict=False):
                is_value = isinstance(new, np.generic) or is_sequence(new)
                if old is new or (is_value and old == new):
                    continue
                if isinstance(new, PLAIN) and isinstance(old, PLAIN):
                    if old != new:
                        found[*table.key, name] = self._known[*table.key, name] = new
                elif by_script:  # other objects, with other values in them
                    found[*table.key, name] = OTHER_OBJECT
                    return self._look_anew() | found
            table.values = now
        return found

    def _look_anew(self) -> dict[Key, Any]:
        """Walk the object graph again; returns what is new in it, or different."""
        module = cast(nn.Module, self._module())
        modules = dict(module.named_modules())
        readable = None if self._may_read_any else readable_attributes(module)
        graph = ObjectGraph(modules, readable=readable)
        if readable is not None and graph.is_root_held:
            return self.read_any()
        # In an order that is the same on all ranks: a set's depends on addresses.
        bases = dict.fromkeys(base for each in modules.values() for base in type(each).__mro__)
        classes = [base for base in bases if is_of_script(base)]
        self._tables = _tables_in(graph, classes, MAX_TABLES + len(modules))
        self._items = _items_in(graph, classes)
        named = chain.from_iterable(module._buffers.items() for module in modules.values())
        buffers = (x for name, x in named if name != "num_batches_tracked")
        self._counters = Counters(chain((x for x, _, _ in graph.tensors.values()), buffers))
        self._part_tables = [module._modules.values() for module in modules.values()]
        self._parts = tuple(chain.from_iterable(self._part_tables))
        self._classes = (type(module), *map(type, self._parts))
        self._code = CodeChanges(graph.functions, self._classes)
        objects = (node.value for node in graph.nodes.values())
        self._expressions = NumberExpressions(objects, graph.functions)
        before = self._known
        self._known = {
            (*table.key, name): value
            for table in self._tables
            for name, value in zip(table.names, table.values, strict=False)
            if isinstance(value, PLAIN)
        }
        return {
            key: value
            for key, value in self._known.items()
            if key not in before or before[key] != value
        }

    def _note(self, key: Key, value: Any) -> None:
        is_number = isinstance(value, int | float | complex) and not isinstance(value, bool)
        if not (is_number or value is OTHER_OBJECT):
            values = self._values.setdefault(key, set())
            if len(values) <= MAX_VALUES:  # a text may be another one at each call
                values.add(value)
            is_flag = len(values) <= MAX_VALUES
            if is_flag and self._first.get(key, _ABSENT) != value:
                self._changed[key] = value
            else:
                self._changed.pop(key, None)
            self.flags = frozenset(self._changed.items())
            if is_flag:
                return
        self._changes[key] = self._changes.get(key, 0) + 1
        is_due = is_compared_change(self._changes[key], self.calls)
        if is_number:
            is_due |= self._numbers.setdefault(key, NumberChanges()).has_new_size(value)
        self.due += is_due


def _tables_in(graph: ObjectGraph, classes: Iterable[type], most: int) -> list[Table]:
    """The tables of a graph, at most so many, and of classes that are not in it. Each has a key of
    its own."""
    tables = [table for node in graph.nodes.values() if (table := table_of(node))]
    others = [cls for cls in classes if id(cls) not in graph.nodes]
    tables = tables[:most] + [table for cls in others if (table := table_of_class(cls))]
    count: Counter[str] = Counter()
    for table in tables:
        path = table.key[0]
        table.key = path, count[path]
        count[path] += 1
    return tables


def _items_in(graph: ObjectGraph, classes: Iterable[type]) -> list[Items]:
    """The lists, sets and empty dicts of a graph, at most MAX_TABLES, and the names in classes."""
    found = [
        Items(node.path, node.value)
        for node in graph.nodes.values()
        if isinstance(node.value, list | deque | set | dict)
        and not (isinstance(node.value, dict) and node.contents)
        and node.path.rpartition(".")[2] not in HOOK_TABLES
    ]
    return found[:MAX_TABLES] + [Items(cls.__name__, vars(cls)) for cls in classes]


class _WatchedModules:
    """The modules of which a call was divided."""

    def __init__(self) -> None:
        self.calls = 0
        """Of all of them."""
        self.changes: WeakKeyDictionary[nn.Module, AttributeChanges] = WeakKeyDictionary()

    def note_call(self) -> int:
        """One is about to be called; returns how many such calls there were."""
        self.calls += 1
        return self.calls

    def begin(self, module: nn.Module) -> AttributeChanges:
        """See `begin`."""
        for each, changes in list(self.changes.items()):
            if self.calls - changes.last_look > MAX_IDLE:
                del self.changes[each]
        if module not in self.changes:
            self.changes[module] = AttributeChanges(module)
            self.changes[module].last_look = self.calls
        return self.changes[module]


_watched = _WatchedModules()


def changes_of(module: nn.Module) -> AttributeChanges | None:
    """The attributes of a module of which a call was divided."""
    return _watched.changes.get(module)


def begin(module: nn.Module) -> AttributeChanges:
    """Look at the attributes of a module from now on, and forget those of idle ones."""
    return _watched.begin(module)


def clear() -> None:
    """Forget all modules."""
    _watched.changes.clear()
