"""Exit codes and failures as text, and lists of ranks. Imports next to nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

UNKNOWN_RANK = -1
"""A rank of which an error does not say the number."""
REQUEUE = 75
"""The exit code of a job that has saved a checkpoint because it was told to end, and wants to be
queued again: EX_TEMPFAIL of sysexits.h."""


def describe_exit(code: int | None) -> str:
    """An exit code, -n for signal n, as a predicate. None: the code is not known."""
    if code is None:
        return "ended and reported nothing (killed, or by os._exit)"
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"


def describe_early_exit(waiting: int) -> str:
    """The predicate for a rank that ended with exit code 0 while rank `waiting` waited for it."""
    return f"ended with exit code 0 while rank {waiting} waited for it"


def system_exit_code(leaving: SystemExit) -> int:
    """The exit code of a process that `leaving` ends."""
    if leaving.code is None:
        return 0
    return leaving.code & 0xFF if isinstance(leaving.code, int) else 1


def shell_exit_code(code: int | None) -> int:
    """128 + n for signal n; 1 where the code is not known."""
    return 1 if code is None else code if code >= 0 else 128 - code


def format_failure(
    rank: int,
    size: int,
    what: str,
    finished: Iterable[int],
    stopped: Iterable[int],
    alike: Iterable[int] = (),
) -> str:
    """One line: the rank that failed, how, and what became of the others. `alike`: those that
    failed in the same way."""
    parts = [f"instep: rank {rank} of {size} {what}"]
    if others := sorted(alike):
        parts.append(f"so did {format_ranks(others)}")
    if done := sorted(finished):
        parts.append(f"{format_ranks(done)} had finished")
    return "; ".join(parts) + format_stopped(stopped)


def format_stopped(ranks: Iterable[int]) -> str:
    """What a line about the end of a job adds on the ranks that were stopped; empty for none."""
    stopped = sorted(ranks)
    verb = "was" if len(stopped) == 1 else "were"
    return f"; {format_ranks(stopped)} {verb} stopped" if stopped else ""


def group_ranks(values: Sequence[Any] | Mapping[int, Any]) -> dict[Any, list[int]]:
    """The ranks that have each value, in order: in a sequence the index is the rank."""
    found: dict[Any, list[int]] = {}
    for rank, value in sorted(values.items()) if isinstance(values, Mapping) else enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


def format_ranks(numbers: Iterable[int], members: str = "rank", *, shortest_range: int = 17) -> str:
    """ "rank 2" or "ranks 0, 2, 4-90"; `members` is "host" for hosts.

    So many numbers without a gap, or more, are shown as a range: a job may have 10,000 ranks.
    """
    ordered = sorted(numbers)
    shown = (
        f"{first}-{last}"
        if last - first + 1 >= shortest_range
        else ", ".join(map(str, range(first, last + 1)))
        for first, last in rank_ranges(ordered)
    )
    return f"{members}{'s' * (len(ordered) != 1)} {', '.join(shown)}"


def rank_ranges(ranks: Iterable[int]) -> list[list[int]]:
    """The first and the last number of each range without a gap, in order."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank <= ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ranges


def ranks_of(ranges: Iterable[Sequence[int]]) -> set[int]:
    """The ranks of such ranges."""
    return {rank for first, last in ranges for rank in range(first, last + 1)}


def format_arrived(host_of: Mapping[int, str], members: str) -> str:
    """The ranks that arrived, by host; empty where there are none."""
    arrived = ", ".join(
        f"{format_ranks(held, members)} on {host}" for host, held in group_ranks(host_of).items()
    )
    return f"; those that came: {arrived}" if arrived else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
