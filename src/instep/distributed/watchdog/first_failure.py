"""Which of several failures came first (pure)."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from instep.distributed.watchdog.connection import Said
from instep.process.exit_status import format_ranks

APART = 0.002
"""Seconds between the ends of two ranks, as their watchers saw them, that tell which was first."""
_BY_LAUNCHERS = (-signal.SIGKILL, -signal.SIGTERM, None)
"""How a launcher ends the other ranks as soon as one has died; None where that is not known."""


def first(news: Sequence[Said]) -> Said:
    """The failure that is to be named, of those that were heard in this order.

    One that vanished without a word comes before those who complain. Where a launcher may have
    killed some of those that vanished, and it cannot be seen which, all of these are named (the
    others under "with").
    """
    silent = [failure for failure in news if failure["silent"]]
    own = [failure for failure in news if not failure.get("follows")]
    if not silent:
        return (own or news)[0]
    began = [failure for failure in silent if failure["code"] not in _BY_LAUNCHERS]
    if began:
        return began[0]
    here = [failure for failure in silent if failure["host"] == silent[0]["host"]]
    seen = [failure["moment"] for failure in here if failure.get("moment") is not None]
    earliest = [f for f in here if f.get("moment") is None or f["moment"] < min(seen) + APART]
    return _all_in_one(earliest)


def _all_in_one(failures: Sequence[Said]) -> Said:
    chosen, *rest = failures
    if not rest:
        return chosen
    others = [failure["rank"] for failure in rest]
    what = f"{chosen['what']}, at the same moment as {format_ranks(others)}"
    return chosen | {"what": what, "with": others}
