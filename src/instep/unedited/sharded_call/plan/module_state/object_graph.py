"""The object graph of a module: what its forward keeps beside parameters and buffers.

Its nodes are the containers and objects that attributes of the module and its submodules lead to,
and those that global variables, closures and default arguments lead to which the methods of the
script's own modules name. The graph ends at tensors and at objects of torch.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import queue
import threading
import types
from array import array
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from enum import Enum
from multiprocessing.queues import Queue as ProcessQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from instep.distributed.generator_states import is_generator, is_global
from instep.process.torch_private.compiler import COMPILER_NOTES
from instep.process.torch_private.dispatch import DisableTorchFunctionSubclass
from instep.training.pytree import PLAIN
from instep.unedited.objects.graph_node import (
    C_DATA,
    HOOK_TABLES,
    MODULE_TABLES,
    GraphNode,
    is_lasting,
    is_same,
)
from instep.unedited.objects.inner_values import WITH_INNER_VALUES
from instep.unedited.objects.iterator_states import is_iterator
from instep.unedited.objects.library_state import is_replaced, library_state
from instep.unedited.objects.referents import default_arguments, is_empty_cell, may_lead_to
from instep.unedited.objects.script_code import (
    functions_of,
    global_names_in,
    is_made,
    is_of_script,
    named_spaces,
    names_in,
    sets_values,
)
from instep.unedited.sharded_call.plan.module_state.hook_tables import hook_table_nodes

MAX_NODES = 4096
"""How many nodes are visited at most, the nearest first."""
MAX_ARRAY = 1 << 24
"""Larger arrays are not looked at, in bytes."""

_ABSENT = object()
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType)
_SHARED = (*C_DATA, mmap.mmap)
_EXTERNAL = (io.IOBase, threading.Thread, queue.SimpleQueue, ProcessQueue, *_SHARED)
_TAKING = frozenset({"islice", "zip", "map"})
"""Functions that take values of an iterator for as long as others last."""
_CONTAINERS = (list, dict, set, deque, bytearray, array)
_OF_MEMBERS = {"_value_", "_name_", "_sort_order_", "__objclass__"}
"""What each member of an enumeration has."""
_LOOKED_INTO = (nn.Module, Distribution, *WITH_INNER_VALUES)
_ENDS = (*PLAIN, type, Enum, types.ModuleType, *FUNCTIONS)


class ObjectGraph:
    """The object graph of some modules, given by their names, as it is now.

    What `others` lead to, with their paths, belongs to it, too: functions, classes, objects.
    """

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        others: Iterable[tuple[str, Any]] = (),
        readable: frozenset[str] | None = None,
    ) -> None:
        """`readable`: the attributes of the first part that belong to it; None: all of them."""
        self.nodes: dict[Hashable, GraphNode] = {}
        self.roots: list[Hashable] = []
        """The keys of the nodes that no other leads to."""
        self.tensors: dict[int, tuple[Tensor, str, int]] = {}
        """Each tensor with its path and its version."""
        self.is_root_held = False
        """Whether something in it leads to the first part, or may lead there."""
        self._root = next(iter(parts.values()), None)
        self.external: set[str] = set()
        """The paths that lead to what cannot be set back: a file, a queue, a thread..."""
        self._waiting: deque[tuple[str, Any]] = deque()
        self._code: deque[Any] = deque()
        """Functions and classes whose variables are not looked at yet."""
        self._followed: set[int] = set()
        self.functions: list[types.FunctionType] = []
        """The script's own, whose variables belong to it."""
        for path, part in parts.items():
            self._visit_module(path, part, readable if part is self._root else None)
            self.roots.append(id(part))
        self._code.extend(map(type, parts.values()))
        for path, other in others:
            if isinstance(other, type):
                self._code.append(other)
            else:
                self._look(path, other)
                self._visit_root(path, other)
        while (self._code or self._waiting) and len(self.nodes) < MAX_NODES:
            if self._code:
                self._follow(self._code.popleft())
            else:
                self._visit(*self._waiting.popleft())

    def restore(self) -> None:
        """Let all of it contain again what it did."""
        for node in self.nodes.values():
            node.restore()

    @property
    def has_lasting(self) -> bool:
        """Whether there is something among it that nothing sets back."""
        return bool(self.external) or any(is_lasting(node.value) for node in self.nodes.values())

    def find_lasting_change(self) -> str | None:
        """Say what of that a forward has changed since then; None if nothing.

        What other processes may change, too, is left out.
        """
        for node in self.nodes.values():
            if is_lasting(node.value) and not is_same(node.read(), node.contents):
                return describe_change(node, self.external)
        return None

    def find_shared_memory(self) -> str | None:
        """The path that leads to memory which processes share, if functions that were followed may
        write there: nothing tells, later, whether a forward has, and it is not set back."""
        shared = (node.path for node in self.nodes.values() if isinstance(node.value, _SHARED))
        path = next(shared, None)
        return path if path is not None and any(map(sets_values, self.functions)) else None

    def find_iterator(self) -> str | None:
        """An iterator that functions which were followed may hand to one that takes values of it
        without a branch of theirs, so that nothing stops a part of the batch before it does."""
        found = (node for node in self.nodes.values() if is_iterator(node.value))
        node = next(found, None)
        takes = any(not _TAKING.isdisjoint(names_in(each.__code__)) for each in self.functions)
        return f"{type(node.value).__name__} ({node.path})" if node is not None and takes else None

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators of torch in it."""
        values = (node.value for node in self.nodes.values())
        return [value for value in values if isinstance(value, torch.Generator)]

    def _add(self, key: Hashable, node: GraphNode) -> GraphNode:
        node.note()
        self.nodes[key] = node
        return node

    def _visit_module(
        self, path: str, part: nn.Module, readable: frozenset[str] | None = None
    ) -> None:
        if id(part) in self.nodes:
            return
        contents = self._add(
            id(part), GraphNode(path, part, tuple(sorted(readable or ())))
        ).contents
        self.nodes.update(hook_table_nodes(path, part, contents))
        for key, value in contents.items():
            if key not in HOOK_TABLES and not isinstance(value, PLAIN):
                function = value.__func__ if isinstance(value, types.MethodType) else value
                is_own = isinstance(function, types.FunctionType) and is_of_script(function)
                self._look(join(path, key), value, follow=key != "forward" or is_own)

    def _look(self, path: str, value: Any, *, follow: bool = True) -> None:
        """Visit a value later, if there may be something in it."""
        if isinstance(value, PLAIN):
            return
        self.is_root_held |= may_lead_to(value, self._root)
        if isinstance(value, Tensor):
            with DisableTorchFunctionSubclass():
                version = -1 if value.is_inference() else value._version
            self.tensors.setdefault(id(value), (value, path, version))
            written = vars(value)
            if not all(name.startswith(COMPILER_NOTES) for name in written):
                self._visit_root(path, written)
        elif isinstance(value, FUNCTIONS):
            if follow:
                self._code.append(getattr(value, "__func__", value))
                self._visit_owner(path, getattr(value, "__self__", None))
        elif is_made(value):
            self._look(path, vars(value))
        elif id(value) not in self.nodes:
            self._waiting.append((path, value))

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, _EXTERNAL):
            self.external.add(path)
        if id(value) in self.nodes or not has_contents(value):
            return
        if isinstance(value, nn.Module):
            self._visit_module(path, value)
            for table in MODULE_TABLES:
                self._look(path, getattr(value, table))
            return
        contents = self._add(id(value), GraphNode(path, value)).contents
        self._code.append(type(value))
        if isinstance(contents, dict):
            contents = contents.values()
        elif not isinstance(contents, list | set):
            return
        for child in contents:
            self._look(path, child)
        if isinstance(value, list | dict | set | deque) and getattr(value, "__dict__", None):
            self._look(path, value.__dict__)

    # ---------------------------------------------------------------- variables of the script

    def _follow(self, code: Any) -> None:
        """Look at the variables that a function or the methods of a class name."""
        while isinstance(code, types.FunctionType) and not is_of_script(code):
            registry = vars(code).get("registry")  # of functools.singledispatch
            if isinstance(registry, types.MappingProxyType):
                self._code.extend(registry.values())
            code = vars(code).get("__wrapped__")  # a library's decorator is around it
        if not isinstance(code, types.FunctionType | type) or id(code) in self._followed:
            return
        self._followed.add(id(code))
        if isinstance(code, types.FunctionType):
            self._follow_function(code)
            return
        if is_of_script(code):
            if any(map(_is_state, vars(code).items())):
                self._look_at_root(id(code), GraphNode(code.__name__, code))
            self._code.extend(functions_of(code))
            for inside in filter(_is_class, list(vars(code).values())):
                self._look_at_class(inside)
        self._code += [*code.__bases__, type(code)]

    def _follow_function(self, function: types.FunctionType) -> None:
        self.functions.append(function)
        if vars(function):
            name = f"{function.__qualname__}."
            self._look_at_root(id(function), GraphNode(name[:-1], function), name)
        for name, value in default_arguments(function):
            if not self._look_beyond(f"variable {name}", value):
                self._look(f"variable {name}", value)
                self._visit_root(f"variable {name}", value)
        free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in free:
            if is_empty_cell(cell):
                continue
            if isinstance(cell.cell_contents, type):
                self._look_at_class(cell.cell_contents)
            elif not self._look_beyond(f"variable {name}", cell.cell_contents):
                self._look_at_root(id(cell), GraphNode(f"variable {name}", cell))
        for prefix, space in named_spaces(function):
            names = names_in(function.__code__) if prefix else global_names_in(function.__code__)
            self._look_at_globals(space, names, prefix or "global variable ")
        for prefix, where, names in library_state(function):
            self._look_at_globals(where, names, prefix, is_set=True)

    def _look_at_globals(
        self,
        where: dict[str, Any] | type,
        names: tuple[str, ...],
        prefix: str,
        *,
        is_set: bool = False,
    ) -> None:
        """Look at these names; `is_set`: at functions, too, which the script sets there."""
        held = []
        space = vars(where) if isinstance(where, type) else where
        for name in names:
            value = space.get(name, _ABSENT)
            if isinstance(value, type):
                self._look_at_class(value)
            elif (
                value is _ABSENT
                or not self._look_beyond(f"{prefix}{name}", value)
                or (isinstance(value, FUNCTIONS) and (is_set or is_replaced(name, space)))
            ):
                held.append(name)
        if held:
            path = where.__name__ if isinstance(where, type) else prefix + ", ".join(held[:3])
            node = GraphNode(path, where, tuple(held))
            self._look_at_root((id(where), node.names), node, prefix)

    def _look_at_class(self, value: type) -> None:
        if not is_of_script(value) or issubclass(value, nn.Module | Tensor):
            return
        if issubclass(value, Enum):
            for member in value:
                if not vars(member).keys() <= _OF_MEMBERS:
                    self._look_at_root(id(member), GraphNode(str(member), member))
            return
        self._look_at_root(id(value), GraphNode(value.__name__, value))
        self._code.append(value)

    def _look_beyond(self, path: str, value: Any) -> bool:
        """Look at what a function or a module leads to; returns whether this is one, or a class."""
        self.is_root_held |= may_lead_to(value, self._root)
        if isinstance(value, nn.Module):
            for name, buffer in value.named_buffers():
                self._look(join(path, name), buffer)
        elif isinstance(value, FUNCTIONS):
            self._look(path, value)
        return not _is_looked_at(value)

    def _visit_owner(self, path: str, owner: Any) -> None:
        """Look at the object of which a function is a method, if it may hold state."""
        is_state = isinstance(owner, (*_CONTAINERS, *_EXTERNAL, queue.Queue)) or (
            is_generator(owner) and not is_global(owner)
        )
        if isinstance(owner, nn.Module):
            self._look_beyond(path, owner)
        elif is_state or (not isinstance(owner, type) and is_of_script(type(owner))):
            self._visit_root(path, owner)

    def _visit_root(self, path: str, value: Any) -> None:
        self._visit(path, value)
        if id(value) in self.nodes:
            self.roots.append(id(value))

    def _look_at_root(self, key: Hashable, node: GraphNode, prefix: str = "") -> None:
        if key in self.nodes:
            return
        self.roots.append(key)
        contents = self._add(key, node).contents
        if isinstance(contents, list):
            contents = dict.fromkeys([node.path], contents[0])
        for name, value in contents.items():
            self._look(prefix + name, value, follow=False)


def describe_change(node: GraphNode, external: Collection[str]) -> str | None:
    """Say what a forward did that changed this node, if that cannot be set back, or is drawn.

    `external`: paths of files, queues and so on.
    """
    name = type(node.value).__name__
    if is_iterator(node.value):
        return f"its forward takes the next value of a {name} ({node.path})"
    if node.path in external:
        where = "a file, a queue, a thread or shared memory"
        return f"its forward writes to {where} ({node.path})"
    if isinstance(node.contents, str):
        return f"its forward draws from {node.path}, a {name}"
    return None


def is_variable(path: str) -> bool:
    """Whether the path begins with a variable, and not with an attribute of the module."""
    return path.startswith(("argument ", "global variable ", "variable "))


def join(path: str, name: object) -> str:
    """The path of an attribute of what `path` leads to."""
    return f"{path}.{name}".removeprefix(".")


def _is_looked_at(value: Any) -> bool:
    """Whether a variable may hold state: other modules, functions and classes do not count."""
    return not isinstance(value, (nn.Module, type, types.ModuleType, *FUNCTIONS))


def _is_state(attribute: tuple[str, Any]) -> bool:
    """Whether this attribute of a class may hold state."""
    name, value = attribute
    is_kept = isinstance(value, (int, float, *_CONTAINERS, np.ndarray, Tensor))
    return is_kept and not name.startswith("__")


def _is_class(value: object) -> bool:
    return isinstance(value, type)


def has_contents(value: Any) -> bool:
    """Whether something may be in this that counts: not in objects of torch, for example."""
    if isinstance(value, np.ndarray):
        return value.nbytes <= MAX_ARRAY
    if isinstance(value, bytearray | array):
        return len(value) * getattr(value, "itemsize", 1) <= MAX_ARRAY
    if isinstance(value, C_DATA):
        return ctypes.sizeof(value) <= MAX_ARRAY
    if isinstance(value, _LOOKED_INTO) or is_generator(value):
        return True
    cls = type(value)
    return not isinstance(value, _ENDS) and cls.__module__.partition(".")[0] not in _OPAQUE


_OPAQUE = frozenset(
    {"torch", "instep", "weakref", "_thread", "threading", "ctypes", "typing", "logging"}
)
