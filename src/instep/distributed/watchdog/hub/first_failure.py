"""The choice of the first of several failures, after which the other ranks are ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from instep.distributed.watchdog.connection import Message
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.job_state import JobState
from instep.process.exit_status import (
    REQUEUE,
    UNKNOWN_RANK,
    describe_early_exit,
    format_failure,
    format_ranks,
)

COLLECT_SECONDS = 0.1
"""Between the first report of a failure and the choice of the first failure. A death is seen later
than it happens, and a peer may have reported an error in between."""
MAX_POSTPONED, EXITING_POSTPONED = 5, 25
"""Postponements of that choice; the second where the failure is a wait for a rank that has left and
whose failure or exit code is not known yet: on a busy machine an interpreter takes a second or more
to exit. The rank that failed waits for 3 seconds (`client.DECISION_SECONDS`)."""
FAILED_RANK_SECONDS = 8.0
"""For the rank that failed to print, clean up and exit, before the others are ended."""
LAUNCHER_SECONDS = 0.2
"""From the end of the rank that failed to that of the others: their launcher sees it first."""
OTHERS_SECONDS = 0.9
"""For the other ranks to exit."""
REQUESTED = {-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP, REQUEUE}
"""Exit codes of ranks that were asked to end; the last one after they have saved."""
RESOLUTION = 0.002
"""Seconds. If two ranks ended within them, as their watchers saw it, their order is open."""
_BY_LAUNCHERS = (-signal.SIGKILL, -signal.SIGTERM, None)
"""Exit codes of ranks that a launcher ends because another one has died; None: unknown."""


class FirstFailure:
    """Chooses the failure that is reported, ends the other ranks, and then the hub."""

    def __init__(self, loop: EventLoop, job: JobState) -> None:
        self._loop, self._job = loop, job
        self._postponed = 0
        self._is_ending_others = self._is_over = False
        """Whether the other ranks were told to exit; whether the hub's work is done."""

    def choose_soon(self) -> None:
        """A failure has been reported: choose once the reports of others have arrived, too."""
        self._loop.call_later(COLLECT_SECONDS, self._choose)

    def rank_ended(self, rank: int) -> None:
        """This rank has ended."""
        first = self._job.first_failure
        if first is not None and rank == first["rank"]:
            self._loop.call_later(LAUNCHER_SECONDS, self._end_others)
        if len(self._job.ended) == self._job.size:
            self.all_ended()

    def all_ended(self) -> None:
        """All ranks have ended, or never came: end the hub, once a failure is chosen if one is
        known."""
        if self._job.first_failure is not None or not self._job.failures:
            self._finish()

    def _choose(self) -> None:
        job = self._job
        silent = [failure for failure in job.failures if failure["silent"]]
        if len(silent) == job.size and {failure["code"] for failure in silent} <= REQUESTED:
            self._finish()  # somebody ended the whole job, and knows it
            return
        first = find_first_failure(job.failures)
        if self._may_change(first, has_silent=bool(silent)):
            self._postponed += 1
            self._loop.call_later(COLLECT_SECONDS, self._choose)
            return
        job.first_failure = first
        first["headline"] = self._headline(first)
        job.broadcast("failed", **first)
        if first["rank"] in job.ended:
            self._end_others()
        else:
            self._loop.call_later(FAILED_RANK_SECONDS, self._end_others)

    def _may_change(self, first: Message, *, has_silent: bool) -> bool:
        """Whether a report that is still to come may show that another failure was first."""
        job = self._job
        exiting = job.finished - job.ended.keys()  # one of them may have failed, unreported
        awaited = {first.get("awaited_rank")} - {each["rank"] for each in job.failures}
        leaving = awaited & job.running_ranks()  # it may be about to report why
        has_saved = first["code"] == REQUEUE and len(job.ended) < job.size  # as all ranks do
        limit = EXITING_POSTPONED if leaving or has_saved or awaited & exiting else MAX_POSTPONED
        is_open = not job.all_connected() or leaving or has_saved or (exiting and not has_silent)
        return bool(is_open and self._postponed < limit)

    def _headline(self, first: Message) -> str:
        """If the failure is a wait for a rank that had ended, the line is about the latter."""
        job = self._job
        rank, awaited = first["rank"], first.get("awaited_rank")
        if awaited == UNKNOWN_RANK:
            awaited = min(job.finished - {rank}, default=None)
        on_host = f" on {first['host']}" if len(job.hosts) > 1 else ""
        description = first["description"] + on_host
        if awaited is not None and (awaited in job.finished or job.ended.get(awaited) == 0):
            description, rank = describe_early_exit(rank), awaited
        alike = job.failing_alike - {rank} if rank == 0 else set()
        others = set(range(job.size)) - {rank, *first.get("with", ())} - alike
        finished = {each for each in others & job.finished if not job.ended.get(each)}
        return format_failure(rank, job.size, description, finished, others - finished, alike)

    def _end_others(self) -> None:
        if not self._is_ending_others:
            self._is_ending_others = True
            self._job.broadcast("exit")
            self._loop.call_later(OTHERS_SECONDS, self._finish)

    def _finish(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        first = self._job.first_failure
        if first is not None:  # ranks at their exit may have failed since it was chosen
            self._job.broadcast("over", headline=self._headline(first))
        if first is None or 0 not in self._job.connections:
            self._loop.stop()  # else rank 0's watcher, in this loop, does so after its report


def find_first_failure(failures: Sequence[Message]) -> Message:
    """The failure to report, of those that arrived in this order.

    A rank that died silently comes before ranks that report an error. If the launcher may have
    killed some of those that died, and their order is open, all of these are reported (the others
    under "with").
    """
    silent = [failure for failure in failures if failure["silent"]]
    if not silent:
        independent = [failure for failure in failures if not failure.get("is_consequence")]
        return (independent or failures)[0]
    not_killed = [failure for failure in silent if failure["code"] not in _BY_LAUNCHERS]
    if not_killed:
        return not_killed[0]
    on_host = [failure for failure in silent if failure["host"] == silent[0]["host"]]
    times = [failure["time"] for failure in on_host if failure.get("time") is not None]
    earliest = [f for f in on_host if f.get("time") is None or f["time"] < min(times) + RESOLUTION]
    return _merge(earliest)


def _merge(failures: Sequence[Message]) -> Message:
    first, *rest = failures
    if not rest:
        return first
    others = [failure["rank"] for failure in rest]
    description = f"{first['description']}, at the same moment as {format_ranks(others)}"
    return first | {"description": description, "with": others}
