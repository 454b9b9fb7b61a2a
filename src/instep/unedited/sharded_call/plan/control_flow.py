"""The control flow of a forward: the branches that it takes in the script's own code, and the truth
values and integers that it reads from tensors.

A call with another control flow than those that were compared may depend on the whole batch though
these did not: `if self.steps > 1000:`, `if entropy.mean() < 0.5: return`.
"""

from __future__ import annotations

import dis
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any
from zlib import crc32

from numpy import ndarray
from torch import Tensor

from instep.distributed.watchdog.signals.rank_signals import is_of_handler
from instep.process import PACKAGE_FOLDER, frames_from, is_script_file
from instep.process.patching import replaced
from instep.process.process_value import ProcessValue
from instep.process.torch_private.compiler import skip_frame
from instep.unedited.sharded_call.plan.module_state.module_properties import is_library

_READING = (
    *("__bool__", "__int__", "__index__", "__float__", "item", "tolist", "numpy", "__array__"),
    *("__iter__", "unbind"),
)
"""Methods by which Python gets at what is in a tensor, or at its rows."""
_WHOLE_NUMBERS = "biu"
"""The kinds of numpy's types of truth values and integers."""
_MAX_READINGS = 64
"""After so many different readings that were compared, others call for no comparison."""
WATCHED_CALLS, _INTERVAL = 64, 32
"""So many calls are watched, and then one of so many."""
_PROLOGUE = ("RESUME", "MAKE_CELL", "COPY_FREE_VARS", "RETURN_GENERATOR")


class NewBranch(BaseException):
    """A forward is about to take a branch that no compared call has taken; an Exception could be
    caught by the script."""


class ControlFlow:
    """The control flow of the calls that were compared, of one forward."""

    def __init__(self) -> None:
        self._codes: dict[CodeType, _Branches | None] = {}
        self._readings: set[tuple[Any, ...]] = set()
        self._readings_of_ranks: set[int] = set()
        self.may_change = False
        """Whether it may be another on any rank."""

    def is_watched(self, calls: int, *, may_change: bool = False) -> bool:
        """Whether this call is to be traced; `calls`: how many there were; `may_change`: whether
        it may be another for a reason that is not in the code."""
        return (self.may_change or may_change) and (
            calls <= WATCHED_CALLS or calls % _INTERVAL == 0
        )

    def has_compared(self, readings: int | None) -> bool:
        """Whether a call was compared in which each rank has read what it reads now; `readings`: a
        checksum of all of it, None where all ranks read the same."""
        known = self._readings_of_ranks
        return readings is None or readings in known or len(known) >= _MAX_READINGS

    def learn_readings(self, readings: int | None) -> None:
        """Remember that with these readings of all ranks the sharded call is the same."""
        if readings is not None:
            self._readings_of_ranks.add(readings)

    def may_branch(self) -> bool:
        """Whether a call may have another control flow on this rank."""
        reads = any(self._readings) and len(self._readings) < _MAX_READINGS
        return reads or any(branches and branches.left for branches in self._codes.values())

    @contextmanager
    def traced(self, *, stops: bool = False) -> Iterator[ForwardTrace]:
        """Inside, forwards on this thread are traced; if it `stops`, NewBranch is raised before
        the first line of a branch that no compared call has taken."""
        trace, before = ForwardTrace(self._codes, self._readings, stops=stops), sys.gettrace()
        methods = [(Tensor, name, _noting(getattr(Tensor, name), trace)) for name in _READING]
        with replaced(*methods), _current.set_to(trace):
            if before is None:
                sys.settrace(trace.enter)
            try:
                yield trace
            finally:
                trace.is_over = True
                if sys.gettrace() == trace.enter:
                    sys.settrace(None)


class ForwardTrace:
    """The control flow of one or several forwards."""

    def __init__(
        self,
        codes: dict[CodeType, _Branches | None],
        readings: set[tuple[Any, ...]],
        *,
        stops: bool = False,
    ) -> None:
        self.readings: list[list[Any]] = [[]]
        """Of each forward."""
        self.floats: list[float] = []
        """What the last forward has read by `item` and `float`."""
        self.note: Callable[[Tensor, FrameType], None] | None = None
        """Gets each tensor from which is read, and the code that does."""
        self.is_over = self.is_reading = False
        self.thread = threading.get_ident()
        self._codes, self._readings, self._stops = codes, readings, stops
        self._has_stopped = False
        """Whether a forward has stopped before a new branch, which it has not taken."""
        self._reached: dict[CodeType, set[int]] = {}
        self._earlier: Mapping[CodeType, set[int]] = {}
        """What was reached before the forwards that do not count."""

    @property
    def checksum(self) -> int:
        """A checksum of what was read, equal in all processes."""
        return crc32(repr(self.readings).encode())

    @property
    def is_new(self) -> bool:
        """Whether no compared call has taken one of its branches, or has read what it read."""
        is_full = len(self._readings) >= _MAX_READINGS
        has_read_anew = not self._readings.issuperset(map(tuple, self.readings))
        return (has_read_anew and not is_full) or self._has_stopped or self._has_new_branch({})

    def _has_new_branch(self, earlier: Mapping[CodeType, set[int]]) -> bool:
        """Whether a branch was taken that no compared call has taken, and that is not among these
        `earlier` ones."""
        return any(
            (branches := self._codes[code]) is not None
            and not (reached - earlier.get(code, set())).isdisjoint(branches.left)
            for code, reached in self._reached.items()
        )

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Inside, forwards stop (see `ControlFlow.traced`) before a branch that those before, since
        the trace began, have not taken, either."""
        stops, earlier, tracing = self._stops, self._earlier, sys.gettrace()
        self._stops, self._earlier = True, {c: {*places} for c, places in self._reached.items()}
        try:
            yield
        finally:
            self._stops, self._earlier = stops, earlier
            if tracing == self.enter:  # which ends where NewBranch is raised
                sys.settrace(tracing)

    @contextmanager
    def probing(self) -> Iterator[Callable[[], bool]]:
        """Inside, forwards are traced that do not count, and stop (see `stopping`); yields whether
        they have come to a branch, or read what those before have not."""
        reached = {code: set(places) for code, places in self._reached.items()}
        count = len(self.readings)
        known = {*self._readings, *map(tuple, self.readings)}

        def is_other() -> bool:
            has_read_anew = not known.issuperset(map(tuple, self.readings[count:]))
            return has_read_anew or self._has_new_branch(reached)

        try:
            with self.stopping():
                yield is_other
        finally:
            del self.readings[count:]
            for code, places in self._reached.items():
                places.intersection_update(reached.get(code, ()))

    def learn(self) -> None:
        """Remember that with this control flow the sharded call is the same."""
        self._readings.update(map(tuple, self.readings))
        for code, reached in self._reached.items():
            if (branches := self._codes[code]) is not None:
                branches.left -= reached

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """For sys.settrace: trace this function if it has branches that were not compared."""
        if self.is_over:  # an interrupt has set this function again
            sys.settrace(None)
            return None
        code = frame.f_code
        try:
            branches = self._codes[code]
        except KeyError:
            branches = self._codes[code] = _Branches(code) if _is_of_script(code) else None
        except TypeError:  # torch.compile makes code with a dict among its constants
            return None
        if branches is None or not branches.left:
            return None
        reached = self._reached.setdefault(code, set())
        # From Python 3.12 on the first call of a function has no events of opcodes, but of lines.
        frame.f_trace_opcodes = branches.by_opcode
        add, earlier = reached.add, self._earlier.get(code, ())
        place_of = attrgetter("f_lasti" if branches.by_opcode else "f_lineno")

        def trace_place(frame: FrameType, event: str, arg: Any) -> Any:
            place = place_of(frame)
            is_new = place in branches.left and place not in earlier
            if self._stops and is_new and not _is_called_by_python(frame):
                self._has_stopped = True
                raise NewBranch
            add(place)
            return trace_place

        return trace_place


skip_frame(ForwardTrace.enter)  # else torch.compile takes it up in what the script compiles

_current = ProcessValue[ForwardTrace | None](None)


def begin_forward() -> None:
    """Tell apart what this forward reads and what those before it have read."""
    if _current.value is not None:
        _current.value.readings.append([])
        _current.value.floats = []


def floats_read() -> list[float]:
    """What the last forward of the trace that is under way, if any, has read by `item` and
    `float`."""
    return [] if _current.value is None else _current.value.floats


@contextmanager
def noted_reads(note: Callable[[Tensor, FrameType], None]) -> Iterator[None]:
    """Inside, this gets each tensor from which the trace that is under way, if any, sees that the
    script reads, and the code that does."""
    trace = _current.value
    if trace is None:
        yield
        return
    trace.note = note
    try:
        yield
    finally:
        trace.note = None


def probe_flow() -> AbstractContextManager[Callable[[], bool]]:
    """See `ForwardTrace.probing`, of the trace that is under way, if any."""
    return nullcontext(lambda: False) if _current.value is None else _current.value.probing()


def stop_at_branches() -> AbstractContextManager[None]:
    """See `ForwardTrace.stopping`, of the trace that is under way, if any."""
    return nullcontext() if _current.value is None else _current.value.stopping()


class _Branches:
    """Where branches of a function begin that no compared call has taken."""

    def __init__(self, code: CodeType) -> None:
        instructions = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
        begins = {each.offset for each in instructions if each.opname in _PROLOGUE}
        raising: set[int] = set()
        inline: set[int] = set()
        for instruction, following in pairwise(instructions):
            place, then = instruction.positions, following.positions
            if instruction.opname == "RAISE_VARARGS" and place and place.lineno:
                raising.update(range(place.lineno, (place.end_lineno or place.lineno) + 1))
            is_in_line = bool(place and then and place.lineno == then.lineno)
            is_branch = "JUMP" in instruction.opname and "IF" in instruction.opname
            is_assertion = following.opname == "LOAD_ASSERTION_ERROR"
            if is_in_line and is_branch and not is_assertion:
                inline.update((following.offset, instruction.argval))
            elif is_in_line and instruction.opname == "FOR_ITER":
                inline.add(following.offset)
        self.by_opcode = bool(inline)
        """Whether a line has several branches: then its places are offsets, else lines."""
        starts = {
            offset: line
            for offset, line in dis.findlinestarts(code)
            if line is not None and line not in raising and offset not in begins
        }
        self.left = inline | {*starts} if self.by_opcode else {*starts.values()}


def _is_called_by_python(frame: FrameType) -> bool:
    """Whether a finalizer or a signal's handler runs, which is no part of the forward."""
    return any(
        each.f_code.co_name == "__del__"
        or each.f_code.co_filename == weakref.__file__
        or is_of_handler(each)
        for each in frames_from(frame)
    )


def _is_of_script(code: CodeType) -> bool:
    file = code.co_filename
    return is_script_file(file) and not (file.startswith("<") or is_library(file))


def _noting(method: Any, trace: ForwardTrace) -> Any:
    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != trace.thread or trace.is_reading:
            return method(tensor, *args, **kwargs)
        trace.is_reading = True  # a mode of torch's, as `set_default_device` enters, calls it anew
        try:
            value = method(tensor, *args, **kwargs)
        finally:
            trace.is_reading = False
        frame = sys._getframe(1)
        if frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
            return value
        if trace.note is not None:
            trace.note(tensor, frame)
        if isinstance(value, bool | int):
            trace.readings[-1].append(value)
        elif isinstance(value, float):
            trace.floats.append(value)
        elif isinstance(value, list):
            trace.readings[-1].append(str(value))
        elif isinstance(value, ndarray) and value.dtype.kind in _WHOLE_NUMBERS:
            trace.readings[-1].append(crc32(value.tobytes()))
        return value

    return read
