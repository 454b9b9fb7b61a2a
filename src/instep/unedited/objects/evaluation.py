"""Evaluates expressions of the script's code without running it: numbers that modules, objects and
variables keep, arithmetic, and functions that do nothing but compute.

The numbers may be those of the next call: see `Values`.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.training.pytree import PLAIN
from instep.unedited.objects.referents import default_arguments
from instep.unedited.objects.script_code import is_of_script
from instep.unedited.objects.syntax_trees import definition_of

_MAX_DEPTH, _MAX_ITERATIONS = 8, 64
_BUILTINS = (abs, bool, divmod, float, int, len, max, min, pow, range, round, sum, enumerate, zip)
_OF_NUMPY = (np.clip, np.interp, np.float32, np.float64, np.minimum, np.maximum)
_CONVERSIONS = frozenset(["item", "float", "int", "long", "double", "tolist"])
"""Methods of a tensor with one number that leave the number what it is."""
_RUNS_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_TAKES_ANY_ARGUMENTS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow, ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Not: operator.not_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
Place = tuple[Callable[[Any], Any], Any]
"""Where a number is kept: a function and its argument, for which it returns the number."""


class NoValueError(Exception):
    """The value cannot be found without running the code."""


class Values:
    """The numbers in the script's variables and attributes, by keys of their places.

    Args:
        coming: those that are to have other values than now, as in the next call.
    """

    def __init__(self, coming: Mapping[Any, Any]) -> None:
        self.places: dict[Any, Place] = {}
        """Where the numbers are that were read."""
        self._coming = coming

    def read(self, key: Any, place: Place) -> Any:
        """The number at this place, which has this key."""
        self.places[key] = place
        get, owner = place
        return self._coming[key] if key in self._coming else get(owner)


class Evaluation:
    """Evaluates expressions inside of a function.

    Args:
        function: that has the expressions.
        values: of what it reads.
        own: its arguments and variables, as far as they are known.
        set_once: the expressions of variables that are assigned in one place only; they are
            evaluated where the variable is read.
        depth: of the calls and variables that led here.
    """

    def __init__(
        self,
        function: types.FunctionType,
        values: Values,
        own: dict[str, Any],
        set_once: Mapping[str, ast.expr],
        depth: int = 0,
    ) -> None:
        self._function, self._values, self._own, self._depth = function, values, own, depth
        self._set_once = set_once

    def value(self, node: ast.AST) -> Any:
        """The value of an expression. Raises NoValueError, and what the script's values raise."""
        evaluate = _EVALUATORS.get(type(node))
        if evaluate is None:
            raise NoValueError
        return evaluate(self, node)

    def _constant(self, node: Any) -> Any:
        return node.value

    def _name(self, node: Any) -> Any:
        name, function = node.id, self._function
        if name in self._own:
            return self._own[name]
        if name in self._set_once and self._depth < _MAX_DEPTH:
            inner = Evaluation(function, self._values, self._own, self._set_once, self._depth + 1)
            return inner.value(self._set_once[name])
        if name in function.__code__.co_freevars:
            cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
            place = partial(getattr, cell), "cell_contents"
            return self._read(cell.cell_contents, id(cell), place)
        if name in function.__code__.co_varnames or name in function.__code__.co_cellvars:
            raise NoValueError
        space = function.__globals__
        if name in space:
            return self._read(space[name], (id(space), name), (space.__getitem__, name))
        return getattr(builtins, name)

    def _read(self, value: Any, key: Any, place: Place) -> Any:
        """`value`, which is at this place; if it is a number, the one that `values` have there."""
        if isinstance(value, Tensor):
            if type(value) is not Tensor or value.dim() or not value.is_cpu:
                raise NoValueError
            if value.is_floating_point() or value.is_complex():
                raise NoValueError
            return self._values.read(id(value), (int, value))
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        return self._values.read(key, place) if is_number else value

    def _attribute(self, node: Any) -> Any:
        return self._attribute_of(self.value(node.value), node.attr)

    def _attribute_of(self, owner: Any, name: str) -> Any:
        if isinstance(owner, Enum) and name in ("value", "name"):
            return getattr(owner, name)
        own = getattr(owner, "__dict__", {})
        tables = [own, own.get("_buffers"), own.get("_modules")]
        for table in tables if isinstance(owner, nn.Module) else [own]:
            if table and name in table:
                return self._read(table[name], (id(table), name), (table.__getitem__, name))
        found = inspect.getattr_static(type(owner), name)
        if isinstance(found, property) and isinstance(found.fget, types.FunctionType):
            return self._result(found.fget, [owner], {})
        if isinstance(found, types.FunctionType):
            return partial(found, owner)
        if isinstance(found, staticmethod):
            return found.__func__
        if isinstance(found, PLAIN):
            return found
        if isinstance(found, types.MemberDescriptorType) or name in getattr(owner, "_fields", ()):
            place = partial(getattr, owner), name
            return self._read(getattr(owner, name), (id(owner), name), place)
        raise NoValueError

    def _item(self, node: Any) -> Any:
        owner = self.value(node.value)
        index: Any = self.value(node.slice)
        if isinstance(owner, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            owner = {**owner._modules} if isinstance(owner, nn.ModuleDict) else [*owner.children()]
        if not isinstance(owner, list | tuple | dict) or type(index) not in PLAIN:
            raise NoValueError
        if isinstance(owner, tuple):
            return owner[index]
        return self._read(owner[index], (id(owner), index), (owner.__getitem__, index))

    def _sequence(self, node: Any) -> Any:
        return [self.value(each) for each in node.elts]

    def _binary(self, node: Any) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        if not all(isinstance(each, (*PLAIN, np.number)) for each in (left, right)):
            raise NoValueError
        if isinstance(node.op, ast.Pow) and max(abs(left), abs(right)) > 1e6:
            raise NoValueError  # a whole number of many digits
        return _operation(node.op)(left, right)

    def _unary(self, node: Any) -> Any:
        return _operation(node.op)(_plain(self.value(node.operand)))

    def _compare(self, node: Any) -> Any:
        left = self.value(node.left)
        for op, each in zip(node.ops, node.comparators, strict=True):
            right = self.value(each)
            if isinstance(left, Tensor | np.ndarray) or isinstance(right, Tensor | np.ndarray):
                raise NoValueError
            if not _operation(op)(left, right):
                return False
            left = right
        return True

    def _bool(self, node: Any) -> Any:
        value = None
        for each in node.values:
            value = _plain(self.value(each))
            if bool(value) is isinstance(node.op, ast.Or):
                break
        return value

    def _choice(self, node: Any) -> Any:
        return self.value(node.body if _plain(self.value(node.test)) else node.orelse)

    def _comprehension(self, node: Any) -> Any:
        if len(node.generators) > 1:
            raise NoValueError
        loop, found = node.generators[0], []
        for item in self._items(loop.iter):
            self._assign(loop.target, item)
            if all(_plain(self.value(test)) for test in loop.ifs):
                found.append(self.value(node.elt))
        return found

    def _items(self, node: ast.AST) -> list[Any]:
        """What a loop over the value of `node` goes through."""
        values = self.value(node)
        if not isinstance(values, list | tuple | range | enumerate | zip):
            raise NoValueError
        if isinstance(values, list | tuple | range) and len(values) > _MAX_ITERATIONS:
            raise NoValueError
        return list(values)

    def _joined(self, node: Any) -> Any:
        """An f-string."""
        return "".join(str(_plain(self.value(each))) for each in node.values)

    def _formatted(self, node: Any) -> Any:
        if node.format_spec is not None or node.conversion != -1:
            raise NoValueError
        return self.value(node.value)

    def _named_attribute(self, owner: Any, name: Any, *default: Any) -> Any:
        """What `getattr` returns; of a library's module, too, where the script may replace it."""
        if not isinstance(name, str):
            raise NoValueError
        if isinstance(owner, types.ModuleType) and name in vars(owner):
            space = vars(owner)
            return self._values.read((id(space), name), (space.__getitem__, name))
        try:
            return self._attribute_of(owner, name)
        except AttributeError:
            if default:
                return default[0]
            raise

    def _call(self, node: Any) -> Any:
        if any(isinstance(each, ast.Starred) for each in node.args):
            raise NoValueError
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value)
            if isinstance(owner, int | float | np.number):
                return _converted(owner, node)
            function = self._attribute_of(owner, node.func.attr)
        else:
            function = self.value(node.func)
        args = [self.value(each) for each in node.args]
        kwargs = {each.arg: self.value(each.value) for each in node.keywords}
        if None in kwargs:
            raise NoValueError
        if function is getattr:
            return self._named_attribute(*args)
        return self._result(function, args, kwargs)

    def _result(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What a call returns, if the function does nothing but compute."""
        while isinstance(function, partial | types.MethodType):
            if isinstance(function, types.MethodType):
                function, args = function.__func__, [function.__self__, *args]
            else:
                kwargs = {**function.keywords, **kwargs}
                function, args = function.func, [*function.args, *args]
        if isinstance(function, types.FunctionType) and is_of_script(function):
            return self._result_of_script(function, args, kwargs)
        call = inspect.getattr_static(type(function), "__call__", None)
        if isinstance(call, types.FunctionType) and is_of_script(call):
            return self._result_of_script(call, [function, *args], kwargs)
        if function in (torch.tensor, torch.as_tensor) and len(args) == 1:
            return _plain(args[0])
        if not _only_computes(function):
            raise NoValueError
        for each in args:
            _plain(each)
            if function is range and abs(each) > _MAX_ITERATIONS:
                raise NoValueError
        return function(*args, **kwargs)

    def _result_of_script(
        self, function: types.FunctionType, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """What a call of a function of the script's returns."""
        node, code = definition_of(function), function.__code__
        if node is None or self._depth >= _MAX_DEPTH:
            raise NoValueError
        if code.co_flags & (_RUNS_LATER | _TAKES_ANY_ARGUMENTS) or len(args) > code.co_argcount:
            raise NoValueError
        own = {**dict(default_arguments(function)), **kwargs}
        own.update(zip(code.co_varnames, args, strict=False))
        inner = Evaluation(function, self._values, own, {}, self._depth + 1)
        if isinstance(node, ast.Lambda):
            return inner.value(node.body)
        try:
            inner._run(node.body)
        except _Return as end:
            return end.value
        return None

    def _run(self, body: list[ast.stmt]) -> None:
        """Assign its variables as these statements do. Raises _Return where they return."""
        for node in body:
            if isinstance(node, ast.Return):
                raise _Return(None if node.value is None else self.value(node.value))
            if isinstance(node, ast.If):
                self._run(node.body if _plain(self.value(node.test)) else node.orelse)
            elif isinstance(node, ast.For) and not node.orelse:
                for item in self._items(node.iter):
                    self._assign(node.target, item)
                    self._run(node.body)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assign(node.targets[0], self.value(node.value))
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                left, right = self._own[node.target.id], _plain(self.value(node.value))
                self._own[node.target.id] = _operation(node.op)(_plain(left), right)
            elif not (
                isinstance(node, ast.Pass | ast.Assert)
                or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            ):
                raise NoValueError

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._own[target.id] = value
        elif isinstance(target, ast.Tuple) and isinstance(value, list | tuple):
            for each, part in zip(target.elts, value, strict=True):
                self._assign(each, part)
        else:
            raise NoValueError


_EVALUATORS: Mapping[type, Callable[[Evaluation, Any], Any]] = {
    ast.Constant: Evaluation._constant,
    ast.Name: Evaluation._name,
    ast.Attribute: Evaluation._attribute,
    ast.Subscript: Evaluation._item,
    ast.List: Evaluation._sequence,
    ast.Tuple: Evaluation._sequence,
    ast.BinOp: Evaluation._binary,
    ast.UnaryOp: Evaluation._unary,
    ast.Compare: Evaluation._compare,
    ast.BoolOp: Evaluation._bool,
    ast.IfExp: Evaluation._choice,
    ast.Call: Evaluation._call,
    ast.JoinedStr: Evaluation._joined,
    ast.FormattedValue: Evaluation._formatted,
    ast.GeneratorExp: Evaluation._comprehension,
    ast.ListComp: Evaluation._comprehension,
}


class _Return(Exception):  # noqa: N818
    """A function has come to its end."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _plain(value: Any) -> Any:
    """`value`, if it is a plain one. Raises NoValueError for others, as tensors and objects are."""
    if not isinstance(value, (*PLAIN, np.number, list, dict, tuple)):
        raise NoValueError
    return value


def _converted(number: Any, call: ast.Call) -> Any:
    """What this method of a tensor with this number returns."""
    assert isinstance(call.func, ast.Attribute)
    if call.func.attr not in _CONVERSIONS or call.args:
        raise NoValueError
    return number


def _operation(node: ast.AST) -> Callable[..., Any]:
    if type(node) not in _OPERATORS:
        raise NoValueError
    return _OPERATORS[type(node)]


def _only_computes(function: Any) -> bool:
    """Whether a library's function returns a number and does nothing else."""
    if isinstance(function, np.ufunc) or getattr(function, "__module__", None) == "math":
        return True
    return any(function is each for each in (*_BUILTINS, *_OF_NUMPY))
