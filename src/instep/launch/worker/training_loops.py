"""Finds the training loops of a script for `--checkpoint`, and has LoopIterations called in each.

The source is rewritten in memory only, and lines keep their numbers.

Such a loop counts (`for epoch in range(90)`, `while step < limit`), leads to a call of `backward`,
itself or through functions of the script, and makes no optimizer. Of loops inside of one another it
is the outermost.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType

from instep.check.script import Function, Script
from instep.launch.worker import static_opt_out
from instep.process.process_value import ProcessValue
from instep.unedited.checkpoint.loop_iterations import LoopIterations
from instep.unedited.errors import CannotSaveScriptError

HANDLE = "__instep_iterations__"
"""The builtin that the rewritten loops call."""
_BARS = ("tqdm", "trange", "track", "progress_bar", "master_bar", "reversed", "enumerate", "iter")
"""Functions whose result has the items of their argument."""
_COUNTS = ("range", "trange", "count", "arange", "prange")
_OF_TORCH = ("train", "eval", "step", "update", "save", "load")
"""Names that methods of torch and of the script may share."""
_OPTIMIZER_MAKERS = ("configure", "create", "make", "build", "get", "init", "setup")

Loop = ast.For | ast.While
_Scope = Function | ast.Lambda | ast.ClassDef


class TrainingLoops:
    """The loops of a script and of its neighbours that are saved after each iteration."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self._scripts = scripts
        self._functions: dict[str, list[ast.AST]] = {}
        self._methods: dict[str, list[ast.AST]] = {}
        self._instances: dict[str, set[str]] = {}
        """Names of variables that an object of a class of the script is assigned to."""
        for script in scripts:
            self._read(script)

    def lines(self, script: Script) -> frozenset[int]:
        """The first lines of those in this file."""
        return frozenset(loop.lineno for loop in self._outermost if loop in script.all(type(loop)))

    @cached_property
    def _outermost(self) -> list[Loop]:
        found: list[Loop] = [
            loop
            for script in self._scripts
            for loop in _loops(script)
            if self._counts(script, loop) and self._trains(loop) and not self._makes_optimizer(loop)
        ]
        inside: set[ast.AST] = set()
        for loop in found:
            for each in self._reached(loop):
                if each is not loop and isinstance(each, ast.For | ast.While):
                    inside.add(each)
        return [loop for loop in found if loop not in inside]

    # ------------------------------------------------------------------------ calls

    def _read(self, script: Script) -> None:
        for functions in script.functions.values():
            for function in functions:
                is_method = isinstance(script.parent(function), ast.ClassDef)
                table = self._methods if is_method else self._functions
                table.setdefault(function.name, []).append(function)
        for assign in script.all(ast.Assign):
            if isinstance(assign.value, ast.Call):
                for target in assign.targets:
                    name = _last_name(target)
                    self._instances.setdefault(name, set()).add(script.call_name(assign.value))

    def _called(self, call: ast.Call) -> list[ast.AST]:
        """The functions of the script that a call may run."""
        function = call.func
        if isinstance(function, ast.Name):
            return [*self._functions.get(function.id, ()), *self._constructed(function.id)]
        if not isinstance(function, ast.Attribute):
            return []
        name = function.attr
        if name in _OF_TORCH and not self._is_own_object(function.value, name):
            return []
        return [*self._methods.get(name, ()), *self._functions.get(name, ())]

    def _constructed(self, name: str) -> list[ast.AST]:
        return [
            method
            for script in self._scripts
            for node in script.all(ast.ClassDef)
            if node.name == name
            for method in node.body
            if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        ]

    def _is_own_object(self, value: ast.expr, method: str) -> bool:
        """Whether it is a module of the script, or an object of its class with such a method."""
        owners = {
            node.name
            for script in self._scripts
            for node in script.all(ast.ClassDef)
            if any(isinstance(each, ast.FunctionDef) and each.name == method for each in node.body)
        }
        if isinstance(value, ast.Call):
            return _last_name(value.func) in owners
        name = _last_name(value)
        is_module = any(Path(script.path).stem == name for script in self._scripts)
        return is_module or name == "self" or bool(self._instances.get(name, set()) & owners)

    def _reached(self, node: ast.AST) -> Iterator[ast.AST]:
        """All nodes in it, and in the functions of the script that it calls."""
        entered: set[ast.AST] = {node}
        waiting = [node]
        while waiting:
            for each in _own_nodes(waiting.pop()):
                yield each
                if isinstance(each, ast.Call):
                    new = [called for called in self._called(each) if called not in entered]
                    entered.update(new)
                    waiting += new

    def _trains(self, loop: Loop) -> bool:
        return any(
            isinstance(each, ast.Call) and _last_name(each.func) in ("backward", "manual_backward")
            for each in self._reached(loop)
        )

    def _makes_optimizer(self, loop: Loop) -> bool:
        return any(
            isinstance(each, ast.Call) and _makes_optimizer(each) for each in self._reached(loop)
        )

    def _counts(self, script: Script, loop: Loop) -> bool:
        """Whether the iterations of a loop can be counted, and the first of them left out."""
        if isinstance(loop, ast.While):
            return True
        value: ast.expr = loop.iter
        if isinstance(value, ast.Name):
            value = next(
                (
                    assign.value
                    for assign in script.all(ast.Assign)
                    if any(_last_name(target) == value.id for target in assign.targets)
                ),
                value,
            )
        while isinstance(value, ast.Call):
            name = _last_name(value.func)
            if name in _COUNTS:
                return True
            if name not in _BARS or not value.args:
                return False
            value = value.args[0]
        return isinstance(value, ast.List | ast.Tuple)


def _loops(script: Script) -> list[Loop]:
    found: list[Loop] = [*script.all(ast.For)]
    return found + script.all(ast.While)


def _makes_optimizer(call: ast.Call) -> bool:
    name = _last_name(call.func)
    first, _, rest = name.partition("_")
    if rest.startswith("optim") and first in _OPTIMIZER_MAKERS:
        return True
    return name[:1].isupper() and any(
        isinstance(each, ast.Call) and _last_name(each.func) in ("parameters", "named_parameters")
        for argument in (*call.args, *(given.value for given in call.keywords))
        for each in ast.walk(argument)
    )


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The node and those in it, without functions and classes that are defined there."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += [
            child
            for child in ast.iter_child_nodes(each)
            if not isinstance(child, _Scope) or isinstance(child, ast.Lambda)
        ]


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


# ---------------------------------------------------------------------------- the changed text


class _Rewriting(ast.NodeTransformer):
    def __init__(self, lines: frozenset[int]) -> None:
        self._lines = lines

    def visit_For(self, loop: ast.For) -> list[ast.stmt]:  # the name that ast looks for
        self.generic_visit(loop)
        if loop.lineno not in self._lines:
            return [loop]
        loop.iter = ast.copy_location(_call("each", loop.iter, *_lines(loop)), loop.iter)
        _watch_returns(loop)
        return [loop, *_leave(loop)]

    def visit_While(self, loop: ast.While) -> list[ast.stmt]:
        self.generic_visit(loop)
        if loop.lineno not in self._lines:
            return [loop]
        name = f"__instep_while_{loop.lineno}__"
        iterations = ast.Assign([ast.Name(name, ast.Store())], _call("tests", *_lines(loop)))
        following = ast.Call(ast.Attribute(ast.Name(name, ast.Load()), "next", ast.Load()), [], [])
        loop.test = ast.copy_location(ast.BoolOp(ast.And(), [following, loop.test]), loop.test)
        _watch_returns(loop)
        return [ast.copy_location(iterations, loop), loop, *_leave(loop)]


def _lines(loop: Loop) -> tuple[ast.Constant, ast.Constant]:
    """The first line, and the last one of the body."""
    return ast.Constant(loop.lineno), ast.Constant(loop.body[-1].end_lineno)


def _leave(loop: Loop) -> list[ast.stmt]:
    """What stands behind a loop, unless `break` also passes over an `else` there."""
    call = _call("leave", ast.Constant(loop.lineno))
    return [] if loop.orelse else [ast.copy_location(ast.Expr(call), loop)]


def _watch_returns(loop: Loop) -> None:
    """What a `return` of the loop returns goes through LoopIterations."""
    for each in _own_nodes(loop):
        if isinstance(each, ast.Return):
            value = each.value or ast.Constant(None)
            call = _call("return_value", value, ast.Constant(loop.lineno))
            each.value = ast.copy_location(call, each)


def _call(method: str, *arguments: ast.expr) -> ast.Call:
    handle = ast.Attribute(ast.Name(HANDLE, ast.Load()), method, ast.Load())
    return ast.Call(handle, list(arguments), [])


class _Compiler:
    """Compiles files of a script so that their training loops call `LoopIterations`."""

    def __init__(self, command: Sequence[str]) -> None:
        entry = static_opt_out.find_entry(command)[0]
        self._scripts = {script.path: script for script in static_opt_out.read_files(command)}
        loops = TrainingLoops(list(self._scripts.values()))
        self._lines = {path: loops.lines(script) for path, script in self._scripts.items()}
        if not any(self._lines.values()):
            raise CannotSaveScriptError(
                f"--checkpoint found no loop in {os.path.relpath(entry)} that it could save: one "
                "that counts, such as `for epoch in range(90)`, and calls backward(), itself or "
                "through functions of the script. Let the script save itself with "
                "instep.Checkpoint or torch.save, and run it without --checkpoint."
            )

    def compile(self, source: bytes | str, path: str) -> CodeType:
        """The code of one file."""
        lines = self._lines.get(os.path.realpath(path))
        if not lines:
            return compile(source, path, "exec", dont_inherit=True)
        tree = _Rewriting(lines).visit(ast.parse(source, path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    @property
    def folders(self) -> frozenset[str]:
        """The folders of files with training loops."""
        return frozenset(os.path.dirname(path) for path, lines in self._lines.items() if lines)


_compiler = ProcessValue[_Compiler | None](None)


def install(command: Sequence[str], folder: Path) -> None:
    """Let the training loops of a program be saved to `folder`. Raises CannotSaveScriptError."""
    _compiler.value = _Compiler(command)
    setattr(builtins, HANDLE, LoopIterations(folder))
    sys.path_hooks.insert(0, _find_neighbours)
    sys.path_importer_cache.clear()


def compile_script(source: bytes | str, path: str) -> CodeType:
    """The code of a file; its training loops are saved, if `install` was called."""
    if _compiler.value is None:
        return compile(source, path, "exec", dont_inherit=True)
    return _compiler.value.compile(source, path)


def _find_neighbours(path: str) -> FileFinder:
    """For sys.path_hooks: finds modules beside the script, and compiles them without a cache."""
    if _compiler.value is None or os.path.realpath(path) not in _compiler.value.folders:
        raise ImportError
    return FileFinder(
        path, (ExtensionFileLoader, EXTENSION_SUFFIXES), (_LocalModuleLoader, [".py"])
    )


class _LocalModuleLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile_script(self.get_data(path), path)
