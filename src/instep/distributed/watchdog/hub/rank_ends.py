"""The ranks that have ended, of which all watchers are told."""

from __future__ import annotations

from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.job_state import JobState
from instep.process.exit_status import rank_ranges

ENDED_SECONDS_PER_RANK = 20e-6
"""Between two messages to all about ranks that have ended: at most 50,000 are sent a second."""


class RankEnds:
    """Tells the watchers which ranks have ended: the first at once, the next ones together."""

    def __init__(self, loop: EventLoop, job: JobState) -> None:
        self._loop, self._job = loop, job
        self._untold: list[int] = []
        """The ranks of which the watchers have not been told."""
        self._will_tell = False
        """Whether they will be told soon."""

    def add(self, rank: int, code: int | None) -> None:
        """This rank has ended, with this exit code; None: it is unknown."""
        self._job.ended[rank] = code
        self._untold.append(rank)
        if not self._will_tell:
            self._tell()

    def _tell(self) -> None:
        self._will_tell = bool(self._untold)
        if self._untold:
            self._job.broadcast("ended", ranks=rank_ranges(self._untold))
            self._untold.clear()
            self._loop.call_later(ENDED_SECONDS_PER_RANK * self._job.size, self._tell)
