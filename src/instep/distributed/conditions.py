"""The condition of a script by which its ranks may have taken different branches."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator

from instep.process import is_installed
from instep.process.exit_status import UNKNOWN_RANK
from instep.process.failures.tracebacks import awaited_rank, script_line
from instep.process.patching import ignored_warnings

_PLACE = re.compile(r" at (/.+):(\d+)$")
_LEAVES = (ast.Break, ast.Continue, ast.Return)
_NOT_RUN_THERE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_Loop = ast.For | ast.AsyncFor | ast.While
_Assignment = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def advise_on_condition(sides: Iterable[str]) -> str:
    """What to do about the condition that may have led ranks to these collectives; empty if none.

    Only a condition counts that is in a loop around one of the lines, decides which lines are
    reached, and reads what a call has computed in that loop. What only counts is equal on all.
    The loop may be in another function of that file, which calls the one with the line; then the
    condition may be in either. Files of installed packages are not the user's to change.

    Args:
        sides: the descriptions of collectives, each of which may end with " at file:line".
    """
    places = [match.groups() for side in sides if (match := _PLACE.search(side))]
    for file in dict.fromkeys(file for file, _ in places if not is_installed(file)):
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


def note_condition(error: BaseException) -> None:
    """Add the advice to an error which says only that some other rank has gone, as Gloo's does."""
    if awaited_rank(error) == UNKNOWN_RANK:
        advice = advise_on_condition([f" at {script_line(error)}"])
        if advice:
            error.add_note(f"A rank that this one waited for has gone.{advice}")


def _find_condition(file: str, lines: list[int]) -> ast.If | None:
    try:
        with open(file, "rb") as source, ignored_warnings(""):  # its import has shown them
            script = _Script(ast.parse(source.read()))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    sides = [script.lines_to(line) for line in lines]
    for scope, computed in script.repeated(sides):
        caught = _caught_raises(scope)
        for condition in _walk(scope.body):
            if (
                isinstance(condition, ast.If)
                and _decides(condition, sides, caught)
                and computed & _names(condition.test)
            ):
                return condition
    return None


class _Script:
    """The loops of a file, and which of its functions are called where."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = [*ast.walk(tree)]
        self._loops = [node for node in nodes if isinstance(node, _Loop)]
        functions = [node for node in nodes if isinstance(node, _Function)]
        names = [function.name for function in functions]
        self._functions = [each for each in functions if names.count(each.name) == 1]
        self._calls: dict[str, list[ast.Call]] = {}
        for node in nodes:
            if isinstance(node, ast.Call):
                self._calls.setdefault(_called_name(node), []).append(node)

    def lines_to(self, line: int) -> list[int]:
        """The line, those that call its function, those that call theirs, and so on."""
        lines = [line]
        for reached in lines:
            function = self._function_of(reached)
            if function is not None:
                calls = (call.lineno for call in self._calls.get(function.name, ()))
                lines += [each for each in dict.fromkeys(calls) if each not in lines]
        return lines

    def repeated(
        self, sides: Iterable[Collection[int]]
    ) -> Iterator[tuple[_Loop | _Function, set[str]]]:
        """The loops around these lines and the functions that loops call, the innermost first, each
        with the names in it that are set to something that a call has computed, or a loader."""
        for line in dict.fromkeys(line for side in sides for line in side):
            for loop in self._loops_around(line):
                yield loop, _computed_names(loop, _loop_variables(loop))
            function = self._function_of(line)
            calls = [] if function is None else self._calls.get(function.name, [])
            reached = (each for call in calls for each in self.lines_to(call.lineno))
            if function is not None and any(map(self._loops_around, reached)):
                given = set().union(*(self._computed_arguments(function, call) for call in calls))
                yield function, _computed_names(function, given)

    def _loops_around(self, line: int) -> list[_Loop]:
        found = [loop for loop in self._loops if _has_line(loop, line)]
        return sorted(found, key=lambda loop: -loop.lineno)

    def _function_of(self, line: int) -> _Function | None:
        around = (function for function in self._functions if _has_line(function, line))
        return max(around, key=lambda function: function.lineno, default=None)

    def _computed_arguments(self, function: _Function, call: ast.Call) -> set[str]:
        """The function's parameters for which this call passes what a call in its loop computed."""
        known = set[str]()
        for loop in self._loops_around(call.lineno):
            known |= _computed_names(loop, _loop_variables(loop))
        parameters = [each.arg for each in function.args.args]
        if parameters[:1] == ["self"]:
            del parameters[0]
        passed = [*zip(parameters, call.args, strict=False)]
        passed += [(each.arg, each.value) for each in call.keywords if each.arg is not None]
        return {name for name, value in passed if _is_computed(value, known)}


def _caught_raises(scope: _Loop | _Function) -> set[ast.Raise]:
    """The raises whose error the script may catch; any other one ends its rank, which says so."""
    tries = [node for node in _walk(scope.body) if isinstance(node, ast.Try) and node.handlers]
    inside = (node for each in tries for node in _walk(each.body))
    return {node for node in inside if isinstance(node, ast.Raise)}


def _decides(
    condition: ast.If, sides: Iterable[Collection[int]], caught: Collection[ast.Raise]
) -> bool:
    """Whether it leaves the loop or the iteration, or has only some of the sides inside."""
    leaves = any(
        isinstance(node, _LEAVES) or node in caught
        for node in _walk(condition.body + condition.orelse)
    )
    return (
        leaves
        or len({(_have(condition.body, side), _have(condition.orelse, side)) for side in sides}) > 1
    )


def _have(nodes: Iterable[ast.AST], lines: Collection[int]) -> bool:
    return any(_has_line(node, line) for node in nodes for line in lines)


def _loop_variables(loop: _Loop) -> set[str]:
    """The variables that a loop sets, without those that count through a range."""
    if isinstance(loop, ast.While) or _is_call_of(loop.iter, "range"):
        return set()
    target = loop.target
    if _is_call_of(loop.iter, "enumerate") and isinstance(target, ast.Tuple):
        target = target.elts[-1]
    return _names(target)


def _computed_names(scope: _Loop | _Function, names: set[str]) -> set[str]:
    """The names, and those that are set to something that depends on them or on a call."""
    assigned = [node for node in _walk(scope.body) if isinstance(node, _Assignment)]
    changed = True
    while changed:
        before = len(names)
        for node in assigned:
            if node.value is not None and _is_computed(node.value, names):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= set().union(*map(_names, targets))
        changed = len(names) > before
    return names


def _is_computed(value: ast.expr, names: set[str]) -> bool:
    return bool(_names(value) & names) or any(isinstance(n, ast.Call) for n in ast.walk(value))


def _walk(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Walk these nodes and what is in them, in order, without the bodies of functions."""
    for node in nodes:
        if not isinstance(node, _NOT_RUN_THERE):
            yield node
            yield from _walk(ast.iter_child_nodes(node))


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _has_line(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    return first <= line <= last


def _is_call_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _called_name(call: ast.Call) -> str:
    """The last word of what is called."""
    called = call.func
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""
