"""Numbers and conditions that a forward computes from its arguments: `if step > 70:`, `max(0.0, 1 -
step / 100)`.

They are computed before a call, from its arguments. Its parts' methods count, too: an argument of
the same name is taken for the same one, and so is what a call passes on under another name.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import ref

import numpy as np
from torch import nn

from instep.unedited.objects.evaluation import Evaluation, Values
from instep.unedited.objects.number_expressions import SCOPES, NumberChanges, variables_set_once
from instep.unedited.objects.script_code import functions_of, is_of_script
from instep.unedited.objects.syntax_trees import definition_of

_MAX_EXPRESSIONS = 64
_MAX_DEPTH = 4
"""Of calls through which an argument is passed on."""
_VALUES = (bool, int, float, str, np.number, np.bool_)
Names = Mapping[str, Any]
"""Arguments by their names."""


class ArgumentExpressions:
    """The expressions in the methods of some modules that read arguments with these names."""

    def __init__(self, parts: Iterable[nn.Module], arguments: Names) -> None:
        methods = [
            (function, part)
            for part in parts
            for cls in filter(is_of_script, type(part).__mro__)
            for function in functions_of(cls)
        ]
        self._passed: list[tuple[str, _Expression]] = []
        """The names under which something computed from the arguments is passed on."""
        known = self._note_passed(methods, arguments)
        self._expressions: list[_Expression] = []
        for function, part in methods:
            self._expressions += _expressions_of(function, part, known)
        del self._expressions[_MAX_EXPRESSIONS:]
        self._known = [NumberChanges() for _ in self._expressions]

    def have_new_sizes(self, arguments: Names) -> bool:
        """Whether one of them has another sign or power of two than with any arguments so far, or
        is another text or truth value."""
        found, values = False, dict(arguments)
        for name, expression in self._passed:
            value, _ = expression(values)
            if value is not None:
                values.setdefault(name, value)
        for expression, known in zip(self._expressions, self._known, strict=True):
            value, _ = expression(values)
            found |= value is not None and known.has_new_size(value)
        return found

    def _note_passed(self, methods: list[_Method], arguments: Names) -> Names:
        """Find the names under which arguments are passed on, and return all names that are known
        by then, with their values."""
        known = dict(arguments)
        for _ in range(_MAX_DEPTH):
            count = len(known)
            for function, part in methods:
                for name, expression in _passed_on(function, part, known, methods):
                    value, reads = expression(known)
                    if reads and value is not None and name not in known:
                        self._passed.append((name, expression))
                        known[name] = value
            if len(known) in (count, _MAX_EXPRESSIONS):
                break
        return known


_Expression = Callable[[Names], tuple[Any, bool]]
"""Returns its value for these arguments, None where it is not known, and whether it has read any of
these."""
_Method = tuple[types.FunctionType, nn.Module]
"""A method, and the module whose it is."""


def _expressions_of(
    function: types.FunctionType, part: nn.Module, arguments: Names
) -> list[_Expression]:
    """The largest expressions in a method of this part, not those inside of them."""
    body, make = _scope(function, part, arguments)
    found: list[_Expression] = []
    waiting: list[ast.AST] = list(reversed(body))
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, SCOPES):
            continue
        if isinstance(inner, ast.expr) and not isinstance(inner, ast.Constant | ast.Name):
            expression = make(inner)
            value, reads = expression(arguments)
            if value is not None:
                if reads:
                    found.append(expression)
                continue
        waiting += reversed([*ast.iter_child_nodes(inner)])
    return found


def _passed_on(
    function: types.FunctionType, part: nn.Module, arguments: Names, methods: list[_Method]
) -> Iterator[tuple[str, _Expression]]:
    """What the calls in a method of this part pass on, by the names that it gets there."""
    body, make = _scope(function, part, arguments)
    calls = (each for node in body for each in ast.walk(node) if isinstance(each, ast.Call))
    for call in calls:
        for keyword in call.keywords:
            if keyword.arg and not isinstance(keyword.value, ast.Constant):
                yield keyword.arg, make(keyword.value)
        for place, node in enumerate(call.args):
            if isinstance(node, ast.Starred):
                break
            if not isinstance(node, ast.Constant):
                for name in _names_at(place, call, methods):
                    yield name, make(node)


def _names_at(place: int, call: ast.Call, methods: list[_Method]) -> Iterator[str]:
    """The names that the argument at this place of a call of a part, or of a method, may have."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if all(function.__name__ != called for function, _ in methods):
        called = "forward"
    for function, _ in methods:
        code = function.__code__
        if function.__name__ == called and place + 1 < code.co_argcount:
            yield code.co_varnames[place + 1]


def _scope(
    function: types.FunctionType, part: nn.Module, arguments: Names
) -> tuple[list[ast.stmt], Callable[[ast.expr], _Expression]]:
    """The body of a method of this part, empty if it has none of these arguments; and what makes an
    expression of one in there."""
    code = function.__code__
    own = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    node = None if arguments.keys().isdisjoint(own) else definition_of(function)
    body = node.body if isinstance(node, ast.FunctionDef) else []
    set_once = variables_set_once(function, body)
    return body, lambda each: _expression(function, each, ref(part), own, set_once)


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
