"""What the script keeps in modules, classes and functions of libraries: `torch.calls += 1`.

Which attributes it sets there stands in its files: nothing else in a library is looked at.
"""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from instep.training.pytree import PLAIN
from instep.unedited.objects.referents import is_empty_cell
from instep.unedited.objects.script_code import (
    ANY_NAME,
    OWN_OBJECT,
    is_of_script,
    named_modules,
    names_in,
    names_set_in,
    script_files,
)
from instep.unedited.objects.syntax_trees import tree_of

_NAMESPACES = ("__dict__", "__globals__")
_IMMUTABLE = 1 << 8
"""Py_TPFLAGS_IMMUTABLETYPE, of a class whose attributes nobody can set."""


def library_state(function: types.FunctionType) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """The modules' and functions' namespaces and the classes that a function names, and of each
    the names that the script sets there and the function names, too; after the beginning of a path.

    Of the script's own functions those without attributes are among them.
    """
    named = {*names_in(function.__code__)}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    free = {name: cell.cell_contents for name, cell in cells if not is_empty_cell(cell)}
    attributes = _set_by_script(function.__code__, script_files())
    wanted = named | {ANY_NAME}
    places = {
        base: attributes[base]
        for base in (*named, *free, "")
        if base in attributes and not wanted.isdisjoint(attributes[base])
    }
    if not places:
        return
    modules = dict(named_modules(function))
    spaces = (function.__globals__, free, modules, *map(vars, modules.values()))
    for base, names_set in places.items():
        values = {id(space[base]): space[base] for space in spaces if base in space}
        if not base:  # of a module that is found by a text, or passed to the function, say
            own = (each for each in function.__globals__.values() if _is_module(each))
            values = {id(module): module for module in (*modules.values(), *own)}
        for value in values.values():
            if (where := _where(value)) is None:
                continue
            names = named & names_set
            if ANY_NAME in names_set:
                space = vars(where) if isinstance(where, type) else where
                names |= {name for name in named if isinstance(space.get(name), PLAIN)}
            if names:
                yield f"{base or value.__name__}.", where, tuple(sorted(names))


def is_replaced(name: str, space: Mapping[str, Any]) -> bool:
    """Whether the script may assign a global variable of its own another time: in a function, in a
    loop, or in several places."""
    file = space.get("__file__")
    return isinstance(file, str) and name in _replaced_in(file)


def _is_module(value: Any) -> bool:
    """Whether this is a module, and none of instep's."""
    return isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] != "instep"


def is_of_library(space: Mapping[str, Any]) -> bool:
    """Whether this is the namespace of a library's module, of which the script sets a few names."""
    module = sys.modules.get(space.get("__name__", ""))
    return module is not None and vars(module) is space and not is_of_script(module)


def _where(value: Any) -> Any:
    """Where the attributes of this are, if they are looked at for this reason alone."""
    if isinstance(value, types.ModuleType):
        return None if is_of_script(value) else vars(value)
    if isinstance(value, type):
        return None if is_of_script(value) or value.__flags__ & _IMMUTABLE else value
    if isinstance(value, types.FunctionType):
        return None if is_of_script(value) and vars(value) else vars(value)
    return None


@functools.cache
def _set_by_script(code: types.CodeType, files: tuple[str, ...]) -> dict[str, set[str]]:
    """By the last name that leads to an object the attributes of it that the script sets somewhere;
    by "" those of what a call, an index or a function's own variable leads to. Only the files are
    read that set one of the names in this code, or any name."""
    found: dict[str, set[str]] = {}
    by_name = _files_by_name(files)
    setting = {file for name in (*names_in(code), ANY_NAME) for file in by_name.get(name, ())}
    for base, name in (pair for file in setting for pair in _pairs_in(file)):
        found.setdefault(base, set()).add(name)
    return found


@functools.cache
def _files_by_name(files: tuple[str, ...]) -> dict[str, list[str]]:
    """The files that set an attribute of this name."""
    found: dict[str, list[str]] = {}
    for file in files:
        for name in names_set_in(file):
            found.setdefault(name, []).append(file)
    return found


class _Inside:
    """The variables of a function and what it sets, with the functions inside of it."""

    def __init__(self, around: _Inside | None = None, own_object: str = "") -> None:
        self.around = around
        self.own_object = own_object
        """What a method calls its object."""
        self.variables: set[str] = set()
        self.pairs: set[tuple[str, str]] = set()


@functools.cache
def _pairs_in(file: str) -> frozenset[tuple[str, str]]:
    module = _Inside()
    functions: list[_Inside] = []
    waiting: list[tuple[ast.AST, _Inside, bool]] = [(tree_of(file), module, False)]
    while waiting:
        node, inside, in_class = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            first = node.args.args[0].arg if in_class and node.args.args else ""
            inside, in_class = _Inside(inside, first), False
            functions.append(inside)
        elif isinstance(node, ast.ClassDef):
            in_class = True
        elif isinstance(node, ast.arg):
            inside.variables.add(node.arg)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                inside.variables.add(node.id)
        elif pair := _pair_of(node):
            inside.pairs.add(pair)
        waiting += [(child, inside, in_class) for child in ast.iter_child_nodes(node)]
    found: set[tuple[str, str]] = set()
    for function in reversed(functions):  # the inner ones first
        own = function.variables - {function.own_object}
        found.update(("", name) for base, name in function.pairs if base in own)
        if function.around is not None:
            function.around.variables |= function.variables
            function.around.pairs |= function.pairs
    pairs = found | module.pairs
    return frozenset((base, name) for base, name in pairs if base not in OWN_OBJECT)


@functools.cache
def _replaced_in(file: str) -> frozenset[str]:
    tree = tree_of(file)
    found = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    once: set[str] = set()
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    for node, is_repeated in waiting:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            (found if is_repeated or node.id in once else once).add(node.id)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            in_loop = is_repeated or isinstance(node, ast.For | ast.While)
            waiting += [(child, in_loop) for child in ast.iter_child_nodes(node)]
    return frozenset(found)


def _pair_of(node: ast.AST) -> tuple[str, str] | None:
    """The object, by its last name, and the attribute that this sets, if it sets any."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return _last_name(node.value), node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        key, space = node.slice, node.value
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            if isinstance(space, ast.Attribute) and space.attr in _NAMESPACES:
                return _last_name(space.value), key.value
            if of := _arguments_of("vars", space):
                return _last_name(of[0]), key.value
            if isinstance(space, ast.Name) and key.value.isidentifier():
                return space.id, key.value
    found = _arguments_of("setattr", node)
    if len(found) == 3:
        name = found[1]
        return _last_name(found[0]), str(name.value) if isinstance(name, ast.Constant) else ANY_NAME
    return None


def _arguments_of(name: str, node: ast.AST) -> list[ast.expr]:
    """The arguments of a call of the function with this name; none of anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
        return node.args
    return []


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
