"""Branches of the script that make a difference."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from instep.unedited.sharded_call.compare.probes.function_rows import Branch

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


def makes_difference(branch: Branch) -> bool:
    """Whether this branch makes a difference to what a forward returns."""
    node = branch.node
    if not isinstance(node, ast.If | ast.While | ast.IfExp):
        return True
    if isinstance(node, ast.IfExp):
        only_reports = _is_report(node.body) and _is_report(node.orelse)
    else:
        only_reports = _only_reports([*node.body, *node.orelse])
    return not (only_reports or _is_guard(node, branch.is_of_list))


def _is_guard(branch: ast.If | ast.While | ast.IfExp, is_of_list: bool) -> bool:
    """Whether something is only done with rows that were chosen, if there are any: an expert is
    called with its rows. `continue` where there are none is one, too."""
    body = [ast.Expr(branch.body)] if isinstance(branch, ast.IfExp) else branch.body
    name, where_none = _asked_for_rows(branch.test, is_of_list)
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


def _asked_for_rows(test: ast.expr, is_of_list: bool = False) -> tuple[str, bool]:
    """The name of the tensor that this asks for any rows, or any truth, or of the list; and whether
    it is true where there are none. "" if it asks for something else."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        name, where_none = _asked_for_rows(test.operand, is_of_list)
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
        case ast.Name(id=name):
            return (name, False) if is_of_list else ("", False)
        case ast.Call(func=ast.Name(id="len" | "bool"), args=[ast.Name(id=name)]):
            return name, False
        case ast.Call(func=ast.Name(id="len" | "bool"), args=[ast.Call() as inner]):
            return _asked_for_rows(inner)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=asked)):
            return (name, False) if asked in _ASKING else ("", False)
        case ast.Attribute(value=ast.Name(id=name), attr="shape"):
            return name, False
    return "", False


def _only_reports(statements: Sequence[ast.stmt]) -> bool:
    """Whether these raise an error, or say something, and do nothing else."""
    return all(
        isinstance(each, ast.Raise | ast.Pass | ast.Assert | ast.Import | ast.ImportFrom)
        or (isinstance(each, ast.Expr) and _is_report(each.value))
        or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        or (isinstance(each, ast.If) and _only_reports([*each.body, *each.orelse]))
        for each in statements
    )


def _is_report(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "attr", getattr(node.func, "id", "")) in _REPORTING
