"""Who the other ranks are, and whether they still live."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """One process of the group. A pid is used again some day; pid and start time are not."""

    rank: int
    """Its rank in the whole job, as messages name it."""
    pid: int
    """Its process id, seen from the pid namespace that all ranks share."""
    started: int
    """Its start, in clock ticks since the host came up."""

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    def is_alive(self) -> bool:
        """Whether this very process still runs; a zombie does not."""
        stat = _stat(self.pid)
        return stat is not None and stat[0] not in "ZX" and stat[1] == self.started


def myself(rank: int) -> Peer:
    """The calling process."""
    stat = _stat(os.getpid())
    assert stat is not None
    return Peer(rank, os.getpid(), stat[1])


def this_host() -> str:
    """Equal on two ranks that can share memory: one kernel, one numbering of processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a process, or None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text[text.rindex(")") + 2 :].split()
    return state, int(fields[18])
