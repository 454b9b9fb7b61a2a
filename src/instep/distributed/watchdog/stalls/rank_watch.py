"""In the watcher: how long its rank has waited in a collective, and its answers to the hub."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from instep.distributed.flight_record import record_format
from instep.distributed.flight_record.record_format import FlightRecord
from instep.distributed.watchdog.connection import Connection, Message
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.stalls.probe import (
    TICKS_PER_SECOND,
    ProbeTarget,
    RankProbe,
    awaited_entry,
    is_stopped,
    issued_entry,
)
from instep.distributed.watchdog.stalls.request_relay import RequestRelay
from instep.distributed.watchdog.stalls.stack_dumps import StackDumps
from instep.process import write_text
from instep.process.exit_status import format_ranks
from instep.process.failures.last_position import write_later_position
from instep.process.procfs import memory_in_use, read_stat

POLL_SECONDS, _POLLS_PER_THRESHOLD, _FASTEST = 2.5, 5, 0.2
LAST_REPORT_SECONDS, _SHORTEST_TIMEOUT = 2.0, 10.0
"""Before INSTEP_TIMEOUT ends the job there is a last report, unless the timeout is shorter."""
IDLE_SHARE = 0.1
"""Of a core, up to which a rank is idle: in shared memory one that waits wakes now and then."""
WINDOW_SECONDS = 60.0
"""Over which the rates of `instep where --status` are taken."""


class _Poll(NamedTuple):
    """How far the rank had come at a time."""

    time: float
    epoch: int
    step: int
    collectives: int


class RankWatch:
    """Reports to the hub that its rank has waited for INSTEP_STALL_SECONDS, then for twice as long
    and so on; describes the rank when the hub asks."""

    def __init__(self, loop: EventLoop, rank: Connection, hub: Connection, start: Message) -> None:
        self._loop, self._hub = loop, hub
        self._threshold: int = start["stall_seconds"]
        self._timeout: float = start["timeout"]
        self._rank = ProbeTarget(
            start["pid"], start["record"], start["seen"], lambda: rank.send("get_stacks")
        )
        self._number: int = start["rank"]
        self._ended_ranks: set[int] = set()
        self._is_alone = False
        """Whether they have ended as planned."""
        self._is_idle_now = False
        """Whether the rank has hardly used a processor between the last two polls."""
        self._dumps = StackDumps(loop, start.get("stacks"), start["stack_signal"])
        self._probes: set[RankProbe] = set()
        self._ended = False
        self._line: str | None = None
        """The line at which the rank waits in a collective."""
        self._progress = (-1, -1.0)
        """The number of collectives at the last poll, and when the last one was left."""
        self._waits_in_cpp = False
        """Whether that is inferred: it is idle, so C++ waits for a collective that was issued."""
        self._unrecorded_wait: str | None = None
        """The line of a call of torch.distributed in which the rank waits: in groups of torch's own
        such calls of the script are not recorded."""
        self._waits_unrecorded = False
        """Whether the wait is of that kind."""
        self._relay: RequestRelay | None = None
        if start["local_rank"] == 0 and start["rank"] != 0:
            self._relay = RequestRelay(loop, hub, start["pid"])
        self._ticks = 0
        self._waited = 0.0
        """Seconds for which the rank has waited in it, without those in which it was stopped."""
        self._level = 0
        """The number of reports about this wait."""
        self._polled = time.monotonic()
        self._history: deque[_Poll] = deque()
        interval = POLL_SECONDS
        if self._threshold:
            interval = min(interval, max(_FASTEST, self._threshold / _POLLS_PER_THRESHOLD))
        self._interval = interval
        loop.call_later(interval, self._poll)

    def rank_ended(self) -> None:
        """The rank's process has ended: its last collective may be later than its last position."""
        self._ended = True
        self._line = None
        if self._relay is not None:
            self._relay.close()
        position = record_format.read_position(self._rank.record)
        if position is not None:
            write_later_position(self._rank.seen, *position)

    # --------------------------------------------------------------------------------- the wait

    def _poll(self) -> None:
        if self._ended:
            return
        self._loop.call_later(self._interval, self._poll)
        now = time.monotonic()
        elapsed = min(now - self._polled, 2 * self._interval)  # this process may have been stopped
        self._polled = now
        header = record_format.read_header(self._rank.record)
        self._history.append(_Poll(now, header.epoch, header.step, header.count))
        while self._history[0].time < now - WINDOW_SECONDS:
            self._history.popleft()
        progress = header.count, header.last_left or 0.0
        is_idle = self._is_idle_now = self._is_idle(elapsed)
        goes_on = self._waits_in_cpp and not is_idle
        has_returned = self._waits_unrecorded and self._line != self._unrecorded_wait
        if progress != self._progress or goes_on or has_returned:
            self._progress = progress
            self._end_wait()
        elif self._line is None:
            self._find_wait(is_idle)
        if self._line is not None and not is_stopped(self._rank.pid):
            self._waited += elapsed
        if self._line is not None and self._waited >= self._next_report():
            self._level += 1
            self._hub.send("stalled", level=self._level, waited=self._waited, line=self._line)

    def _find_wait(self, is_idle: bool) -> None:
        record = record_format.read(self._rank.record)
        entry = awaited_entry(record)
        if entry is None and is_idle:
            entry = issued_entry(record)
            self._waits_in_cpp = entry is not None
        if entry is not None:
            self._line = entry.line
        elif is_idle and self._unrecorded_wait is not None:
            self._line, self._waits_unrecorded = self._unrecorded_wait, True

    def set_wait(self, line: str | None) -> None:
        """The rank's main thread waits in a collective at this line; None: in no collective."""
        self._unrecorded_wait = line

    def _end_wait(self) -> None:
        """The rank has entered or left a collective since the last poll."""
        if self._level:
            self._hub.send("stall_over", waited=self._waited)
        self._line, self._waited, self._level = None, 0.0, 0
        self._waits_in_cpp = self._waits_unrecorded = False

    def _is_idle(self, seconds: float) -> bool:
        """Whether the rank has hardly used a processor since the last poll."""
        before = self._ticks
        with suppress(OSError):
            self._ticks = read_stat(self._rank.pid).cpu_ticks
        return self._ticks - before <= max(1, IDLE_SHARE * seconds * TICKS_PER_SECOND)

    def _next_report(self) -> float:
        if not self._threshold:
            return math.inf
        regular = float(self._threshold * 2**self._level)
        last = self._timeout - LAST_REPORT_SECONDS
        if self._timeout >= _SHORTEST_TIMEOUT and self._waited < last + self._interval < regular:
            return last
        return regular

    # ----------------------------------------------------------------------- after other ranks

    def others_ended(self, ranks: set[int]) -> None:
        """Other ranks have ended.

        If this one, the first of those that are left, hangs (in an atexit handler or a thread that
        it waits for, say), that is reported after INSTEP_STALL_SECONDS, and later again.
        """
        if not self._ended_ranks and self._threshold:
            self._loop.call_later(self._threshold, partial(self._look_after_others, 1))
        self._ended_ranks |= ranks

    def set_single_rank(self) -> None:
        """The other ranks end because the rest of the script is this rank's."""
        self._is_alone = True

    def _look_after_others(self, level: int) -> None:
        if not (self._ended or self._is_alone):
            after = self._threshold * 2**level
            self._loop.call_later(after, partial(self._look_after_others, level + 1))
            is_first_left = self._ended_ranks.issuperset(range(self._number))
            if self._is_idle_now and is_first_left:
                self._probe("stuck", self._print_left)

    def _print_left(self, state: Message) -> None:
        if not (state["is_slow"] or "waited" in state or self._ended):
            others = format_ranks(self._ended_ranks)
            verb = "has" if len(self._ended_ranks) == 1 else "have"
            text = f"instep: rank {self._number} {state['what']}; {others} {verb} ended\n"
            with suppress(OSError):  # the launcher, which reads it, may have ended
                write_text(2, text)

    # ------------------------------------------------------------------------------ the answers

    def describe(self, request: int, depth: str) -> None:
        """Send the rank's state.

        `depth`: "progress": steps and memory; "stuck": with stacks if the rank waits in no
        collective; "all": with stacks.
        """
        if self._ended:
            self._hub.send("state", request=request, what="has ended", stacks="")
            return
        if depth == "progress":
            self._hub.send("state", request=request, what="", stacks="", **self._progress_fields())
            return
        self._probe(depth, lambda fields: self._hub.send("state", request=request, **fields))

    def _probe(self, depth: str, reply: Callable[[Message], None]) -> None:
        def done(fields: Message) -> None:
            done_probes = [each for each in self._probes if each.is_done]
            self._probes.difference_update(done_probes)
            reply(fields)

        probe = RankProbe(self._loop, self._rank, self._dumps, depth == "all", self._waited, done)
        if not probe.is_done:
            self._probes.add(probe)

    def handle_reply(self, message: Message) -> None:
        """The hub has answered a question that was asked on this host."""
        if self._relay is not None:
            self._relay.handle_reply(message)

    def add_stacks(self, message: Message) -> None:
        """The rank has replied to "get_stacks"."""
        for probe in self._probes:
            probe.add_reply(message)

    def _progress_fields(self) -> Message:
        record = record_format.read(self._rank.record)
        fields: Message = {"epoch": record.epoch, "step": record.step, "memory": 0}
        with suppress(OSError):
            fields["memory"] = memory_in_use(self._rank.pid)
        share = waiting_share(record, time.monotonic())
        if share is not None:
            fields["waiting_share"] = share
        rate = _rate(self._history)
        return fields if rate is None else fields | {"rate": rate[0], "rate_unit": rate[1]}


def waiting_share(record: FlightRecord, now: float) -> float | None:
    """The share of the last minute, or of the time since the oldest known collective, that the rank
    has waited in collectives; None where it has in none."""
    begin = now - WINDOW_SECONDS
    spans = [(e.waiting, e.left or now) for e in record.entries if e.waiting is not None]
    spans = [(max(begin, entered), left) for entered, left in spans if left > begin]
    if not spans:
        return None
    inside, reached = 0.0, spans[0][0]
    for entered, left in spans:
        inside += max(0.0, left - max(entered, reached))
        reached = max(reached, left)
    return inside / max(now - spans[0][0], 1e-9)


def _rate(history: Sequence[_Poll]) -> tuple[float, str] | None:
    """Steps per second; collectives per second where the job counts no steps."""
    if len(history) < 2:
        return None
    first, last = history[0], history[-1]
    seconds = last.time - first.time
    if any(poll.epoch or poll.step for poll in history):
        steps = sum(b.step - a.step if b.epoch == a.epoch else b.step for a, b in pairwise(history))
        return steps / seconds, "steps"
    return (last.collectives - first.collectives) / seconds, "collectives"
