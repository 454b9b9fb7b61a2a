"""Ranks that have entered different collectives: looked for when one is late or has failed."""

from __future__ import annotations

import os

from instep.distributed.errors import DisagreementError
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.job_state import JobState
from instep.distributed.watchdog.mismatch import EnteredCollectives, Step, has_line

ANSWER_SECONDS, MAX_ANSWERS_AWAITED = 0.3, 20
"""For the watchers to say which collectives their ranks have entered. If these differ, it is waited
so often again for all lines: torch takes seconds for the first stacks."""
ANSWER_SECONDS_PER_RANK = 0.5e-3
"""To read an answer takes the hub a part of it."""


class MismatchCheck:
    """Asks the watchers which collectives their ranks have entered, and reports a mismatch once."""

    def __init__(self, loop: EventLoop, job: JobState) -> None:
        self._loop, self._job = loop, job
        self._entered = EnteredCollectives()
        """The last collectives that each rank has entered, since they were asked for."""
        self._is_asking = self._has_reported = False
        self._answers_awaited = 0
        self._answer_seconds = max(ANSWER_SECONDS, ANSWER_SECONDS_PER_RANK * job.size)

    def request(self) -> None:
        """Ask each watcher which collectives its rank has entered."""
        if not (self._is_asking or self._has_reported):
            self._is_asking = True
            if not self._job.failures:  # else a failing rank has told its own, and will not again
                self._entered = EnteredCollectives()
            self._job.broadcast("get_collectives", with_stacks=False)
            self._loop.call_later(self._answer_seconds, self._report)

    def add(self, rank: int, steps: list[Step]) -> None:
        """A rank has entered these collectives."""
        if not self._has_reported:
            self._entered.add(rank, steps)
            if self._job.failures and len(self._entered.find_mismatch()) > 1:
                self._report()  # the other ranks are about to be ended

    def _report(self) -> None:
        """End the job if the ranks have entered different collectives, or explain its failure."""
        sides = self._entered.find_mismatch()
        is_complete = all(has_line(text) for text in sides)
        has_failed = bool(self._job.failures)
        if not (has_failed or is_complete) and self._answers_awaited < MAX_ANSWERS_AWAITED:
            if self._answers_awaited == 0:
                self._job.broadcast("get_collectives", with_stacks=True)
            self._answers_awaited += 1
            self._loop.call_later(self._answer_seconds, self._report)
            return
        self._is_asking, self._answers_awaited = False, 0
        if not sides or self._has_reported:
            return
        self._has_reported = True
        text = str(DisagreementError.of_collectives(sides))
        if has_failed:
            os.write(2, f"instep: {text}\n".encode())
        else:
            self._job.abort_job(f"{text}\n")
