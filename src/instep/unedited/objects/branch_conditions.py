"""Conditions on whole numbers that modules keep: `if self.steps > 1000:`.

They are evaluated before a call, with the numbers as they are and as they will be if they go on as
since the call before. So a branch that a later call will take is known before it does.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any
from weakref import ref

from torch import Tensor, nn

from instep.training.pytree import PLAIN
from instep.unedited.objects.script_code import functions_of, is_of_script
from instep.unedited.objects.syntax_trees import definition_of

_MAX_CONDITIONS = 32
_LOOKS = 64
"""After so many looks those of which no value has ever changed are looked at no more."""
_PARTS = (
    *(ast.Expression, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Constant, ast.Load),
    *(ast.cmpop, ast.boolop, ast.unaryop, ast.operator),
)
"""What a condition consists of beside the values that it compares."""
_MISSING = object()
Operand = tuple[Callable[[], Any], Callable[[Any], Any]]
"""What returns the owner of a value, or None, and what takes the value from the owner."""


class BranchConditions:
    """The conditions in the methods of some modules."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        found: dict[tuple[int, types.CodeType], list[_Condition]] = {}
        for part in parts:
            for cls in filter(is_of_script, type(part).__mro__):
                for function in functions_of(cls):
                    key = id(part), function.__code__
                    if key not in found:
                        found[key] = _conditions_of(function, part)
        self._conditions = [each for of_one in found.values() for each in of_one][:_MAX_CONDITIONS]
        self._looks = 0

    def may_be_others(self) -> bool:
        """Whether one has a value, or is about to have one, that it has not had so far."""
        found = [condition.is_other() for condition in self._conditions]
        self._looks += 1
        if self._looks == _LOOKS:
            self._conditions = [each for each in self._conditions if each.has_changed]
        return any(found)


class _Condition:
    """A condition in the methods of one module."""

    __slots__ = ("_first", "_known", "_last", "_operands", "_test", "has_changed")

    def __init__(self, test: Callable[..., Any], operands: list[Operand]) -> None:
        self._test, self._operands = test, operands
        self._known: set[bool] = set()
        self._first = self._last = self._values()
        self.has_changed = False

    def is_other(self) -> bool:
        """See `BranchConditions.may_be_others`."""
        try:
            now = self._values()
            coming = list(map(_next, self._last, now, self._first))
            found = {bool(self._test(*now)), bool(self._test(*coming))}
        except Exception:  # the script's values: of another type by now, or gone
            return False
        self.has_changed = self.has_changed or now != self._last
        self._last = now
        is_new = not found <= self._known
        self._known |= found
        return is_new

    def _values(self) -> list[Any]:
        found = [take(owner()) for owner, take in self._operands]
        return [x.item() if isinstance(x, Tensor) else x for x in found]


def _next(last: Any, now: Any, first: Any) -> Any:
    """The value in the next call. Raises TypeError where it is no whole number, and changes: it may
    be the clock's, which is another one on each rank."""
    if isinstance(now, bool) or not isinstance(now, int | float):
        return now
    if isinstance(now, float) and not now.is_integer() and now != first:
        raise TypeError
    return 2 * now - last if type(now) is type(last) else now


def _conditions_of(function: types.FunctionType, part: nn.Module) -> list[_Condition]:
    node = definition_of(function)
    if not (isinstance(node, ast.FunctionDef) and function.__code__.co_argcount):
        return []
    tests = filter(None, map(_test_of, ast.walk(node)))
    texts = dict.fromkeys(map(ast.unparse, tests))
    conditions = (_compiled(text, function, part) for text in texts)
    return [condition for condition in conditions if condition is not None]


def _test_of(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return node.test
    return node if isinstance(node, ast.Compare) else None


def _compiled(text: str, function: types.FunctionType, part: nn.Module) -> _Condition | None:
    """None if there is more in it than plain values that are looked up, and constants."""
    naming = _Naming(function, part)
    expression = naming.visit(ast.parse(text, mode="eval"))
    if naming.has_others or not naming.operands:
        return None
    names = ", ".join(f"v{k}" for k in range(len(naming.operands)))
    made = eval(f"lambda {names}: {ast.unparse(expression)}", {"__builtins__": {}})
    return _Condition(made, naming.operands)


class _Naming(ast.NodeTransformer):
    """Puts names in the place of the values that an expression looks up."""

    def __init__(self, function: types.FunctionType, part: nn.Module) -> None:
        self._space, self._self = function.__globals__, function.__code__.co_varnames[0]
        self._part = part
        self._locals = {*function.__code__.co_varnames, *function.__code__.co_freevars}
        self.operands: list[Operand] = []
        self.has_others = False

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Attribute | ast.Name):
            operand = self._find(node)
            self.has_others |= operand is None
            if operand is not None:
                self.operands.append(operand)
            return ast.Name(f"v{len(self.operands) - 1}", ast.Load())
        self.has_others |= not isinstance(node, _PARTS)
        return self.generic_visit(node)

    def _find(self, node: ast.AST) -> Operand | None:
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        if node.id == self._self and names and _is_plain(self._part, names):
            return ref(self._part), attrgetter(".".join(names))
        is_global = node.id not in self._locals and not names and node.id in self._space
        if is_global and isinstance(self._space[node.id], PLAIN):
            return repeat(self._space).__next__, itemgetter(node.id)
        return None


def _is_plain(owner: Any, names: list[str]) -> bool:
    """Whether this path leads to a plain value, or a whole number in a tensor, and no property or
    method is on it, which may do anything."""
    for name in names:
        own = getattr(owner, "__dict__", {})
        tables = (own, own.get("_buffers", {}), own.get("_modules", {}))
        of_class = getattr(type(owner), name, _MISSING)
        if not any(name in table for table in tables) and not isinstance(of_class, PLAIN):
            return False
        if hasattr(type(of_class), "__set__"):
            return False
        owner = getattr(owner, name)
    if isinstance(owner, Tensor):
        return type(owner) is Tensor and not owner.dim() and owner.is_cpu
    return isinstance(owner, PLAIN)
