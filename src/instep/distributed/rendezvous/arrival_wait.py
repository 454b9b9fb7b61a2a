"""The wait of ranks for others to arrive: how long, and the lines that are printed meanwhile."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from instep.distributed.errors import RendezvousError
from instep.distributed.identity import launchers
from instep.distributed.identity.local_ranks import LocalRanks, is_orphan
from instep.process import settings
from instep.process.exit_status import format_arrived, format_ranks

T = TypeVar("T")
_MIN_PAUSE, _PAUSE_RATIO, _MAX_PAUSE = 0.002, 0.02, 0.2
"""Seconds between two attempts: a part of the time waited so far, but not less and not more."""
_ATTEMPTS_PER_SECOND = 20_000
"""Of all members together, in a long wait: rank 0's store answers about four times as many."""


def _nobody() -> Mapping[int, str]:
    return {}


class ArrivalWait:
    """One wait for other ranks, or hosts."""

    def __init__(
        self,
        count: int,
        seconds: float,
        local_ranks: LocalRanks | None = None,
        *,
        members: str = "rank",
        prints: bool = True,
        grace: float = 0.0,
    ) -> None:
        """For `count` members at most `seconds`, and `grace` more to be told the outcome."""
        self._count, self._seconds, self._members = count, seconds, members
        self._local_ranks = local_ranks
        self._prints = prints
        self._next_line = float(int(settings.ARRIVAL_NOTICE))
        self._longest_pause = max(_MAX_PAUSE, count / _ATTEMPTS_PER_SECOND)
        self._begin = time.monotonic()
        self._grace = grace
        launchers.note_launcher()

    def until(
        self, attempt: Callable[[], T | None], arrived: Callable[[], Mapping[int, str]] = _nobody
    ) -> T:
        """The first result of `attempt`, which is called again and again.

        `arrived` returns the members that have arrived, with their hosts; by default this one
        waits for the first member. Raises RendezvousError when time is over, when one that did not
        arrive has ended, and when the process has ended that started this one, as a launcher or
        with multiprocessing.
        """
        while (found := attempt()) is None:
            self.check(arrived)
            time.sleep(min(max(_PAUSE_RATIO * self._waited(), _MIN_PAUSE), self._longest_pause))
        return found

    def check(self, arrived: Callable[[], Mapping[int, str]] = _nobody) -> None:
        """Between two attempts. Raises as `until` does."""
        if self._local_ranks is not None and (ended := self._local_ranks.ended()):
            raise RendezvousError.ended(ended, self._count, socket.gethostname())
        if is_orphan() or launchers.has_lost_launcher():
            raise RendezvousError(
                "the process that started this rank was ended before all ranks had met, so nobody "
                "starts those that are missing, or waits for this one."
            )
        waited = self._waited()
        if waited >= self._seconds + self._grace:
            hosts = arrived()
            raise RendezvousError.absent(
                self._absent(hosts), self._count, self._seconds, hosts, self._members
            )
        if self._prints and waited >= self._next_line:
            self._next_line = max(2 * waited, 1.0)
            os.write(2, f"instep: {self._describe(waited, arrived())}\n".encode())

    def _waited(self) -> float:
        return time.monotonic() - self._begin

    def _absent(self, hosts: Mapping[int, str]) -> list[int]:
        """A rank that has reached nobody can only name rank 0."""
        return [k for k in range(self._count) if k not in hosts] if hosts else [0]

    def _describe(self, waited: float, hosts: Mapping[int, str]) -> str:
        absent = f"{format_ranks(self._absent(hosts), self._members)} of {self._count}"
        left = max(self._seconds - waited, 0.0)
        return (
            f"has waited {waited:.0f} s for {absent} to arrive, and waits {left:.0f} s more"
            f"{format_arrived(hosts, self._members)}."
        )
