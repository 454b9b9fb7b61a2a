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
_RUN_AS_A_PROGRAM = "__name__ == '__main__'"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def calls(tree: ast.Module, name: str) -> bool:
    """Whether this script, when it runs as a program, calls something of that name.

    Not for certain if it may leave elsewhere than on the way that is always taken.
    """
    along = [*_Way(tree).along(tree.body)]
    exits = sum(called in _EXITS for called in _all_calls(tree))
    if exits > sum(called in _EXITS for called in along):
        return False
    return name in takewhile(lambda called: called not in _EXITS, along)


class _Way:
    """The way that every run of a script takes, as far as it can be told."""

    def __init__(self, tree: ast.Module) -> None:
        self._functions = {node.name: node for node in tree.body if isinstance(node, _Function)}

    def along(self, statements: Sequence[ast.stmt]) -> Iterator[str]:
        """The names of what these call, in order, up to a condition under which they return."""
        for statement in statements:
            if isinstance(statement, ast.With) or _is_always_entered(statement):
                yield from self.along(statement.body)
            elif isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return):
                yield from self._evaluated(statement.value)
            if _may_return(statement):
                return

    def _evaluated(self, value: ast.expr | None) -> Iterator[str]:
        if not isinstance(value, ast.Call):
            return
        for argument in value.args:
            yield from self._evaluated(argument)
        name = _name(value)
        yield name
        function = self._functions.pop(name, None)  # once: it may call itself
        if isinstance(function, ast.FunctionDef):
            yield from self.along(function.body)


def _is_always_entered(statement: ast.stmt) -> TypeGuard[ast.If | ast.Try]:
    if isinstance(statement, ast.Try):
        return not statement.handlers
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == _RUN_AS_A_PROGRAM


def _may_return(node: ast.AST) -> bool:
    """Whether it has a `return` of its own."""
    if isinstance(node, ast.Return):
        return True
    return not isinstance(node, _Function) and any(map(_may_return, ast.iter_child_nodes(node)))


def _all_calls(tree: ast.Module) -> Iterator[str]:
    return (_name(node) for node in ast.walk(tree) if isinstance(node, ast.Call))


def _name(call: ast.Call) -> str:
    """The last part of what is called."""
    called = call.func
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
