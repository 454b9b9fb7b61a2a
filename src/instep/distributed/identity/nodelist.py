"""Slurm's notation of lists: hosts as `node[1-3,07],login`, tasks per host as `2(x3),1`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from instep.process.errors import LaunchVariablesError

_HOSTS = re.compile(r"((?:[^\[\],\s]|\[[^\[\]\s]+\])+)(?:,|$)")
"""One entry: names and brackets, up to a comma that is in no bracket."""
_PIECE = re.compile(r"\[([^\]]+)\]|([^\[]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def expand_hosts(text: str) -> Iterator[str]:
    """The names in a list such as `rack[1-2]n[08-10],login`, in its order.

    A number keeps the zeros in front. Raises LaunchVariablesError for what is no such list.
    """
    at = 0
    while at < len(text) or at == 0:
        entry = _HOSTS.match(text, at)
        if entry is None or text.endswith(","):
            raise _not_a_host_list(text)
        at = entry.end()
        pieces = [_expand(piece, text) for piece in _PIECE.finditer(entry[1])]
        yield from map("".join, product(*pieces))


def _expand(piece: re.Match[str], text: str) -> list[str]:
    """One piece of an entry: itself, or the numbers in its brackets."""
    if piece[1] is None:
        return [piece[2]]
    numbers: list[str] = []
    for part in piece[1].split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _not_a_host_list(text)
        first, last = found[1], found[2] or found[1]
        if int(first) > int(last):
            raise _not_a_host_list(text)
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def count_tasks(text: str, node: int) -> int:
    """The number of tasks of host `node` in a list such as `2(x3),1` (here 2, 2, 2 and 1).

    Raises LaunchVariablesError for what is no such list, or one of fewer hosts.
    """
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        if found is None:
            raise _not_a_task_list(text)
        node -= int(found[2] or 1)
        if node < 0:
            return int(found[1])
    raise _not_a_task_list(text)


def _not_a_host_list(text: str) -> LaunchVariablesError:
    return LaunchVariablesError(
        f"SLURM_STEP_NODELIST={text!r} is not a list of hosts such as node[1-3],login. "
        "Export MASTER_ADDR and MASTER_PORT (an address of rank 0's host) instead."
    )


def _not_a_task_list(text: str) -> LaunchVariablesError:
    return LaunchVariablesError(
        f"SLURM_STEP_TASKS_PER_NODE={text!r} does not say how many tasks this host has; "
        "it should read like 2(x3),1, with a number for each host of the step."
    )
