"""What a script calls for certain, read from its text (pure).

Only what no condition can prevent counts: many scripts start a process group under a launcher
alone, and are one process without it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TypeGuard

_EXITS = ("exit", "_exit", "quit")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def calls(tree: ast.Module, name: str) -> bool:
    """Whether this script, when it runs as a program, calls something of that name.

    Not for certain if it may leave elsewhere than on the way that is always taken.
    """
    follow = [*_UnconditionalPath(tree).follow(tree.body)]
    exits = sum(called in _EXITS for called in _all_calls(tree))
    if exits > sum(called in _EXITS for called in follow):
        return False
    return name in takewhile(lambda called: called not in _EXITS, follow)


class _UnconditionalPath:
    """The way that every run of a script takes, as far as it can be told."""

    def __init__(self, tree: ast.Module) -> None:
        self._functions = {node.name: node for node in tree.body if isinstance(node, _Function)}

    def follow(self, statements: Sequence[ast.stmt]) -> Iterator[str]:
        """The names of what these call, in order, up to a condition under which they return."""
        entered = [self._steps(statements)]
        while entered:  # no recursion: functions may call each other a thousand deep
            step = next(entered[-1], None)
            if step is None:
                entered.pop()
            elif isinstance(step, str):
                yield step
            else:
                entered.append(self._steps(step))

    def _steps(self, statements: Sequence[ast.stmt]) -> Iterator[str | Sequence[ast.stmt]]:
        """What these call: names, and in between the statements that are entered."""
        for statement in statements:
            if isinstance(statement, ast.With) or _is_always_entered(statement):
                yield statement.body
            elif isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return):
                yield from self._evaluated(statement.value)
            if _may_return(statement):
                return

    def _evaluated(self, value: ast.expr | None) -> Iterator[str | Sequence[ast.stmt]]:
        if not isinstance(value, ast.Call):
            return
        for argument in value.args:
            yield from self._evaluated(argument)
        name = _name(value)
        yield name
        function = self._functions.pop(name, None)  # once: it may call itself
        if isinstance(function, ast.FunctionDef):
            yield function.body


def _is_always_entered(statement: ast.stmt) -> TypeGuard[ast.If | ast.Try]:
    if isinstance(statement, ast.Try):
        return not statement.handlers
    return isinstance(statement, ast.If) and _asks_for_a_program(statement.test)


def _asks_for_a_program(test: ast.expr) -> bool:
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
        if not isinstance(each, _Function):
            inside += ast.iter_child_nodes(each)
    return False


def _all_calls(tree: ast.Module) -> Iterator[str]:
    return (_name(node) for node in ast.walk(tree) if isinstance(node, ast.Call))


def _name(call: ast.Call) -> str:
    """The last part of what is called."""
    called = call.func
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
