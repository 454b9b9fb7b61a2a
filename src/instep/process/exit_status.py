"""How a rank ended and what became of the others, in words (pure; imports next to nothing)."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping


def describe_exit(code: int | None) -> str:
    """An exit code, -n for signal n, as a predicate. None: nobody was told."""
    if code is None:
        return "ended without a word (killed, or by os._exit)"
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"


def describe_early_exit(waiting: int) -> str:
    """As a predicate: a rank ended as one that has finished, and this other one waited for it."""
    return f"ended with exit code 0 while rank {waiting} waited for it"


def shell_exit_code(code: int | None) -> int:
    """As a shell has it: 128 + n for signal n. 1 where nobody was told."""
    return 1 if code is None else code if code >= 0 else 128 - code


def format_failure(
    rank: int, size: int, what: str, finished: Iterable[int], stopped: Iterable[int]
) -> str:
    """Who failed, how, and what became of the others, in one line."""
    fates = [f"instep: rank {rank} of {size} {what}"]
    if done := sorted(finished):
        fates.append(f"{format_ranks(done)} had finished")
    if left := sorted(stopped):
        fates.append(f"{format_ranks(left)} {'was' if len(left) == 1 else 'were'} stopped")
    return "; ".join(fates)


def format_ranks(numbers: Iterable[int], members: str = "rank") -> str:
    """ "rank 2" or "ranks 0, 2"; or "host 2", if that is what they are."""
    ordered = sorted(numbers)
    return f"{members}{'s' * (len(ordered) != 1)} {', '.join(map(str, ordered))}"


def format_arrived(came: Mapping[int, str], members: str) -> str:
    """Who came, and on which host; empty where nobody did."""
    hosts: dict[str, list[int]] = {}
    for member, host in came.items():
        hosts.setdefault(host, []).append(member)
    there = ", ".join(f"{format_ranks(held, members)} on {host}" for host, held in hosts.items())
    return f"; those that came: {there}" if there else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
