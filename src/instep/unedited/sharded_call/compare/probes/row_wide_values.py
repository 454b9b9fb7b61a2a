"""Truth values of all rows by which a forward takes a branch: `if x.max() > 50:`, or
`if len(chosen):`.

A part of the batch may have another one than the whole batch has, in the first call that any of
them takes that branch. So a forward that reads one in the condition of a branch which matters is
not divided. What is computed from a reduction over the rows is followed through all operations,
and of the rows that were chosen by their values their number.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from instep.process import is_script_file
from instep.process.patching import replaced
from instep.process.torch_private.tensors import tree_leaves
from instep.unedited.objects.syntax_trees import tree_of
from instep.unedited.sharded_call.compare.probes.recorded_operations import RecordedOperation
from instep.unedited.sharded_call.plan.module_state.module_properties import is_library

_READING = "aten::_local_scalar_dense"
_INDEXING = frozenset(("aten::index", "aten::index_select", "aten::gather"))
_CHOOSING = frozenset(
    ("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::_unique")
)
"""Operations whose results have a size that depends on values."""
_SIZES = ("__len__", "numel", "nelement", "size")
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


class _Tensors:
    """Some tensors, as long as they live."""

    def __init__(self) -> None:
        self._known: dict[int, ref[Tensor]] = {}

    def add(self, values: Any) -> None:
        """Add the tensors in there."""
        for each in tree_leaves(values):
            if isinstance(each, Tensor):
                self._known[id(each)] = ref(each)

    def have(self, values: Any) -> bool:
        """Whether one of the tensors in there is among these."""
        return bool(self._known) and any(
            isinstance(each, Tensor)
            and (found := self._known.get(id(each))) is not None
            and found() is each
            for each in tree_leaves(values)
        )


class RowWideValues:
    """What a forward computes from reductions over its rows, and where it reads that."""

    def __init__(self) -> None:
        self._tensors, self._chosen = _Tensors(), _Tensors()
        self._reads: set[tuple[CodeType, int]] = set()

    def add(self, results: Any) -> None:
        """Note that these tensors are computed from all rows."""
        self._tensors.add(results)

    def note_operation(self, seen: RecordedOperation) -> None:
        """Follow them through an operation."""
        name, *_ = seen.place
        if self._tensors.have((seen.args, seen.kwargs)):
            if name == _READING:
                self.note_read(seen.frame)
            else:
                self._tensors.add(seen.result)
        if (seen.is_view or name in _INDEXING) and self._chosen.have(seen.args):
            self._chosen.add(seen.result)

    def note_choice(self, seen: RecordedOperation) -> None:
        """Note an operation on the rows that may choose some by their values."""
        name, *_ = seen.place
        by_truth = name in _INDEXING and any(
            isinstance(each, Tensor) and each.dtype is torch.bool
            for each in tree_leaves(seen.args[1:])
        )
        if by_truth or name in _CHOOSING:
            self._chosen.add(seen.result)

    @contextmanager
    def reading_sizes(self) -> Iterator[None]:
        """Inside, it is noted where the number of chosen rows is read."""

        def noting(method: Any) -> Any:
            def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                if self._chosen.have(tensor):
                    self.note_read(sys._getframe(1))
                return method(tensor, *args, **kwargs)

            return read

        methods = [(Tensor, name, noting(getattr(Tensor, name))) for name in _SIZES]
        descriptor: Any = Tensor.shape
        shape = property(noting(descriptor.__get__))
        with replaced(*methods, (Tensor, "shape", shape)):
            yield

    def note_read(self, frame: FrameType | None) -> None:
        """Note that the code of this frame reads one."""
        if frame is not None:
            self._reads.add((frame.f_code, frame.f_lasti))

    def first_branch(self) -> str:
        """Where the script takes a branch by one that makes a difference; "" if nowhere."""
        places = (_branch_of(code, instruction) for code, instruction in self._reads)
        return min(filter(None, places), default="")


def _branch_of(code: CodeType, instruction: int) -> str:
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
        if isinstance(node, ast.IfExp)
        or (isinstance(node, ast.If | ast.While) and not _only_reports([*node.body, *node.orelse]))
    )


def _nodes_of(file: str, scope: int) -> Iterator[ast.AST]:
    for node in ast.walk(tree_of(file)):
        if isinstance(node, _SCOPES):
            decorators = getattr(node, "decorator_list", [])
            if min([node.lineno, *(each.lineno for each in decorators)]) == scope:
                yield from ast.walk(node)


def _only_reports(statements: list[ast.stmt]) -> bool:
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
