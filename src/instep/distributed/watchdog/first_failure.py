"""The choice of the first of several failures (pure)."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from instep.distributed.watchdog.connection import Message
from instep.process.exit_status import format_ranks

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
