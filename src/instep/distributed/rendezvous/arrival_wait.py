"""While ranks wait for others to arrive: what is seen of those, what is said, and for how long."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from instep.distributed.errors import RendezvousError
from instep.distributed.identity.local_ranks import LocalRanks, is_orphan
from instep.process import settings
from instep.process.exit_status import format_arrived, format_ranks

T = TypeVar("T")
_SHORT, _PART, _LONG = 0.002, 0.02, 0.2
"""Seconds between two attempts: a part of what was waited so far, but not less and not more."""


def _nobody() -> Mapping[int, str]:
    return {}


class ArrivalWait:
    """One wait for others."""

    def __init__(
        self,
        count: int,
        seconds: float,
        siblings: LocalRanks | None = None,
        *,
        members: str = "rank",
        speaks: bool = True,
        grace: float = 0.0,
    ) -> None:
        """For `count` members at most `seconds`, and `grace` more to hear what came of it."""
        self._count, self._seconds, self._members = count, seconds, members
        self._siblings = siblings
        self._speaks = speaks
        self._notice = float(int(settings.ARRIVAL_NOTICE))
        self._begin = time.monotonic()
        self._grace = grace

    def until(
        self, attempt: Callable[[], T | None], came: Callable[[], Mapping[int, str]] = _nobody
    ) -> T:
        """The first answer of `attempt`, which is asked again and again.

        `came` says who is there, and on which host; by default this one waits for the first
        member. Raises RendezvousError when time is over, or one that did not come has ended, or the
        process that started this one as a child of multiprocessing.
        """
        while (found := attempt()) is None:
            self.look(came)
            time.sleep(min(max(_PART * self._waited(), _SHORT), _LONG))
        return found

    def look(self, came: Callable[[], Mapping[int, str]] = _nobody) -> None:
        """Between two attempts. Raises as `until` does."""
        if self._siblings is not None and (ended := self._siblings.ended()):
            raise RendezvousError.ended(ended, self._count, socket.gethostname())
        if is_orphan():
            raise RendezvousError(
                "the process that started this rank was ended before all ranks had met, so nobody "
                "starts those that are missing, or waits for this one."
            )
        waited = self._waited()
        if waited >= self._seconds + self._grace:
            there = came()
            raise RendezvousError.absent(
                self._absent(there), self._count, self._seconds, there, self._members
            )
        if self._speaks and waited >= self._notice:
            self._notice = max(2 * waited, 1.0)
            os.write(2, f"instep: {self._waits(waited, came())}\n".encode())

    def _waited(self) -> float:
        return time.monotonic() - self._begin

    def _absent(self, there: Mapping[int, str]) -> list[int]:
        """Who has found nobody knows of the first one only."""
        return [k for k in range(self._count) if k not in there] if there else [0]

    def _waits(self, waited: float, there: Mapping[int, str]) -> str:
        whom = f"{format_ranks(self._absent(there), self._members)} of {self._count}"
        left = max(self._seconds - waited, 0.0)
        return (
            f"has waited {waited:.0f} s for {whom} to arrive, and waits {left:.0f} s more"
            f"{format_arrived(there, self._members)}."
        )
