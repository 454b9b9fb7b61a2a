"""In the rank: the flight recorder, which notes each collective as it is entered and left.

All functions may be called in any thread. What they cost together, per collective: 2 to 3 µs.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from math import prod
from operator import itemgetter
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any

from instep.distributed.flight_record.record_format import (
    BYTES,
    COUNT,
    EPOCH,
    HEADER_BYTES,
    LAST_LEFT,
    LEFT,
    LINE_BYTES,
    PHASE,
    PHASE_SINCE,
    PHASES,
    REPORTED,
    SLOT,
    SLOT_WORDS,
    SLOTS,
    STEP,
    WAITING,
    decode,
    encode_signature,
    group_text,
)
from instep.distributed.flight_record.script_line import OUTSIDE_SCRIPT, location

Shape = tuple[int, ...] | None
_CACHED = 4096
"""Signatures and lines that are kept as bytes; with one more, all of them are dropped."""
_DEPTHS = 8
"""How many depths of the script are tried for a signature."""
_FIRST_SLOT = HEADER_BYTES // 8
_PHASE_NUMBERS = {name: index for index, name in enumerate(PHASES)}


class _OutsideScript(dict[str, bool]):
    """Whether frames of a file are outside of the script, by the file's name."""

    def __missing__(self, file: str) -> bool:
        self[file] = outside = file.startswith(OUTSIDE_SCRIPT)
        return outside


class FlightRecorder:
    """Writes the record of this process. It is in private memory until its descriptor is asked for,
    and again in a forked child, which is no rank."""

    def __init__(self) -> None:
        self._outside = _OutsideScript()
        self._signatures: dict[tuple[object, ...], tuple[bytes, int]] = {}
        self._lines: dict[tuple[int, int], tuple[bytes, CodeType]] = {}
        """By the code's id, which its reference keeps from being used again, and the position in
        it. (The hash of a code object takes longer than all the rest.)"""
        self._frames: dict[tuple[object, ...], list[tuple[int, CodeType]]] = {}
        """By the signature: how many frames above `enter` the script was before, and its code
        there, the nearest ones first. To walk through the frames of forty nested modules takes
        longer than all the rest. A function of the script's that a library calls is not seen where
        as many frames of a library were before: then the line is that of its caller in the
        script."""
        self._main = threading.main_thread().ident
        self._use(bytearray(BYTES))
        self._fd: int | None = None
        self._sequences: dict[str, int] = {}
        self._numbers = count(1)
        self._followed: list[tuple[int, Callable[[], bool]]] = []
        """Asynchronous collectives whose end nobody reports."""
        self.on_left: Callable[[bytes], None] | None = None
        """Called with the slot of each collective that was left, for a timeline."""
        self.on_phase: Callable[[int, int, int], None] | None = None
        """Called with the index, the begin and the end of each phase, for a timeline."""
        self.on_named: Callable[[str, str, tuple[int, int, int]], None] | None = None
        """Called for each collective that ranks submit by name, for a timeline: with the
        collective, its name, and when this rank submitted it, all were ready, and it ended."""
        self._phase_that_is_set = 0
        """By `set_phase`."""
        self.detail = ""
        """Stands in brackets behind the operations from now on, as "gradients, bucket 2"."""

    def with_detail(self, text: str) -> _DetailScope:
        """A context manager: inside, `detail` is this text."""
        return _DetailScope(self, text)

    def add_group(self, name: str, ranks: Iterable[int]) -> str:
        """Note that this rank is in a new group; returns the text for `enter`."""
        text = group_text(name, ranks)
        self._sequences[text] = 0
        return text

    def enter(
        self,
        op: str,
        shape: Shape,
        dtype: object,
        group: str,
        root: int | None = None,
        reduction: str = "",
    ) -> int:
        """Note that this rank enters a collective; returns its number, for `leave`.

        `group`: from `add_group`; `root`: as rank of the job; `reduction`: as "SUM".
        """
        key = (op, shape, dtype, group, root, reduction, self.detail)
        try:
            signature, tag = self._signatures[key]
        except KeyError:
            signature, tag = self._encode(key)
        if self._followed:
            self.update_followed()
        for depth, code in self._frames.get(key, ()):
            try:
                inner = sys._getframe(depth - 1)
            except ValueError:  # the stack is not so deep
                continue
            frame = inner.f_back or inner
            if frame.f_code is code and self._outside[inner.f_code.co_filename]:
                break
        else:
            frame = self._find_frame(key)
        code = frame.f_code
        try:
            line, _ = self._lines[id(code), frame.f_lasti]
        except KeyError:
            line = self._encode_line(frame)
        sequences = self._sequences
        sequence = sequences[group] = sequences.get(group, 0) + 1
        number = next(self._numbers)
        words = self._words
        SLOT.pack_into(
            self._memory,
            HEADER_BYTES + number % SLOTS * SLOT.size,
            *(number, sequence, now := monotonic_ns(), 0, now),
            *(words[EPOCH], words[STEP], words[PHASE], tag, signature, line, number),
        )
        words[COUNT] = number
        return number

    def _find_frame(self, key: tuple[object, ...]) -> FrameType:
        """The frame of the script that leads to `enter`, which calls this; else the outermost."""
        outside, depth = self._outside, 1
        frame = sys._getframe(2)
        while outside[frame.f_code.co_filename]:
            back = frame.f_back
            if back is None:
                break
            frame, depth = back, depth + 1
        if len(self._frames) >= _CACHED:
            self._frames.clear()
        others = [each for each in self._frames.get(key, ()) if each[0] != depth]
        known = [*others[1 - _DEPTHS :], (depth, frame.f_code)]
        self._frames[key] = sorted(known, key=itemgetter(0))
        return frame

    def leave(self, number: int) -> None:
        """Note that this rank has left the collective of that number."""
        words = self._words
        start = _FIRST_SLOT + number % SLOTS * SLOT_WORDS
        if words[start] == number:
            words[LAST_LEFT] = words[start + LEFT] = monotonic_ns()
            if self.on_left is not None:
                self.on_left(bytes(self._memory[8 * start : 8 * start + SLOT.size]))

    def issued(self, number: int) -> None:
        """Note that this rank does not wait for the collective that it has just entered."""
        words = self._words
        start = _FIRST_SLOT + number % SLOTS * SLOT_WORDS
        if words[start] == number:
            words[start + WAITING] = 0

    def follow(self, number: int, is_completed: Callable[[], bool]) -> None:
        """As `issued`, of a collective that will not be left: ask now and then if it has ended."""
        self.issued(number)
        self._followed.append((number, is_completed))

    def update_followed(self) -> None:
        """Note which of the collectives that are followed have ended."""
        followed, self._followed = self._followed, []
        for number, is_completed in followed:
            if is_completed():
                self.leave(number)
            else:
                self._followed.append((number, is_completed))

    def wait(self, number: int) -> None:
        """Note that this rank begins to wait for a collective that was only issued."""
        words = self._words
        start = _FIRST_SLOT + number % SLOTS * SLOT_WORDS
        if words[start] == number:
            words[start + WAITING] = monotonic_ns()

    def set_reported(self) -> None:
        """This rank raises an error because the ranks disagree: the watchers need not report it."""
        self._words[REPORTED] = 1

    def describe(self, group: str) -> str:
        """The collective of the group that runs now, of those that this rank has not left."""
        entries = (e for e in decode(self._memory).entries if e.left is None and e.group == group)
        return next((entry.describe() for entry in entries), "")

    def end_of_script(self) -> str:
        """The end of the script as a place, with the last collective before it."""
        entries = [entry for entry in decode(self._memory).entries if entry.phase != "exit"]
        return f"the end of the script{f', after {entries[-1].describe()}' if entries else ''}"

    def phase(self, name: str) -> _PhaseScope:
        """A context manager: the main thread is in that phase of its program (see `PHASES`)."""
        return _PhaseScope(self, _PHASE_NUMBERS[name])

    def set_phase(self, name: str) -> None:
        """As `phase`, until it is set again; "" is the script's own code."""
        if threading.get_ident() == self._main:
            words, now = self._words, monotonic_ns()
            if self._phase_that_is_set and self.on_phase is not None:
                self.on_phase(self._phase_that_is_set, words[PHASE_SINCE], now)
            self._phase_that_is_set = _PHASE_NUMBERS[name]
            words[PHASE], words[PHASE_SINCE] = self._phase_that_is_set, now

    def set_step(self, epoch: int, step: int) -> None:
        """The epoch and the step at which this rank is from now on."""
        self._words[EPOCH], self._words[STEP] = epoch, step

    def set_epoch(self, epoch: int) -> None:
        """The epoch at which this rank is from now on."""
        self._words[EPOCH] = epoch

    def count_step(self) -> None:
        """An optimizer has stepped."""
        self._words[STEP] += 1

    def file_descriptor(self) -> int:
        """The descriptor of the record, for `record_format.read` in another process."""
        if self._fd is None:
            self._fd = os.memfd_create("flight_record")
            os.ftruncate(self._fd, BYTES)
            shared = mmap.mmap(self._fd, BYTES)
            shared[:] = bytes(self._memory)
            self._use(shared)
        return self._fd

    def reset_after_fork(self) -> None:
        """In a forked child: its collectives are not the parent's."""
        self._use(bytearray(BYTES))
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._numbers = None, count(1)
        self.on_left = self.on_phase = self.on_named = None
        self._sequences.clear()
        self._followed = []
        self._main = threading.main_thread().ident

    def _use(self, memory: bytearray | mmap.mmap) -> None:
        self._memory = memory
        self._words: Any = memoryview(memory).cast("q")

    def _encode(self, key: Any) -> tuple[bytes, int]:
        op, shape, dtype, group, root, reduction, detail = key
        name = "" if dtype is None else str(dtype).removeprefix("torch.")
        title = f"{op} ({detail})" if detail else op
        signature = encode_signature(title, shape, name, group, root, reduction)
        equal = (op, -1 if shape is None else prod(shape), name, root, reduction)
        if len(self._signatures) >= _CACHED:
            self._signatures.clear()
        self._signatures[key] = encoded = signature, zlib.crc32(repr(equal).encode())
        return encoded

    def _encode_line(self, frame: Any) -> bytes:
        if len(self._lines) >= _CACHED:
            self._lines.clear()
        line = location(frame).encode()[-LINE_BYTES:]
        self._lines[id(frame.f_code), frame.f_lasti] = line, frame.f_code
        return line


@contextmanager
def leaving(number: int) -> Iterator[None]:
    """At the end the collective of that number is left."""
    try:
        yield
    finally:
        leave(number)


class _DetailScope:
    """A detail of operations; before and after it the detail is another one."""

    __slots__ = ("_before", "_recorder", "_text")

    def __init__(self, recorder: FlightRecorder, text: str) -> None:
        self._recorder, self._before, self._text = recorder, "", text

    def __enter__(self) -> None:
        self._before, self._recorder.detail = self._recorder.detail, self._text

    def __exit__(self, *_: object) -> None:
        self._recorder.detail = self._before


class _PhaseScope:
    """A phase of the main thread; before and after it the phase is another one."""

    __slots__ = ("_before", "_phase", "_recorder", "_since")

    def __init__(self, recorder: FlightRecorder, phase: int) -> None:
        self._recorder, self._phase, self._before, self._since = recorder, phase, 0, 0

    def __enter__(self) -> None:
        words = self._recorder._words
        if threading.get_ident() == self._recorder._main:
            self._before, self._since = words[PHASE], monotonic_ns()
            words[PHASE], words[PHASE_SINCE] = self._phase, self._since

    def __exit__(self, *_: object) -> None:
        words = self._recorder._words
        if threading.get_ident() == self._recorder._main:
            words[PHASE], words[PHASE_SINCE] = self._before, (now := monotonic_ns())
            if self._recorder.on_phase is not None:
                self._recorder.on_phase(self._phase, self._since, now)


recorder = FlightRecorder()
"""Of this process."""
enter, leave = recorder.enter, recorder.leave
issued, wait = recorder.issued, recorder.wait
phase, set_phase = recorder.phase, recorder.set_phase
set_step, set_epoch, count_step = recorder.set_step, recorder.set_epoch, recorder.count_step
file_descriptor, end_of_script = recorder.file_descriptor, recorder.end_of_script
os.register_at_fork(after_in_child=recorder.reset_after_fork)
