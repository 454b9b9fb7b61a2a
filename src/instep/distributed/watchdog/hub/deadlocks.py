"""Ranks that wait for each other in different collectives, so that none of them can go on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

from instep.distributed.conditions import advise_on_condition
from instep.distributed.watchdog.connection import Message
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.job_state import JobState
from instep.process.exit_status import group_ranks, ranks_of

DEADLOCK_SECONDS, EXIT_DEADLOCK_SECONDS = 3.0, 1.0
"""Until ranks that seem deadlocked are checked again; the second where one of them is at the end of
its script and so enters no further collective."""
SUSPECT_SECONDS = 0.05
"""From the first rank that is said to wait until all that are known to wait are looked at."""


class WaitingRanks:
    """The ranks that make no progress in a collective; ends the job if some are deadlocked.

    A rank that has failed may wait, too: until rank 0, which reports what all ranks fail by, has
    failed as well or waits for others.
    """

    def __init__(self, loop: EventLoop, job: JobState) -> None:
        self._loop, self._job = loop, job
        self._waits: dict[int, Message] = {}
        """The collective of each of them."""
        self._failing: set[int] = set()
        """The ranks that have failed and wait for rank 0."""
        self._will_look = False
        """Whether the waits are about to be looked at."""

    def add(self, rank: int, wait: Message) -> None:
        """This rank makes no progress in a collective."""
        self._waits[rank] = wait
        self._release_failing()
        if not self._will_look:
            self._will_look = True
            self._loop.call_later(SUSPECT_SECONDS, self._look)

    def remove(self, rank: int) -> None:
        """This rank goes on."""
        self._waits.pop(rank, None)

    def add_failing(self, rank: int) -> None:
        """This rank has failed, and waits for rank 0."""
        self._failing.add(rank)
        self._job.send(0, "check_often")
        self._release_failing()

    def _release_failing(self) -> None:
        while self._failing and 0 in self._waits:
            self._job.send(self._failing.pop(), "rank_0_waits")

    def _look(self) -> None:
        self._will_look = False
        if suspects := find_deadlock(self._waits):
            waits = {rank: self._waits[rank] for rank in suspects}
            at_exit = any(wait["op"] == "exit" for wait in waits.values())
            delay = EXIT_DEADLOCK_SECONDS if at_exit else DEADLOCK_SECONDS
            self._loop.call_later(delay, partial(self._check_deadlock, waits))

    def _check_deadlock(self, waits: dict[int, Message]) -> None:
        """Abort the first of these ranks if all of them still wait as they did."""
        if not self._job.failures and all(
            self._waits.get(rank) is wait for rank, wait in waits.items()
        ):
            text = "the ranks wait for each other in different collectives:\n"
            self._job.send(min(waits), "abort", text=text + format_waits(waits))


def find_deadlock(waits: Mapping[int, Message]) -> list[int]:
    """The ranks that can never go on, given the collective in which each waiting rank is.

    A wait has "op" and "members", the ranges of the ranks that take part. A rank that waits for
    a running rank may still go on, and so may a rank that waits for that one. The remaining ranks
    are deadlocked, unless all of them are in the same collective: then only the network is slow.
    """
    members_of = {rank: tuple(map(tuple, wait["members"])) for rank, wait in waits.items()}
    blocked = group_ranks(members_of)
    waited_for: dict[int, list[Any]] = {}
    for members in blocked:
        for rank in ranks_of(members):
            waited_for.setdefault(rank, []).append(members)
    free = [rank for rank in waited_for if rank not in waits]
    while free:
        for members in waited_for.pop(free.pop(), ()):
            free += blocked.pop(members, ())
    deadlocked = sorted(chain(*blocked.values()))
    collectives = {(waits[rank]["op"], members_of[rank]) for rank in deadlocked}
    return deadlocked if len(collectives) > 1 else []


def format_waits(waits: Mapping[int, Message]) -> str:
    """The call and the line of each waiting rank, one rank per line; and what may have parted
    them."""
    lines = [
        f"  rank {rank} waits in {wait['call']} at {wait['line']}"
        for rank, wait in sorted(waits.items())
    ]
    advice = advise_on_condition(lines).strip()
    return "\n".join([*lines, *filter(None, [advice])])
