"""What a script holds at one moment: its variables, and the objects that they lead to."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from instep.process import frames_from
from instep.unedited.checkpoint.kinds import Kind, digest_of, form_of, is_plain, kind_of, slots_of
from instep.unedited.objects.script_code import is_of_script


@dataclass(eq=False, slots=True)
class ScriptObject:
    """An object that a script holds."""

    path: str
    """The variables, attributes and entries that lead to it, as a person would write them."""
    value: Any
    kind: Kind
    slots: list[tuple[str, Any]]
    digest: Any
    form: Any
    """Of a tensor or an array: what `form_of` returned at that moment."""


@dataclass(eq=False)
class VariableScope:
    """The variables of a module or of a function that runs."""

    prefix: str
    """Before the names of its variables in a path."""
    names: dict[str, Any]
    frame: types.FrameType | None = None
    """That of a function; None: a module."""

    def __post_init__(self) -> None:
        self.variables = {name: value for name, value in self.names.items() if name[:2] != "__"}
        """Those of the script as they were at that moment."""


@dataclass(eq=False)
class ScriptObjects:
    """All objects that some scopes lead to, the nearest first."""

    scopes: list[VariableScope]
    nodes: dict[int, ScriptObject] = field(default_factory=dict)
    """By identity."""
    by_path: dict[str, Any] = field(default_factory=dict)
    """Also those that are looked at no further."""
    paths: dict[int, str] = field(default_factory=dict)
    """By identity; the path is the first that was found."""

    def add(
        self, values: Iterable[tuple[str, Any]], before: ScriptObjects | None = None
    ) -> list[ScriptObject]:
        """Visit these values, given with their paths, and all that they lead to; returns the new.

        A large container of data is not entered if it is as it was `before`.
        """
        found: list[ScriptObject] = []
        waiting = deque(values)
        while waiting:
            path, value = waiting.popleft()
            if is_plain(value) or id(value) in self.paths:
                continue
            self.paths[id(value)] = path
            self.by_path[path] = value
            kind = kind_of(value)
            if kind is Kind.END:
                continue
            form = form_of(value) if kind in (Kind.TENSOR, Kind.ARRAY) else None
            node = ScriptObject(path, value, kind, [], digest_of(value, kind), form)
            self.nodes[id(value)] = node
            found.append(node)
            if not self._is_bulk(node, before):
                node.slots = slots_of(value, kind)
                waiting += ((f"{path}{key}", entry) for key, entry in node.slots)
        return found

    def truncate(self, count: int) -> None:
        """Undo the visit of all but the first `count` objects."""
        for each in list(self.paths)[count:]:
            self.by_path.pop(self.paths.pop(each))
            self.nodes.pop(each, None)

    @staticmethod
    def _is_bulk(node: ScriptObject, before: ScriptObjects | None) -> bool:
        if node.digest is None or node.kind not in (Kind.LIST, Kind.DICT, Kind.TUPLE):
            return False
        if before is None:
            return True
        old = before.nodes.get(id(node.value))
        return old is not None and old.digest == node.digest


def find_scopes(frame: types.FrameType) -> list[VariableScope]:
    """The scopes of a script whose innermost running function is `frame`.

    They are the functions that have called it, and the script's modules.
    """
    functions: list[VariableScope] = []
    for caller in frames_from(frame):
        names = caller.f_locals
        if names is not caller.f_globals and _is_script(caller.f_globals):
            depth = sum(scope.frame.f_code is caller.f_code for scope in functions if scope.frame)
            name = f"{caller.f_code.co_name}{f' {depth}' * bool(depth)}: "
            functions.append(VariableScope(name, names, caller))
    functions.reverse()
    main = [VariableScope("", sys.modules["__main__"].__dict__)]
    others = sorted(
        name
        for name, module in list(sys.modules.items())
        if name != "__main__" and isinstance(module, types.ModuleType) and is_of_script(module)
    )
    return (
        main + functions + [VariableScope(f"{name}: ", vars(sys.modules[name])) for name in others]
    )


def hold(frame: types.FrameType) -> ScriptObjects:
    """Everything that the script holds now."""
    held = ScriptObjects(find_scopes(frame))
    for scope in held.scopes:
        held.add((f"{scope.prefix}{name}", value) for name, value in scope.variables.items())
    return held


def _is_script(names: dict[str, Any]) -> bool:
    module = sys.modules.get(str(names.get("__name__")))
    return module is not None and vars(module) is names and is_of_script(module)
