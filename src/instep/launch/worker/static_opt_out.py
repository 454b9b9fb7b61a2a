"""Scripts that run as they are because they divide their work themselves, found by their text.

A script opts out if it, or a file of the user's that it imports, uses instep, Horovod or Jittor, or
if it certainly starts a process group. A call that a condition can prevent does not count: many
scripts start a process group under a launcher only, and are one process without it.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TypeGuard

from instep.check.script import Function, Script
from instep.process import settings
from instep.unedited.opt_out import BatchEffect

MAX_FILES = 300
"""Files that are read at most."""
_EXPLICIT_LIBRARIES = {"instep", "horovod", "jittor"}
"""A script that uses one of these packages divides its work itself; but for instep under
`--bitwise`, whose functions are those of one process there."""
_UNEDITED = ("instep.auto.", "instep.unedited.")
"""Modules of theirs whose use does not mean it."""
_OTHERS_NAMES = ("instep.jittor.", "instep.compat.")
_OWN_GROUP = "it starts a process group of its own"
_CALLS_SHARD = "calls instep itself"
_EXITS = ("exit", "_exit", "quit")


def batch_effect(reason: str) -> BatchEffect:
    """What becomes of the batch of a script that opts out for this reason."""
    if reason == _OWN_GROUP or reason.endswith("uses horovod itself"):
        return BatchEffect.UNKNOWN
    if reason.endswith("uses instep itself"):
        return BatchEffect.UNSHARDED
    return BatchEffect.SHARDED if reason.endswith(_CALLS_SHARD) else BatchEffect.SAME


def find_opt_out(command: Sequence[str]) -> str | None:
    """Return the reason to run this program as it is, or None. Nothing is run or imported."""
    entry, _ = find_entry(command)
    has_own_group = False
    for script in read_files(command):
        if script.path == str(entry):
            has_own_group = _certainly_calls(script, "init_process_group")
        if library := next(filter(None, map(_explicit_library, script.imported_names)), None):
            calls = library == "instep" and any(script.calls_of("instep.shard"))
            if calls or not has_own_group:
                verb = _CALLS_SHARD if calls else f"uses {library} itself"
                return f"{os.path.relpath(script.path)} {verb}"
    return _OWN_GROUP if has_own_group else None


def read_files(command: Sequence[str]) -> Iterator[Script]:
    """The file that runs first, and those of the user's that it imports, one by one."""
    entry, root = find_entry(command)
    waiting, seen = [entry], {entry}
    while waiting and len(seen) <= MAX_FILES:
        path = waiting.pop()
        try:
            script = Script.read(str(path))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # running it will show why
        yield script
        names = script.imported_names
        new = {file for name in names for file in _find_local_files(name, path, root)} - seen
        seen |= new
        waiting += sorted(new)


def find_entry(command: Sequence[str]) -> tuple[Path, Path]:
    """The file that runs first, and the folder from which it imports its neighbours."""
    if command[0] != "-m":
        path = Path(command[0]).resolve()
        return path, path.parent
    root = Path.cwd()
    module = root.joinpath(*command[1].split("."))
    return (module / "__main__.py" if module.is_dir() else module.with_suffix(".py")), root


def _explicit_library(name: str) -> str | None:
    """The library by which a script that imports this name divides its work, if any."""
    root = name.partition(".")[0]
    if root not in _EXPLICIT_LIBRARIES or f"{name}.".startswith(_UNEDITED):
        return None
    if settings.is_bitwise() and root == "instep" and not f"{name}.".startswith(_OTHERS_NAMES):
        return None
    return root


def _find_local_files(name: str, importer: Path, root: Path) -> Iterator[Path]:
    """The user's own files that run when this name is imported."""
    level = len(name) - len(name.lstrip("."))
    above = importer.parents[level - 1] if 0 < level <= len(importer.parents) else root
    parts = [part for part in name.split(".") if part]
    for depth in range(1, len(parts) + 1):
        place = above.joinpath(*parts[:depth])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                yield file


# ------------------------------------------------------------------------- unconditional calls


def _certainly_calls(script: Script, name: str) -> bool:
    """Whether every run of this script as a program calls something of that name.

    Not if the script may exit elsewhere than on the path that every run takes.
    """
    calls = [*_TopLevelCalls(script).follow(script.tree.body)]
    exits = sum(1 for _ in script.calls_named(*_EXITS))
    if exits > sum(called in _EXITS for called in calls):
        return False
    return name in takewhile(lambda called: called not in _EXITS, calls)


class _TopLevelCalls:
    """The calls that every run of a script makes, as far as its text shows them."""

    def __init__(self, script: Script) -> None:
        self._call_name = script.call_name
        self._functions = {n.name: n for n in script.tree.body if isinstance(n, Function)}

    def follow(self, statements: Sequence[ast.stmt]) -> Iterator[str]:
        """Names of the calls, in order, up to a condition under which the statements return."""
        entered = [self._follow_block(statements)]
        while entered:  # no recursion: functions may call each other a thousand deep
            step = next(entered[-1], None)
            if step is None:
                entered.pop()
            elif isinstance(step, str):
                yield step
            else:
                entered.append(self._follow_block(step))

    def _follow_block(self, statements: Sequence[ast.stmt]) -> Iterator[str | Sequence[ast.stmt]]:
        """Names of calls, and between them the blocks that are entered."""
        for statement in statements:
            if isinstance(statement, ast.With) or _is_always_entered(statement):
                yield statement.body
            elif isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return):
                yield from self._follow_value(statement.value)
            if _may_return(statement):
                return

    def _follow_value(self, value: ast.expr | None) -> Iterator[str | Sequence[ast.stmt]]:
        if not isinstance(value, ast.Call):
            return
        for argument in value.args:
            yield from self._follow_value(argument)
        name = self._call_name(value)
        yield name
        function = self._functions.pop(name, None)  # once: it may call itself
        if isinstance(function, ast.FunctionDef):
            yield function.body


def _is_always_entered(statement: ast.stmt) -> TypeGuard[ast.If | ast.Try]:
    if isinstance(statement, ast.Try):
        return not statement.handlers
    return isinstance(statement, ast.If) and _is_main_test(statement.test)


def _is_main_test(test: ast.expr) -> bool:
    """Whether this is `__name__ == "__main__"`."""
    match test:
        case ast.Compare(
            left=ast.Name(id="__name__"),
            ops=[ast.Eq()],
            comparators=[ast.Constant(value="__main__")],
        ):
            return True
    return False


def _may_return(node: ast.AST) -> bool:
    """Whether it has a `return` of its own."""
    inside = [node]
    for each in inside:  # no recursion: an expression may be a chain of a thousand calls
        if isinstance(each, ast.Return):
            return True
        if not isinstance(each, Function):
            inside += ast.iter_child_nodes(each)
    return False
