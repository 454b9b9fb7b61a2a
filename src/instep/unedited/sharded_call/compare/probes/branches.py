"""Branches of the script that make a difference, found by the instruction that reads what their
condition asks for."""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from types import CodeType

from instep.process import is_script_file
from instep.unedited.objects.syntax_trees import tree_of
from instep.unedited.sharded_call.plan.module_state.module_properties import is_library

SIZES = ("__len__", "numel", "nelement", "size")
"""Methods that return a tensor's size."""
_ASKING = frozenset(("any", *SIZES))
"""Methods that say whether a tensor has rows, or is true for any."""
_REPORTING = frozenset(
    (
        *("print", "warn", "warning", "info", "debug", "error", "critical", "exception"),
        *("breakpoint", "set_trace", "exit", "_exit", "quit"),
    )
)
"""Functions whose call makes no difference to what a forward returns."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_Position = tuple[int, int, int, int]
"""The first and last line of an expression, and the first and last column there."""


def branch_at(code: CodeType, instruction: int) -> str:
    """The place of the branch that the value which is read there decides; "" if none."""
    file = code.co_filename
    if not is_script_file(file) or is_library(file):
        return ""
    first, last, begin, end = next(islice(code.co_positions(), instruction // 2, None))
    if first is None or last is None or begin is None or end is None:
        return ""
    if not _decides(file, code.co_firstlineno, (first, last, begin, end)):
        return ""
    return f"{os.path.basename(file)}:{first}"


def _decides(file: str, scope: int, place: _Position) -> bool:
    """Whether the expression there is in a condition of a branch that makes a difference, or gives
    the value of a variable that is in one of the same function."""
    branches = _branches_of(file, scope)
    # The jump of `if x.any():` has the place of the statement, that of `if x > 1:` of its test.
    if any(_is_within(place, each.test) or place == _span(each) for each in branches):
        return True
    names = _names_set_at(file, place)
    return any(
        isinstance(node, ast.Name) and node.id in names
        for branch in branches
        for node in ast.walk(branch.test)
    )


@functools.cache
def _branches_of(file: str, scope: int) -> tuple[ast.If | ast.While | ast.IfExp, ...]:
    """The branches that make a difference in the function with this first line."""
    return tuple(
        node
        for node in _nodes_of(file, scope)
        if isinstance(node, ast.If | ast.While | ast.IfExp)
        and not (_is_guard(node) or _only_reports(_statements_of(node)))
    )


def _statements_of(branch: ast.If | ast.While | ast.IfExp) -> list[ast.stmt]:
    if isinstance(branch, ast.IfExp):
        return [ast.Expr(branch.body), ast.Expr(branch.orelse)]
    return [*branch.body, *branch.orelse]


def _is_guard(branch: ast.If | ast.While | ast.IfExp) -> bool:
    """Whether something is only done with rows that were chosen, if there are any: an expert is
    called with its rows. `continue` where there are none is one, too."""
    body = [ast.Expr(branch.body)] if isinstance(branch, ast.IfExp) else branch.body
    name, where_none = _asked_for_rows(branch.test)
    if where_none:
        return all(isinstance(each, ast.Continue) for each in body)
    if not name or (isinstance(branch, ast.If | ast.While) and branch.orelse):
        return False
    derived = {name}
    for statement in body:
        names = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name)}
        if names.isdisjoint(derived):
            return False
        if isinstance(statement, ast.Assign):
            derived |= {each.id for each in statement.targets if isinstance(each, ast.Name)}
    return True


def _asked_for_rows(test: ast.expr) -> tuple[str, bool]:
    """The name of the tensor that this asks for any rows, or any truth; and whether it is true
    where there are none. "" if it asks for something else."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        name, where_none = _asked_for_rows(test.operand)
        return name, bool(name) and not where_none
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        operator, number = type(test.ops[0]), test.comparators[0]
        compared = (operator, number.value) if isinstance(number, ast.Constant) else None
        if compared in ((ast.Gt, 0), (ast.NotEq, 0), (ast.GtE, 1)):
            return _asked_for_rows(test.left)
        is_none = compared in ((ast.Eq, 0), (ast.Lt, 1))
        return _asked_for_rows(ast.UnaryOp(ast.Not(), test.left)) if is_none else ("", False)
    if isinstance(test, ast.Subscript):  # of `x.shape[0]`
        test = test.value
    match test:
        case ast.Call(func=ast.Name(id="len" | "bool"), args=[ast.Name(id=name)]):
            return name, False
        case ast.Call(func=ast.Name(id="len" | "bool"), args=[ast.Call() as inner]):
            return _asked_for_rows(inner)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=asked)):
            return (name, False) if asked in _ASKING else ("", False)
        case ast.Attribute(value=ast.Name(id=name), attr="shape"):
            return name, False
    return "", False


def _nodes_of(file: str, scope: int) -> Iterator[ast.AST]:
    for node in ast.walk(tree_of(file)):
        if isinstance(node, _SCOPES):
            decorators = getattr(node, "decorator_list", [])
            if min([node.lineno, *(each.lineno for each in decorators)]) == scope:
                yield from ast.walk(node)


def _only_reports(statements: Sequence[ast.stmt]) -> bool:
    """Whether these raise an error, or say something, and do nothing else."""
    return all(
        isinstance(each, ast.Raise | ast.Pass | ast.Assert | ast.Import | ast.ImportFrom)
        or (isinstance(each, ast.Expr) and _is_report(each.value))
        or (isinstance(each, ast.If) and _only_reports([*each.body, *each.orelse]))
        for each in statements
    )


def _is_report(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return True
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "attr", getattr(node.func, "id", "")) in _REPORTING


def _names_set_at(file: str, place: _Position) -> set[str]:
    """The variables of an assignment that the expression is a part of."""
    return {
        target.id
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Assign) and _is_within(place, node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _is_within(place: _Position, node: ast.expr) -> bool:
    first, last, begin, end = place
    own_first, own_last, own_begin, own_end = _span(node)
    return (own_first, own_begin) <= (first, begin) and (last, end) <= (own_last, own_end)


def _span(node: ast.stmt | ast.expr) -> _Position:
    last, end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    return node.lineno, last, node.col_offset, end
