"""Detection of ranks that wait for each other (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from instep.distributed.watchdog.connection import Message


def find_deadlock(waits: Mapping[int, Message]) -> list[int]:
    """The ranks that can never go on, given the collective in which each waiting rank is.

    A wait has "op" and "members", the ranks that take part in the collective. A rank that waits for
    a running rank may still go on, and so may a rank that waits for that one. The remaining ranks
    are deadlocked, unless all of them are in the same collective: then only the network is slow.
    """
    blocked = dict(waits)
    while free := [r for r, wait in blocked.items() if not blocked.keys() >= set(wait["members"])]:
        for rank in free:
            del blocked[rank]
    collectives = {(wait["op"], *wait["members"]) for wait in blocked.values()}
    return sorted(blocked) if len(collectives) > 1 else []


def format_waits(waits: Mapping[int, Message]) -> str:
    """The call and the line of each waiting rank, one rank per line."""
    return "\n".join(
        f"  rank {rank} waits in {wait['call']} at {wait['line']}"
        for rank, wait in sorted(waits.items())
    )
