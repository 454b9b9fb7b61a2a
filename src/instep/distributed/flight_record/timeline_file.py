"""The timeline of a job: its collectives and phases, in a file that INSTEP_TIMELINE names.

The Trace Event Format of Chrome and Perfetto: an array of events, a line each. Every rank of a host
appends whole lines to one file; the format needs no closing bracket. Times are those of
CLOCK_MONOTONIC, which all processes of a host share; the ranks of other hosts have files of their
own, and tell by their wall clock how far theirs is off.
"""

from __future__ import annotations

import atexit
import json
import os
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import Any, TypeVar

from instep.distributed.flight_record.record_format import PHASES, decode_slot
from instep.distributed.flight_record.recorder import FlightRecorder, recorder
from instep.process import print_line, settings
from instep.process.errors import LaunchVariablesError

T = TypeVar("T")
_INTERVAL = 10**9
"""Nanoseconds between two writes."""
PHASE_THREAD, WAITED_THREAD, ISSUED_THREAD = 0, 1, 2
"""The tracks of a rank: phases; collectives in which it waits; asynchronous ones, from here on."""
_ISSUED_TRACKS = 8
_TRACKS = {
    PHASE_THREAD: "phases",
    WAITED_THREAD: "collectives",
    **{ISSUED_THREAD + k: "asynchronous collectives" for k in range(_ISSUED_TRACKS)},
}


def path_of_node(path: str, node: int) -> Path:
    """The file of the ranks of this host: host 0's has the name that was given."""
    given = Path(path)
    return given.with_name(f"{given.stem}.node{node}{given.suffix}") if node else given


class TimelineWriter:
    """Appends the events of one rank.

    Args:
        path: where; rank 0 of the host has emptied it by the first event.
        rank: this rank.
        source: of the events.
    """

    def __init__(self, path: Path, rank: int, source: FlightRecorder) -> None:
        # Open from the start: an unedited script's ranks may not write there later.
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # Not in close(): another thread may be writing then.
        weakref.finalize(self, os.close, self._fd).atexit = False
        self._rank, self._process = rank, os.getpid()
        self._is_broken = False
        self._slots: deque[bytes] = deque()
        self._phases: deque[tuple[int, int, int]] = deque()
        self._written = 0
        self.marks_cycles = False
        self._source = source
        source.on_left, source.on_phase = self._add_collective, self._add_phase
        source.on_named = self._write_named
        self._write(
            [
                {"ph": "M", "name": "process_name", "args": {"name": f"rank {rank}"}},
                {"ph": "M", "name": "process_sort_index", "args": {"sort_index": rank}},
                {"ph": "M", "name": "clock", "args": {"offset_us": _clock_offset()}},
                *(
                    {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}}
                    for tid, name in _TRACKS.items()
                ),
            ]
        )

    def flush(self) -> None:
        """Write what there is."""
        if os.getpid() != self._process:  # a forked child
            return
        # Other threads may add meanwhile, or write, too.
        events = [event for slot in _take(self._slots) if (event := _collective(slot))]
        events += [_phase(*each) for each in _take(self._phases)]
        if events:
            self._write(events)
        self._written = monotonic_ns()

    def close(self, is_alone: bool = False) -> None:
        """Write what there is, and nothing from now on. `is_alone`: the file is this rank's."""
        self._source.on_left = self._source.on_phase = self._source.on_named = None
        self.flush()
        if is_alone and os.getpid() == self._process:
            self._write_text(json.dumps({"ph": "M", "name": "end"}) + "\n]\n")

    def _add_collective(self, slot: bytes) -> None:
        self._slots.append(slot)
        if monotonic_ns() - self._written > _INTERVAL:
            self.flush()

    def _add_phase(self, phase: int, since: int, until: int) -> None:
        self._phases.append((phase, since, until))

    def _write_named(self, collective: str, name: str, times: tuple[int, int, int]) -> None:
        self._write([*_named(collective, name, times, self.marks_cycles)])

    def _write(self, events: list[dict[str, Any]]) -> None:
        lines = [json.dumps({"pid": self._rank, "tid": 0, **event}) + ",\n" for event in events]
        for start in range(0, len(lines), 256):  # a write of whole lines is not torn apart
            self._write_text("".join(lines[start : start + 256]))

    def _write_text(self, text: str) -> None:
        """The training goes on where the timeline cannot."""
        if self._is_broken:
            return
        try:
            os.write(self._fd, text.encode())
        except OSError as error:
            self._is_broken = True
            print_line(f"the timeline of rank {self._rank} ends here: {error.strerror}")


_writers: list[TimelineWriter] = []
"""That of the whole job, if there is one."""
_parts: list[TimelineWriter] = []
"""That of a part of the job, if one was started."""


def create(local_rank: int, node: int) -> None:
    """Empty this host's file, on its first rank; before the ranks have met.

    Raises LaunchVariablesError if it cannot be written.
    """
    path = str(settings.TIMELINE)
    if path and local_rank == 0:
        try:
            path_of_node(path, node).write_text("[\n")
        except OSError as error:
            raise LaunchVariablesError.cannot_write(settings.TIMELINE.name, path, error) from None


def start(rank: int, node: int) -> None:
    """Write this rank's events from now on, if INSTEP_TIMELINE is set; after the ranks have met."""
    path = str(settings.TIMELINE)
    if path and not _writers:
        _add(TimelineWriter(path_of_node(path, node), rank, recorder), _writers)


def mark_cycles() -> None:
    """From now on the timeline of the whole job has a mark where this rank is told what to do."""
    for writer in _writers:
        writer.marks_cycles = True


def start_part(path: str, *, marks_cycles: bool) -> None:
    """Write the events of this rank alone, which is rank 0, to a new file from now on; one that was
    started before ends.

    Raises ValueError if this rank writes that of the whole job, OSError if it cannot write there.
    """
    if _writers:
        raise ValueError(
            "this rank is writing the timeline of the whole job. Leave out start_timeline, or what "
            "asks for that one: --timeline, INSTEP_TIMELINE or HOROVOD_TIMELINE."
        )
    stop_part()
    Path(path).write_text("[\n")
    _add(TimelineWriter(Path(path), 0, recorder), _parts)
    _parts[-1].marks_cycles = marks_cycles


def stop_part() -> None:
    """Write what there is to the file of `start_part`, and its end. Does nothing without one."""
    while _parts:
        writer = _parts.pop()
        atexit.unregister(writer.close)
        writer.close(is_alone=True)


def _add(writer: TimelineWriter, writers: list[TimelineWriter]) -> None:
    writers.append(writer)
    atexit.register(writer.close)


def _take(items: deque[T]) -> Iterator[T]:
    """Remove the items, one by one."""
    with suppress(IndexError):
        while True:
            yield items.popleft()


def _clock_offset() -> int:
    """What to add to microseconds of CLOCK_MONOTONIC for those of the wall clock."""
    return (time_ns() - monotonic_ns()) // 1000


def _collective(slot: bytes) -> dict[str, Any] | None:
    entry = decode_slot(slot)
    if entry is None or entry.left is None:
        return None
    waiting = entry.left if entry.waiting is None else entry.waiting
    is_issued = waiting - entry.entered > 1e-9
    track = ISSUED_THREAD + entry.number % _ISSUED_TRACKS
    return {
        "ph": "X",
        "cat": "collective",
        "name": entry.op,
        "ts": entry.entered * 1e6,
        "dur": (entry.left - entry.entered) * 1e6,
        "tid": track if is_issued else WAITED_THREAD,
        "args": {
            "call": entry.describe(),
            "group": entry.group,
            "sequence": entry.sequence,
            "waited_us": max(0.0, entry.left - waiting) * 1e6,
            "epoch": entry.epoch,
            "step": entry.step,
        },
    }


def _named(
    collective: str, name: str, times: tuple[int, int, int], marks_cycles: bool
) -> Iterator[dict[str, Any]]:
    """Events by Horovod's names, in a row for each name: several may be under way at once."""
    submitted, ready, ended = (time / 1e3 for time in times)
    if marks_cycles:
        yield {"ph": "i", "s": "p", "cat": "cycle", "name": "CYCLE_START", "ts": ready}
    title = collective.upper()
    parts = ((f"NEGOTIATE_{title}", submitted, ready), (title, ready, ended))
    for event, since, until in parts:
        row = {"cat": "named", "id": name, "name": event, "args": {"tensor": name}}
        yield {"ph": "b", "ts": since, **row}
        yield {"ph": "e", "ts": until, **row}


def _phase(phase: int, since: int, until: int) -> dict[str, Any]:
    times = {"ts": since / 1e3, "dur": (until - since) / 1e3}
    return {"ph": "X", "cat": "phase", "name": PHASES[phase], "tid": PHASE_THREAD, **times}
