"""The attributes of a module that its forward can read.

Base classes of libraries keep in a module what drives it, as Lightning's keeps its Trainer, whose
counters change in each step. Where a forward, and the methods that it calls, only name attributes
of the module and hand it to nobody, what they do not name makes no difference to a call.
"""

from __future__ import annotations

import ast
import inspect
import types

from torch import nn

from instep.unedited.objects.script_code import functions_in
from instep.unedited.objects.syntax_trees import definition_of

_LOOKUPS = ("__call__", "_call_impl", "__getattribute__", "__getattr__", "__setattr__")
_BY_TEXT = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_WITHOUT_NAME = frozenset({"super", "locals", "vars", "eval", "exec", "__class__"})
"""By these a function gets at the object of which it is a method without its name."""
_OF_TENSORS = frozenset(
    {"parameters", "named_parameters", "buffers", "named_buffers", "children", "named_children"}
)
"""The methods of nn.Module that read only tables of parameters, buffers and parts."""
_OTHER_METHODS = (staticmethod, classmethod)


def readable_attributes(module: nn.Module) -> frozenset[str] | None:
    """The names of all attributes of the module that its forward may read; None: any.

    Hooks, and functions and objects among the arguments, may read others.
    """
    cls = type(module)
    is_other = any(getattr(cls, name) is not getattr(nn.Module, name) for name in _LOOKUPS)
    if is_other or "forward" in vars(module):
        return None
    found = {"training"}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        named = _named_by(inspect.getattr_static(cls, name, None), name)
        if named is None:
            return None
        waiting += named
    return frozenset(found)


def _named_by(value: object, name: str) -> set[str] | None:
    """The attributes of the module that this attribute of its class names; None: any."""
    if isinstance(value, _OTHER_METHODS) or not hasattr(type(value), "__get__"):
        return set()
    if value is getattr(nn.Module, name, None):
        return set() if name in _OF_TENSORS else None
    named: set[str] = set()
    functions = functions_in(value)
    for function in functions:
        names = _names_of_self(_unwrapped(function))
        if names is None:
            return None
        named |= names
    return named if functions else None


def _unwrapped(function: types.FunctionType) -> types.FunctionType:
    """What torch's decorators are around, as `torch.no_grad()`."""
    while str(function.__globals__.get("__name__")).startswith("torch."):
        inside = getattr(function, "__wrapped__", None)
        if not isinstance(inside, types.FunctionType):
            break
        function = inside
    return function


def _names_of_self(function: types.FunctionType) -> set[str] | None:
    """The attributes of its first argument that a function names; None if it does more with it."""
    node = definition_of(function)
    arguments = [] if node is None else [*node.args.posonlyargs, *node.args.args]
    if node is None or not arguments:
        return None
    own = arguments[0].arg
    names: set[str] = set()
    uses = 0
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            uses += each.id == own
            if each.id in _WITHOUT_NAME:
                return None
        elif name := _name_of_attribute(each, own):
            names.add(name)
            uses -= 1
    is_all = uses == 0 and not any(name.startswith("__") for name in names)
    return names if is_all else None


def _name_of_attribute(node: ast.AST, own: str) -> str:
    """The attribute of the variable `own` that this names; "" if it names none."""
    match node:
        case ast.Attribute(value=ast.Name(id=base), attr=name) if base == own:
            return name
        case ast.Call(
            func=ast.Name(id=function), args=[ast.Name(id=base), ast.Constant(value=name), *_]
        ) if base == own and function in _BY_TEXT and isinstance(name, str):
            return name
    return ""
