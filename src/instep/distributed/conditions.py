"""The condition of a script by which its ranks may have taken different branches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

_PLACE = re.compile(r" at (/.+):(\d+)$")
_LEAVES = (ast.Break, ast.Continue, ast.Return, ast.Raise)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_Loop = ast.For | ast.AsyncFor | ast.While


def advise_on_condition(sides: Iterable[str]) -> str:
    """What to do about the condition that may have led ranks to these collectives; empty if none.

    Only a condition counts that is in a loop around one of the lines, decides which lines are
    reached, and reads what a call has computed in that loop. What only counts is equal on all.

    Args:
        sides: the descriptions of collectives, each of which may end with " at file:line".
    """
    places = [match.groups() for side in sides if (match := _PLACE.search(side))]
    for file in dict.fromkeys(file for file, _ in places):
        lines = [int(line) for name, line in places if name == file]
        condition = _find_condition(file, lines)
        if condition is not None:
            return (
                f" `if {ast.unparse(condition.test)}` at {file}:{condition.lineno} decides whether "
                "a rank comes there, and each rank has its own value of it where it is computed "
                "from the rank's own block of the batch, as the loss is. Decide by a value that is "
                'equal on all ranks, such as instep.all_reduce(loss.detach(), "mean").'
            )
    return ""


def _find_condition(file: str, lines: list[int]) -> ast.If | None:
    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _Loop) and any(_has_line(node, line) for line in lines)
    ]
    for loop in sorted(loops, key=lambda node: -node.lineno):  # the innermost first
        computed = _computed_names(loop)
        for condition in _walk(loop.body):
            if (
                isinstance(condition, ast.If)
                and _decides(condition, lines)
                and computed & _names(condition.test)
            ):
                return condition
    return None


def _decides(condition: ast.If, lines: list[int]) -> bool:
    """Whether it leaves the loop or the iteration, or has only some of the lines inside."""
    inside = [any(_has_line(node, line) for node in condition.body) for line in lines]
    other = [any(_has_line(node, line) for node in condition.orelse) for line in lines]
    leaves = any(isinstance(node, _LEAVES) for node in _walk(condition.body + condition.orelse))
    return leaves or len({*zip(inside, other, strict=True)}) > 1


def _computed_names(loop: _Loop) -> set[str]:
    """The names that the loop sets to something that a call has computed, or a loader."""
    names: set[str] = set()
    if isinstance(loop, ast.For | ast.AsyncFor) and not _is_call_of(loop.iter, "range"):
        target = loop.target
        if _is_call_of(loop.iter, "enumerate") and isinstance(target, ast.Tuple):
            target = target.elts[-1]
        names |= _names(target)
    changed = True
    while changed:
        before = len(names)
        for node in _walk(loop.body):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
                value = node.value
                if value is None:
                    continue
                if _names(value) & names or any(isinstance(n, ast.Call) for n in ast.walk(value)):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names |= set().union(*map(_names, targets))
        changed = len(names) > before
    return names


def _walk(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """These nodes and what is in them, in their order, without the bodies of functions."""
    for node in nodes:
        if not isinstance(node, _FUNCTIONS):
            yield node
            yield from _walk(ast.iter_child_nodes(node))


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _has_line(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    return first <= line <= last


def _is_call_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
