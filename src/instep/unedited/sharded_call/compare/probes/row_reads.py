"""Where the script's own code reads from the rows of tensors, and the branches that it takes by
what it computes from that."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from instep.process import frames_from, is_script_file
from instep.unedited.objects.script_code import functions_in
from instep.unedited.objects.syntax_trees import definition_of_code
from instep.unedited.sharded_call.compare.probes.branches import makes_difference
from instep.unedited.sharded_call.compare.probes.function_rows import FunctionRows
from instep.unedited.sharded_call.compare.probes.recorded_operations import OperationPlace
from instep.unedited.sharded_call.compare.probes.row_kinds import (
    ALL,
    ROWS,
    Position,
    RowKind,
    RowValue,
)
from instep.unedited.sharded_call.plan.module_state.module_properties import is_library

_CALLS = "instep.unedited.sharded_call.plan.bound_call"
"""Instep's module that calls the script's outermost one."""
_INLINE = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>")
"""Code that stands in that of a function."""
_MAX_CALLERS = 4
_MAX_ROUNDS = 32
_Place = tuple[CodeType, Position]
"""A function, and an expression in it."""


@dataclass
class _Function:
    """A function that has read something from rows, or has called one that has."""

    space: dict[str, Any]
    """Its global variables."""
    own: Any
    """Its first argument."""
    seeds: dict[Position, RowValue] = field(default_factory=dict)
    callers: set[_Place] = field(default_factory=set)

    def resolve(self, called: ast.expr) -> FunctionType | None:
        """The script's function that an expression in it calls, if it is one."""
        value: Any = None
        match called:
            case ast.Name(id=name):
                value = self.space.get(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                value = inspect.getattr_static(type(self.own), name, None)
                value = next(iter(functions_in(value)), None)
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                found = self.space.get(module)
                value = vars(found).get(name) if isinstance(found, ModuleType) else None
        is_function = isinstance(value, FunctionType)
        return value if is_function and _is_of_script(value.__code__) else None


class RowReads:
    """Where a forward of a part of the batch reads from its rows, beside a whole one."""

    def __init__(self) -> None:
        self._whole: dict[_Place, list[torch.Size]] = {}
        self._part: dict[_Place, list[torch.Size]] = {}
        self._functions: dict[CodeType, _Function] = {}
        self._of_rows: dict[_Place, set[OperationPlace]] = {}
        """Where one row is read, and what takes it."""

    def begin(self, *, of_whole: bool) -> None:
        """Forget what was noted of such a forward."""
        (self._whole if of_whole else self._part).clear()
        if not of_whole:
            self._functions.clear()
            self._of_rows.clear()

    def note(self, tensor: Tensor, frame: FrameType, *, of_whole: bool) -> None:
        """Note that this code reads from a tensor."""
        if (place := _place_of(frame)) is not None:
            found = self._whole if of_whole else self._part
            found.setdefault(place, []).append(tensor.shape)
            if not of_whole:
                self._add_function(frame)

    def note_of_all(self, frame: FrameType) -> None:
        """Note that this code reads what tells of all rows."""
        if (place := _place_of(frame)) is not None:
            self._add_function(frame)
            code, span = place
            self._functions[code].seeds[span] = ALL

    def note_of_row(self, frame: FrameType, taken: OperationPlace) -> None:
        """Note that this code reads of a row that is taken at this place: the same one of all
        rows, unless a loop takes each of them there."""
        if (place := _place_of(frame)) is not None:
            self._add_function(frame)
            self._of_rows.setdefault(place, set()).add(taken)

    def end(self, is_loop: Callable[[OperationPlace], bool]) -> None:
        """Say which operations are repeated for each row: reads of what others take tell of one
        row of all."""
        for (code, span), taken in self._of_rows.items():
            if not all(map(is_loop, taken)):
                self._functions[code].seeds[span] = ALL

    def _add_function(self, frame: FrameType) -> None:
        """Remember the function of this code, and those that have called it."""
        inner: _Function | None = None
        for each in islice(_script_frames(frame), _MAX_CALLERS):
            place = _place_of(each)
            if place is None:
                break
            code, _ = place
            if inner is not None:
                inner.callers.add(place)
            outer = _enclosing(each)
            assert outer is not None
            names = code.co_varnames[: code.co_argcount]
            own = outer.f_locals.get(names[0]) if names else None
            inner = self._functions.setdefault(code, _Function(outer.f_globals, own))

    def first_branch(self) -> str:
        """Where the script takes a branch by what tells of all rows; "" if nowhere."""
        for (code, span), shapes in self._part.items():
            if (value := _kind_of(self._whole.get((code, span), []), shapes)) is not None:
                seeds = self._functions[code].seeds
                seeds[span] = value.or_other(seeds.get(span, value))
        waiting = [code for code, each in self._functions.items() if each.seeds]
        places: set[str] = set()
        for _ in range(_MAX_ROUNDS):
            if not waiting:
                break
            code = waiting.pop()
            function, node = self._functions[code], definition_of_code(code)
            if node is None:
                continue
            found = FunctionRows(code.co_filename, node, function.seeds, function.resolve)
            places.update(
                f"{os.path.basename(each.file)}:{each.node.lineno}"
                for each in filter(makes_difference, found.branches)
            )
            returned = RowValue(found.returned.kind)
            for caller, span in function.callers if returned.kind is not RowKind.NONE else ():
                seeds = self._functions[caller].seeds
                if seeds.get(span, RowValue()).kind < returned.kind:
                    seeds[span] = returned
                    waiting.append(caller)
        return min(places, default="")


def _kind_of(wholes: list[torch.Size], parts: list[torch.Size]) -> RowValue | None:
    """What was read at a place from tensors of these shapes; None: no rows."""
    if not wholes or wholes == parts:
        return None
    return ROWS if len(wholes) == len(parts) else RowValue(RowKind.ROW)


def _place_of(frame: FrameType) -> _Place | None:
    """The function of the script's that runs there, and the expression in it."""
    outer = _enclosing(frame)
    if outer is None:
        return None
    instructions = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    first, last, begin, end = next(instructions)
    if first is None or last is None or begin is None or end is None:
        return None
    return outer.f_code, (first, last, begin, end)


def _enclosing(frame: FrameType) -> FrameType | None:
    """The frame of the function in which this code stands, if it is the script's."""
    for each in frames_from(frame):
        if not _is_of_script(each.f_code):
            return None
        if each.f_code.co_name not in _INLINE:
            return each
    return None


def _script_frames(frame: FrameType) -> Iterator[FrameType]:
    """Those of the script's functions, from this one on outwards to the outermost call."""
    is_inside = False
    for each in frames_from(frame):
        if each.f_globals.get("__name__") == _CALLS:
            break
        if _is_of_script(each.f_code):
            if not is_inside:
                yield each
            is_inside = each.f_code.co_name in _INLINE


def _is_of_script(code: CodeType) -> bool:
    file = code.co_filename
    return is_script_file(file) and not is_library(file)
