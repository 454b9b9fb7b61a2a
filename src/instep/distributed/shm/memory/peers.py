"""The processes of a group, by process id and start time."""

from __future__ import annotations

import os
from dataclasses import dataclass

from instep.process.procfs import read_stat


@dataclass(frozen=True)
class Peer:
    """One process of the group. A pid is reused some day; the pair of pid and start time is not."""

    rank: int
    """Its rank in the whole job, as messages name it."""
    pid: int
    """Its process id in the pid namespace that all ranks share."""
    started: int
    """Its start time, in clock ticks since the boot."""

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    @classmethod
    def of_this_process(cls, rank: int) -> Peer:
        """The calling process."""
        return cls(rank, os.getpid(), read_stat(os.getpid()).start_time)

    def is_alive(self) -> bool:
        """Whether this very process still runs; False for a zombie."""
        try:
            stat = read_stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        except OSError:  # this process may open no file now, and will ask again
            return True
        return stat.is_alive() and stat.start_time == self.started
