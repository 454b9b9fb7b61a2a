"""The first of several failures, and ranks that wait for each other (pure)."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from instep.distributed.conditions import advise_on_condition
from instep.distributed.watchdog.connection import Message
from instep.process.exit_status import format_ranks, group_ranks, ranks_of

RESOLUTION = 0.002
"""Seconds. If two ranks ended within them, as their watchers saw it, their order is open."""
_BY_LAUNCHERS = (-signal.SIGKILL, -signal.SIGTERM, None)
"""Exit codes of ranks that a launcher ends because another one has died; None: unknown."""


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
