"""Numbers and conditions that a forward computes from its arguments: `if step > 70:`, `max(0.0, 1 -
step / 100)`.

They are computed before a call, from its arguments. Its parts' methods count, too: an argument of
the same name is taken for the same one.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import ref

import numpy as np
from torch import nn

from instep.unedited.objects.evaluation import Evaluation, Values
from instep.unedited.objects.number_expressions import SCOPES, NumberChanges, variables_set_once
from instep.unedited.objects.script_code import functions_of, is_of_script
from instep.unedited.objects.syntax_trees import definition_of

_MAX_EXPRESSIONS = 64
_VALUES = (bool, int, float, str, np.number, np.bool_)
Names = Mapping[str, Any]
"""Arguments by their names."""


class ArgumentExpressions:
    """The expressions in the methods of some modules that read arguments with these names."""

    def __init__(self, parts: Iterable[nn.Module], arguments: Names) -> None:
        self._expressions: list[_Expression] = []
        for part in parts:
            for cls in filter(is_of_script, type(part).__mro__):
                for function in functions_of(cls):
                    self._expressions += _expressions_of(function, part, arguments)
        del self._expressions[_MAX_EXPRESSIONS:]
        self._known = [NumberChanges() for _ in self._expressions]

    def have_new_sizes(self, arguments: Names) -> bool:
        """Whether one of them has another sign or power of two than with any arguments so far, or
        is another text or truth value."""
        found = False
        for expression, known in zip(self._expressions, self._known, strict=True):
            value, _ = expression(arguments)
            found |= value is not None and known.has_new_size(value)
        return found


_Expression = Callable[[Names], tuple[Any, bool]]
"""Returns its value for these arguments, None where it is not known, and whether it has read any of
these."""


def _expressions_of(
    function: types.FunctionType, part: nn.Module, arguments: Names
) -> list[_Expression]:
    """The largest expressions in a method of this part, not those inside of them."""
    code = function.__code__
    own = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    node = None if arguments.keys().isdisjoint(own) else definition_of(function)
    if not isinstance(node, ast.FunctionDef):
        return []
    set_once = variables_set_once(function, node.body)
    found: list[_Expression] = []
    waiting: list[ast.AST] = list(reversed(node.body))
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, SCOPES):
            continue
        if isinstance(inner, ast.expr) and not isinstance(inner, ast.Constant | ast.Name):
            expression = _expression(function, inner, ref(part), own, set_once)
            value, reads = expression(arguments)
            if value is not None:
                if reads:
                    found.append(expression)
                continue
        waiting += reversed([*ast.iter_child_nodes(inner)])
    return found


def _expression(
    function: types.FunctionType,
    node: ast.expr,
    part: Callable[[], nn.Module | None],
    own: Iterable[str],
    set_once: Mapping[str, ast.expr],
) -> _Expression:
    owner = function.__code__.co_varnames[0]

    def value(arguments: Names) -> tuple[Any, bool]:
        known = _Read({name: arguments[name] for name in own if name in arguments})
        known.setdefault(owner, part())
        try:
            found = Evaluation(function, Values({}), known, set_once).value(node)
        except Exception:  # the script's: no such entry, a division by zero
            return None, False
        return (found if isinstance(found, _VALUES) else None), bool(known.read - {owner})

    return value


class _Read(dict[str, Any]):
    """Arguments, and which of them were read."""

    def __init__(self, arguments: Names) -> None:
        super().__init__(arguments)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)
