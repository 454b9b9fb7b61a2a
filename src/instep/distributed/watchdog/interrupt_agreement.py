"""In the hub: at which point of the program an interrupt takes effect on every rank."""

from __future__ import annotations

from typing import Protocol

from instep.distributed.watchdog.connection import Said
from instep.distributed.watchdog.event_loop import Loop
from instep.process.exit_status import format_ranks

LOOK = 0.25
"""Seconds between two looks at where the ranks are."""
SAME, STILL = 2, 8
"""Looks. Ranks that have begun the same collectives are interrupted where they are, if they are at
the same line for so many looks; or if none begins another for so many."""
LIMIT, HERE_LIMIT = 40, 120
"""Looks without a rank that gets on, after which the job ends: before and after that."""


class Ranks(Protocol):
    """What an agreement needs of the hub."""

    def tell_all(self, word: str, **facts: object) -> None:
        """To every rank."""

    def going(self) -> set[int]:
        """The ranks whose programs are under way."""

    def all_came(self) -> bool:
        """Whether every rank has met the others."""

    def give_up(self, text: str) -> None:
        """End the job."""


class Agreement:
    """One Ctrl-C, from the first rank that hears of it until it has taken effect on all."""

    def __init__(self, loop: Loop, ranks: Ranks) -> None:
        self._loop, self._ranks = loop, ranks
        self._asked = self._told = self._here = self._over = False
        """A rank was interrupted; all know after which collective; or that they need not wait."""
        self._begun: dict[int, int] = {}
        self._lines: dict[int, str] = {}
        self._taken: dict[int, str] = {}
        """At which line it took effect."""
        self._seen: tuple[object, object] = ({}, {})
        self._same = self._still = 0
        """For how many looks the ranks are at the same line, or begin no collective."""

    def take(self, rank: int, word: str, said: Said) -> bool:
        """What a rank says; whether it was about this."""
        if word == "interrupt":
            self._begin()
        elif word == "halted":
            self._begun[rank] = said["begun"]
            if not self._told and self._ranks.going() <= self._begun.keys():
                self._told = True
                self._ranks.tell_all("after", begun=max(self._begun.values()) + 1)
        elif word == "point":
            self._begun[rank], self._lines[rank] = said["begun"], said["line"]
        elif word == "taken":
            self._taken[rank] = said["line"]
        else:
            return False
        return True

    def _begin(self) -> None:
        if not self._asked:
            self._asked = True
            if self._ranks.all_came():
                self._ranks.tell_all("halt")
            else:
                self._let_them()
            self._loop.after(LOOK, self._look)

    def _let_them(self) -> None:
        self._here = True
        self._still = 0
        self._ranks.tell_all("here")

    def _look(self) -> None:
        left = self._ranks.going() - self._taken.keys()
        if not left:
            return
        self._judge(left)
        self._ranks.tell_all("point")
        self._loop.after(LOOK, self._look)

    def _judge(self, left: set[int]) -> None:
        now = dict(self._begun), dict(self._lines)
        places = {(self._begun.get(rank), self._lines.get(rank)) for rank in left}
        self._still = self._still + 1 if now[0] == self._seen[0] else 0
        self._same = self._same + 1 if now == self._seen and len(places) == 1 else 0
        self._seen = now
        level = len({self._begun.get(rank) for rank in self._ranks.going()}) == 1
        waiting = not self._here and not self._taken and self._told and level
        if waiting and (self._same >= SAME or self._still >= STILL):
            self._let_them()
        elif self._still >= (HERE_LIMIT if self._here else LIMIT) and not self._over:
            self._over = True
            where = "\n".join(f"  rank {r} is at {self._lines.get(r, '?')}" for r in sorted(left))
            who = format_ranks(left)
            self._ranks.give_up(
                f"interrupted, and {who} did not come to a point at which all ranks can be "
                f"interrupted:\n{where}"
            )
