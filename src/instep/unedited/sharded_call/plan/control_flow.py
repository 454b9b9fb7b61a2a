"""Which way a forward goes: the branches of the script's own code that it takes, and the truth
values and whole numbers that it reads from tensors.

A call that goes a way on which no call was compared may depend on the whole batch though earlier
ones did not: `if self.steps > 1000:`, `if entropy.mean() < 0.5: return`.
"""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from instep.process import PACKAGE_FOLDER
from instep.unedited.sharded_call.plan.module_properties import is_library

_READING = ("__bool__", "__int__", "__index__", "item", "tolist")
_MAX_READINGS = 64
"""After so many kinds of readings that were compared, others are no news."""
_FIRST_CALLS, _INTERVAL = 64, 16
"""So many calls are watched, and then one of so many."""
_PROLOGUE = ("RESUME", "MAKE_CELL", "COPY_FREE_VARS", "RETURN_GENERATOR")
_STDLIB = sysconfig.get_paths()["stdlib"]


class ControlFlow:
    """The ways that were compared, of one forward."""

    def __init__(self) -> None:
        self._codes: dict[CodeType, _Branches | None] = {}
        self._readings: set[tuple[Any, ...]] = set()
        self.may_change = False
        """Whether it may go another way on any rank."""

    def is_watched(self, calls: int) -> bool:
        """Whether it is to be seen which way this call goes; `calls`: how many there were."""
        return self.may_change and (calls <= _FIRST_CALLS or calls % _INTERVAL == 0)

    def has_other_ways(self) -> bool:
        """Whether the forward may go a way on this rank that was not compared."""
        reads = any(self._readings) and len(self._readings) < _MAX_READINGS
        return reads or any(branches and branches.left for branches in self._codes.values())

    @contextmanager
    def followed(self) -> Iterator[Way]:
        """Inside, follow which way the forward goes on this thread."""
        global _current
        way, before = Way(self._codes, self._readings), sys.gettrace()
        outer, _current = _current, way
        methods = {name: Tensor.__dict__.get(name) for name in _READING}
        for name in _READING:
            setattr(Tensor, name, _noting(getattr(Tensor, name), way))
        if before is None:
            sys.settrace(way.enter)
        try:
            yield way
        finally:
            way.is_over, _current = True, outer
            if sys.gettrace() == way.enter:
                sys.settrace(None)
            for name, method in methods.items():
                if method is None:
                    delattr(Tensor, name)
                else:
                    setattr(Tensor, name, method)


class Way:
    """The way of one or several forwards."""

    def __init__(
        self, codes: dict[CodeType, _Branches | None], readings: set[tuple[Any, ...]]
    ) -> None:
        self.readings: list[list[Any]] = [[]]
        """Of each forward."""
        self.is_over = False
        self._codes, self._readings = codes, readings
        self._reached: dict[CodeType, set[int]] = {}

    @property
    def is_new(self) -> bool:
        """Whether it leads where none led that was compared."""
        codes = self._codes
        is_full = len(self._readings) >= _MAX_READINGS
        has_read_anew = not self._readings.issuperset(map(tuple, self.readings))
        return (has_read_anew and not is_full) or any(
            (branches := codes[code]) is not None and not branches.left.isdisjoint(reached)
            for code, reached in self._reached.items()
        )

    def learn(self) -> None:
        """A comparison has found the sharded call to be the same on this way."""
        self._readings.update(map(tuple, self.readings))
        for code, reached in self._reached.items():
            if (branches := self._codes[code]) is not None:
                branches.left -= reached

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace a function: see sys.settrace."""
        if self.is_over:  # an interrupt has set this function again
            sys.settrace(None)
            return None
        code = frame.f_code
        try:
            branches = self._codes[code]
        except KeyError:
            branches = self._codes[code] = _Branches(code) if _is_of_script(code) else None
        if branches is None or not branches.left:
            return None
        reached = self._reached.setdefault(code, set())
        frame.f_trace_opcodes, frame.f_trace_lines = branches.by_opcode, not branches.by_opcode
        add = reached.add
        if branches.by_opcode:

            def trace_opcode(frame: FrameType, event: str, arg: Any) -> Any:
                add(frame.f_lasti)
                return trace_opcode

            return trace_opcode

        def trace_line(frame: FrameType, event: str, arg: Any) -> Any:
            add(frame.f_lineno)
            return trace_line

        return trace_line


_current: Way | None = None


def begin_forward() -> None:
    """Tell apart what this forward reads and what those before it have read."""
    if _current is not None:
        _current.readings.append([])


class _Branches:
    """The places of a function that no compared call has reached."""

    def __init__(self, code: CodeType) -> None:
        instructions = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
        begins = {each.offset for each in instructions if each.opname in _PROLOGUE}
        raising: set[int] = set()
        inline: set[int] = set()
        for instruction, following in pairwise(instructions):
            place, then = instruction.positions, following.positions
            if instruction.opname == "RAISE_VARARGS" and place and place.lineno:
                raising.update(range(place.lineno, (place.end_lineno or place.lineno) + 1))
            is_branch = "JUMP" in instruction.opname and "IF" in instruction.opname
            is_assertion = following.opname == "LOAD_ASSERTION_ERROR"
            if is_branch and not is_assertion and place and then and place.lineno == then.lineno:
                inline.update((following.offset, instruction.argval))
        self.by_opcode = bool(inline)
        """Whether a line has several branches: then its places are offsets, else lines."""
        starts = {
            offset: line
            for offset, line in dis.findlinestarts(code)
            if line is not None and line not in raising and offset not in begins
        }
        self.left = inline | {*starts} if self.by_opcode else {*starts.values()}


def _is_of_script(code: CodeType) -> bool:
    file = code.co_filename
    return not (file.startswith(("<", _STDLIB, PACKAGE_FOLDER)) or is_library(file))


def _noting(method: Any, way: Way) -> Any:
    def read(tensor: Tensor, *args: Any) -> Any:
        value = method(tensor, *args)
        if sys._getframe(1).f_code.co_filename.startswith(PACKAGE_FOLDER):
            return value
        if isinstance(value, bool | int):
            way.readings[-1].append(value)
        elif isinstance(value, list):
            way.readings[-1].append(str(value))
        return value

    return read
