"""Which ranks wait for each other in vain (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from instep.distributed.watchdog.connection import Said


def stuck(waits: Mapping[int, Said]) -> list[int]:
    """The ranks that can never go on, given in which collective each waiting rank is.

    A wait has "op" and "members", the ranks that this collective needs. Who waits for a rank that
    is not waiting may still be helped, and so may who waits for that one. What remains is stuck,
    unless all of it is in one and the same collective: then it is the network that is slow.
    """
    left = dict(waits)
    while helped := [r for r, wait in left.items() if not left.keys() >= set(wait["members"])]:
        for rank in helped:
            del left[rank]
    kinds = {(wait["op"], *wait["members"]) for wait in left.values()}
    return sorted(left) if len(kinds) > 1 else []


def described(waits: Mapping[int, Said]) -> str:
    """Who waits where, one rank to a line."""
    return "\n".join(
        f"  rank {rank} waits in {wait['call']} at {wait['line']}"
        for rank, wait in sorted(waits.items())
    )
