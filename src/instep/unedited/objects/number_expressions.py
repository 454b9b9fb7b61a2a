"""Numbers that a forward computes from those that modules, objects and variables keep:
`min(1, self.steps / 1000)`, `self.schedule.value()`; and what it chooses by them: a function, a
part or a text, as `getattr(F, NAMES[self.steps])` does.

They are computed before a call, from the numbers as they are and as they will be if they go on as
since the call before. So a weight that has been zero for a thousand calls is seen to change.
"""

from __future__ import annotations

import ast
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import ref

import numpy as np
from torch import nn

from instep.unedited.objects.evaluation import Evaluation, Place, Values
from instep.unedited.objects.script_code import functions_of, is_of_script
from instep.unedited.objects.syntax_trees import definition_of

_MAX_EXPRESSIONS = 32
_MAX_SIZES, _MAX_CHOICES = 256, 64
_AGREED_CHANGES = 8
"""The ranks compare the first changes of each expression, up to so many: a value may come from a
clock."""
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_NUMBERS = (bool, int, float, np.number)
_CHOSEN = (types.FunctionType, types.BuiltinFunctionType, type, partial, nn.Module)


class NumberChanges:
    """The values that a number has had, by their signs and powers of two."""

    __slots__ = ("changes", "last", "sizes")

    def __init__(self) -> None:
        self.last: Any = None
        """Its last value, or that with the one in the next call."""
        self.changes = 0
        self.sizes: set[Any] = set()

    def has_new_size(self, value: Any, when: int = 0) -> bool:
        """Whether it had no value of this sign and power of two yet: what adds little to the
        outputs may be too small to be seen, until it is twice as large. Of choices each counts,
        and anew where the next call's (`when` is 1) has become this call's."""
        is_number = isinstance(value, _NUMBERS)
        size = _size_of(value) if is_number else (value, when)
        most = _MAX_SIZES if is_number else 2 * _MAX_CHOICES
        if size in self.sizes or len(self.sizes) >= most:
            return False
        self.sizes.add(size)
        return True


class NumberExpressions:
    """The expressions in the methods of some objects, and in some functions."""

    def __init__(self, objects: Iterable[Any], functions: Iterable[types.FunctionType]) -> None:
        self._expressions: list[_Expression] = []
        for function, owner in _with_owners(objects, functions):
            node = definition_of(function)
            if node is not None and len(self._expressions) < _MAX_EXPRESSIONS:
                self._expressions += _expressions_of(function, node, owner)
        del self._expressions[_MAX_EXPRESSIONS:]
        self.places: dict[Any, Place] = {}
        """Where the numbers are from which they are computed."""
        self._numbers: dict[Any, Any] = {}
        """These, as they were at the last look."""
        self._expected: dict[Any, Any] = {}
        """These, as they are to be at the next look if they go on as they did."""
        self._note_places()

    def changes(
        self, known: dict[str, NumberChanges], is_stable: Callable[[int], bool]
    ) -> Iterator[tuple[str, Any, bool]]:
        """The expressions whose value has changed since the last look, or is about to, each with
        its value now and in the next call, and whether this calls for a comparison.

        Args:
            known: their values so far, by their texts.
            is_stable: whether a number that has changed so often stays for long.
        """
        before = self._numbers
        numbers, coming = {}, {}
        try:
            for key, (find, of) in self.places.items():
                numbers[key] = now = find(of)
                if now != before.get(key, now):
                    is_number = isinstance(now, _NUMBERS)
                    coming[key] = 2 * now - before[key] if is_number else now
        except Exception:  # the script's: gone, or something else by now
            self._expressions.clear()
            self.places.clear()
            return
        self._numbers = numbers
        if before and not coming:
            return
        is_expected = numbers == self._expected
        self._expected = {**numbers, **coming}
        for each in self._expressions:
            if not before or not coming.keys().isdisjoint(each.places):
                yield from each.changes(coming, known, is_stable, is_expected=is_expected)
        if any(not each.places.keys() <= self.places.keys() for each in self._expressions):
            self._note_places()

    def _note_places(self) -> None:
        self.places = {
            key: place for each in self._expressions for key, place in each.places.items()
        }
        self._numbers = {}
        self._expected = {}


class _Expression:
    """An expression in a method of one object, or in a function."""

    def __init__(
        self,
        function: types.FunctionType,
        node: ast.expr,
        owner: Any,
        set_once: Mapping[str, ast.expr],
    ) -> None:
        self._function, self._node, self._set_once = function, node, set_once
        self._owner = ref(owner) if isinstance(owner, nn.Module) else (lambda: owner)
        self._has_owner = owner is not None
        self._text = f"{function.__qualname__}: {ast.unparse(node)}"
        self.places: dict[Any, Place] = {}
        self._coming: Any = None
        """Its value in the next call, as it seemed at the last look."""

    def value(self, coming: Mapping[Any, Any]) -> Any:
        """Its value, if it can be found and is a number; a text, or a reference to what is chosen,
        if it is one of these; None otherwise.

        coming: the numbers that are to have other values than now.
        """
        values, own = Values(coming), {}
        if self._has_owner:
            own[self._function.__code__.co_varnames[0]] = self._owner()
        scope = Evaluation(self._function, values, own, self._set_once)
        try:
            value = scope.value(self._node)
        except Exception:  # the script's: no such entry, a division by zero
            return None
        self.places |= values.places
        if isinstance(value, str) and isinstance(self._node, ast.Subscript):
            return value
        if isinstance(value, partial) and isinstance(value.func, types.FunctionType):
            value = value.func  # a method
        if isinstance(value, _CHOSEN):
            return ref(value)
        return value if isinstance(value, _NUMBERS) else None

    def changes(
        self,
        coming: Mapping[Any, Any],
        known: dict[str, NumberChanges],
        is_stable: Callable[[int], bool],
        *,
        is_expected: bool,
    ) -> Iterator[tuple[str, Any, bool]]:
        """As `NumberExpressions.changes`.

        coming: as of `value`. `is_expected`: what it is computed from is as it seemed at the last
        look.
        """
        now = self._coming if is_expected else self.value({})
        self._coming = self.value(coming)
        found = [now, self._coming]
        history = known.get(self._text)
        if history is None:
            history = known[self._text] = NumberChanges()
            history.last = found
            history.has_new_size(now)
            return
        if found == history.last:
            return
        history.changes += 1
        is_due = isinstance(now, _NUMBERS) and is_stable(history.changes)
        for when, value in enumerate(found):
            is_due |= value is not None and history.has_new_size(value, when)
        history.last = found
        if is_due or history.changes <= _AGREED_CHANGES:
            yield self._text, [*map(_shown, found)], is_due


def _with_owners(
    objects: Iterable[Any], functions: Iterable[types.FunctionType]
) -> Iterator[tuple[types.FunctionType, Any]]:
    """Functions, and the objects of which they are methods, or None."""
    found: set[int] = set()
    for value in objects:
        for cls in type(value).__mro__ if not isinstance(value, type) else ():
            for function in functions_of(cls) if is_of_script(cls) else ():
                found.add(id(function))
                if function.__code__.co_argcount:
                    yield function, value
    yield from ((each, None) for each in functions if id(each) not in found)


def _expressions_of(
    function: types.FunctionType, node: ast.FunctionDef | ast.Lambda, owner: Any
) -> list[_Expression]:
    """The largest expressions in a function, not those inside of them."""
    body = [node.body] if isinstance(node, ast.Lambda) else node.body
    set_once = variables_set_once(function, body)
    found: list[_Expression] = []
    waiting: list[ast.AST] = list(reversed(body))
    while waiting:
        part = waiting.pop()
        if isinstance(part, SCOPES):
            continue
        if isinstance(part, ast.expr) and _is_computed(part):
            expression = _Expression(function, part, owner, set_once)
            if expression.value({}) is not None:
                if expression.places:
                    found.append(expression)
                continue
        waiting += reversed([*ast.iter_child_nodes(part)])
        if isinstance(part, ast.AugAssign) and isinstance(part.op, ast.Mult | ast.Div | ast.Pow):
            loaded = ast.parse(ast.unparse(part.target), mode="eval").body
            waiting.append(ast.BinOp(loaded, part.op, part.value))
    return found


def _is_computed(node: ast.AST) -> bool:
    """Whether there is more in it than a number that is looked up, or a condition on such numbers,
    which `BranchConditions` evaluates."""
    if isinstance(node, ast.Constant):
        return False
    parts = list(ast.walk(node))
    has_calls = any(isinstance(each, ast.Call | ast.Subscript) for each in parts)
    if isinstance(node, ast.Compare | ast.BoolOp) or not has_calls:
        return has_calls or isinstance(node, ast.BinOp | ast.IfExp)
    return True


def variables_set_once(function: types.FunctionType, body: list[Any]) -> dict[str, ast.expr]:
    """What each variable is set to that is assigned in one place only."""
    parts = [part for each in body for part in ast.walk(each)]
    stored = [x.id for x in parts if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
    code = function.__code__
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return {
        target.id: part.value
        for part in parts
        if isinstance(part, ast.Assign)
        for target in part.targets
        if isinstance(target, ast.Name)
        and stored.count(target.id) == 1
        and target.id not in arguments
    }


def _shown(value: Any) -> Any:
    """What shows this value, alike on all ranks."""
    if not isinstance(value, ref):
        return value
    chosen = value()
    return getattr(chosen, "__qualname__", type(chosen).__name__)


def _size_of(value: Any) -> Any:
    """The sign and the power of two of a number; a text for what has none."""
    if value is None or isinstance(value, complex) or not math.isfinite(value):
        return repr(value)
    return value < 0, math.frexp(value)[1] if value else None
