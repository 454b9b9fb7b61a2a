"""In the watcher: what a rank does, observed for a second.

The rank's listener thread is asked for its stacks twice. /proc tells what a rank does that does not
reply, because it is stopped or because C code holds its interpreter's lock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from instep.distributed.flight_record import record_format
from instep.distributed.flight_record.record_format import Entry, FlightRecord
from instep.distributed.watchdog.connection import Message
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.stalls.stack_dumps import (
    StackDumps,
    is_idle_worker,
    script_position,
)
from instep.process.failures.last_position import read_whole, write_later_position
from instep.process.procfs import (
    context_switches,
    current_folder,
    descendants,
    read_stat,
    tracer,
    wait_channel,
)

SECOND_LOOK, JUDGEMENT, NO_REPLY = 0.4, 0.9, 2.5
"""Seconds: when the rank is asked again, when its state is judged, and when it is judged without a
reply (on a loaded machine a reply takes long)."""
_BUSY_SHARE = 0.2
"""Of a core, from which on a process counts as running."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_MAX_STACKS = 60_000
"""Characters: the hub and the watcher of rank 0 share a thread, and a socket that takes 200 KB."""
_PHASES = {
    "data": ", loading data",
    "forward": ", in the forward pass",
    "backward": ", in the backward pass",
    "optimizer": ", in the optimizer's step",
    "evaluation": ", evaluating",
    "checkpoint": ", writing a checkpoint",
    "single_process_scope": ", in a single_process_scope",
}
_CALLS_OF_CPP = ("graph.py:", "distributed.py:", "distributed_c10d.py:")
"""Files of torch whose functions call C++ that waits for collectives: backward, and DDP."""
_LOCK_FILES = ("threading.py:", "queue.py:", "synchronize.py:")


class _Sample(NamedTuple):
    time: float
    switches: int
    ticks: int


class ProbeTarget(NamedTuple):
    """The rank, as its watcher knows it."""

    pid: int
    record: int
    """The descriptor of its flight record."""
    seen: int
    """The descriptor of the file with its last known line."""
    request_stacks: Callable[[], None]
    """Sends "get_stacks" to it."""


def is_stopped(pid: int) -> bool:
    """Whether a signal, a terminal or a debugger has stopped this process."""
    with suppress(OSError):
        return read_stat(pid).state in "Tt"
    return False


def awaited_entry(record: FlightRecord) -> Entry | None:
    """The collective in which the rank has waited longest; None where it is in none."""
    entries = _without_abandoned(record, record.open_entries())
    return min(entries, key=lambda entry: entry.waiting or 0.0, default=None)


def issued_entry(record: FlightRecord) -> Entry | None:
    """The oldest collective that was issued and may not have ended: C++ may wait for it."""
    entries = _without_abandoned(record, record.issued_entries())
    return min(entries, key=lambda entry: entry.entered, default=None)


def _without_abandoned(record: FlightRecord, entries: Iterable[Entry]) -> list[Entry]:
    """The collectives of a group end in order. One that is open although a later one of its group
    has ended was left by an exception."""
    left = {entry.group: entry.sequence for entry in record.entries if entry.left is not None}
    return [entry for entry in entries if entry.sequence > left.get(entry.group, 0)]


class RankProbe:
    """One probe; `done` is called with the fields of the rank's state."""

    def __init__(
        self,
        loop: EventLoop,
        rank: ProbeTarget,
        dumps: StackDumps,
        waits_too: bool,
        waited: float,
        done: Callable[[Message], None],
    ) -> None:
        """`waits_too`: collect the stacks of a rank that waits in a collective, too; `waited`: for
        so many seconds, if it waits."""
        self._loop, self._rank, self._dumps, self._done = loop, rank, dumps, done
        self._folder = current_folder(rank.pid)
        self._replies: list[Message] = []
        self._stacks = ""
        self._waited = waited
        self._waits_unrecorded = False
        """Whether it waits in a call of which the flight record has nothing."""
        self._is_slow = False
        """Whether it goes on, as far as a second tells."""
        self.is_done = False
        """Whether `done` was called."""
        self._first = self._sample()
        self._record = record_format.read(rank.record)
        self._entry = awaited_entry(self._record)
        if is_stopped(rank.pid) or (self._entry is not None and not waits_too):
            self._finish()
            return
        rank.request_stacks()
        loop.call_later(SECOND_LOOK, rank.request_stacks)
        loop.call_later(JUDGEMENT, self._judge)

    def add_reply(self, message: Message) -> None:
        """The rank has sent its stacks."""
        self._replies.append(message)
        self._stacks = message["stacks"]

    def _sample(self) -> _Sample:
        pid = self._rank.pid
        with suppress(OSError):
            ticks = read_stat(pid).cpu_ticks
            return _Sample(time.monotonic(), context_switches(pid), ticks)
        return _Sample(time.monotonic(), 0, 0)

    def _judge(self) -> None:
        waited = time.monotonic() - self._first.time
        if not self._replies and waited < NO_REPLY and not is_stopped(self._rank.pid):
            self._loop.call_later(0.2, self._judge)
            return
        pids = [self._rank.pid] if self._may_signal() else []
        pids += sorted(pid for pid in descendants(self._rank.pid) if not is_stopped(pid))
        self._dumps.collect(pids, self._judge_with_dumps)

    def _may_signal(self) -> bool:
        """Whether the rank itself is asked by the signal: it does not reply, and is in no system
        call that the signal would end early."""
        if self._replies or is_stopped(self._rank.pid):
            return False
        channel = wait_channel(self._rank.pid)
        return self._is_busy() or not channel or "futex" in channel or "pipe" in channel

    def _judge_with_dumps(self, dumps: dict[int, str]) -> None:
        texts = [self._stacks] if self._stacks else []
        own = dumps.pop(self._rank.pid, "")
        texts += [own] if own else []
        texts += [f"Process {pid}, a child of the rank:\n{dump}" for pid, dump in dumps.items()]
        self._stacks = "\n".join(texts)[:_MAX_STACKS]
        self._finish(own, dumps)

    def _finish(self, own_dump: str = "", dumps: dict[int, str] | None = None) -> None:
        fields: Message = {"what": self._predicate(own_dump, dumps or {}), "stacks": self._stacks}
        fields["is_slow"] = self._is_slow
        if self._entry is not None and not is_stopped(self._rank.pid):
            fields["waited"] = time.monotonic() - (self._entry.waiting or self._entry.entered)
        elif self._waits_unrecorded:
            fields["waited"] = self._waited + time.monotonic() - self._first.time
        self.is_done = True
        self._done(fields)

    # ---------------------------------------------------------------------------- the predicate

    def _predicate(self, own_dump: str, dumps: dict[int, str]) -> str:
        pid = self._rank.pid
        where = (
            f"and was last seen at {self._short(self._seen_line())}"
            if self._entry is None
            else f"in {replace(self._entry, line=self._short(self._entry.line)).describe()}"
        )
        if tracer(pid):
            return f"is held by a debugger (process {tracer(pid)}) {where}"
        if is_stopped(pid):
            return f"is stopped (SIGSTOP, or Ctrl-Z) {where}"
        if self._entry is not None:
            return f"waits {where}"
        if not self._replies:
            line = self._short(script_position(own_dump) or self._seen_line())
            busy = self._is_busy()
            channel = "" if busy else wait_channel(pid)
            kernel = f", in {channel} of the kernel" if channel else ""
            verb = "is in" if busy else "sleeps in"
            return (
                f"{verb} C code that holds the interpreter's lock (GIL), called at {line}{kernel}"
            )
        return self._user_code(dumps)

    def _user_code(self, dumps: dict[int, str]) -> str:
        first, last = self._replies[0], self._replies[-1]
        line = self._short(last["line"])
        if last["at_breakpoint"]:
            return f"is at a breakpoint at {line}"
        if last["innermost"].startswith(_CALLS_OF_CPP) and not self._is_busy():
            self._entry = issued_entry(self._record)
            if self._entry is not None:
                return f"waits in {replace(self._entry, line=line).describe()}"
        self._waits_unrecorded = bool(last["wait"]) and not self._is_busy()
        if self._waits_unrecorded:
            return f"waits in {self._short_in(last['wait'])}"
        loads = last["loads_data"] or self._record.phase == "data"
        phase = _PHASES["data"] if loads else _PHASES.get(self._record.phase, "")
        text = f"is in user code at {line}{phase}"
        worker = self._worker(dumps) if loads else ""
        if worker:
            return f"{text}: {worker}"
        now = record_format.read(self._rank.record)
        has_moved = (now.count, now.step) != (self._record.count, self._record.step)
        has_run = self._sample().switches != self._first.switches
        imports = last["imports"] and (has_run or self._is_busy())
        self._is_slow = has_moved or imports or _main_stack(first) != _main_stack(last)
        if self._is_slow:
            if imports:
                return f"{text}, importing a module; it is slow, not stuck"
            moved = first["line"] != last["line"] and not has_moved
            came = f": it comes from {self._short(first['line'])}" if moved else ""
            does = "runs" if now.step != self._record.step else "is slow, not stuck"
            return f"{text}; it {does}{came}"
        return f"{text}{self._activity(last['innermost'])}"

    def _activity(self, innermost: str) -> str:
        """A clause about what the main thread does there."""
        if self._is_busy() or self._is_ready():
            return ", running"
        if self._sample().switches != self._first.switches:
            return ", asleep most of the time"
        channel = wait_channel(self._rank.pid)
        if "nanosleep" in channel:
            return ", asleep"
        if innermost.startswith(_LOCK_FILES):
            return f", waiting for a lock ({innermost})"
        if "futex" in channel:
            return ", waiting for a lock"
        return ", waiting for a file, a socket or another process"

    def _worker(self, dumps: dict[int, str]) -> str:
        """A clause about the loader workers that keep the rank waiting."""
        for pid in sorted(descendants(self._rank.pid)):
            if is_stopped(pid):
                return f"its loader worker (process {pid}) is stopped (SIGSTOP)"
            if pid in dumps and not is_idle_worker(dumps[pid]):
                line = self._short(script_position(dumps[pid]))
                with suppress(OSError):
                    running = ", running" if read_stat(pid).state == "R" else ", asleep"
                    return f"its loader worker (process {pid}) is at {line}{running}"
        return ""

    def _is_busy(self) -> bool:
        now = self._sample()
        seconds = max(now.time - self._first.time, 1e-3)
        return (now.ticks - self._first.ticks) / TICKS_PER_SECOND > _BUSY_SHARE * seconds

    def _is_ready(self) -> bool:
        """Whether it would run if it had a processor."""
        with suppress(OSError):
            return read_stat(self._rank.pid).state == "R"
        return False

    def _seen_line(self) -> str:
        """The last known line: of its last position, or of a collective that it entered later."""
        position = record_format.read_position(self._rank.record)
        if position is not None:
            write_later_position(self._rank.seen, *position)
        text = read_whole(self._rank.seen).rstrip("\0")
        return text.partition(" ")[2] or "an unknown line"

    def _short(self, line: str) -> str:
        """A line of a file in the rank's current folder, without that folder."""
        prefix = f"{self._folder}/"
        return line.removeprefix(prefix) if self._folder else line

    def _short_in(self, text: str) -> str:
        """A text that ends with a line."""
        words, _, line = text.rpartition(" ")
        return f"{words} {self._short(line)}"


def _main_stack(reply: Message) -> str:
    """The stack of the main thread, which is the first of a reply's stacks."""
    main, *_ = reply["stacks"].split("\nThread ", 1)
    return str(main)
