"""The ranks of this host before they have met: children of the process that started them all.

Slurm and MPICH leave the other ranks alone when one fails. One that fails on its first line has
said nothing to anybody; but its process is not there any more, and that can be seen.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping

from instep.process.procfs import boot_id, children, is_alive, read_environ, read_stat

_PAUSE = 0.25
"""Seconds between two looks."""
_STARTS = 1.0
"""Seconds within which a launcher has started all ranks of a host, once one of them waits."""
_NO_RANK, _HIDDEN = -1, -2
"""A child that is no rank; one that may be, but has overwritten its environment (setproctitle)."""
_RANK_NAMES = (
    *("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "PMI_RANK", "PMI_FD"),
    *("HOROVOD_RANK", "JSM_NAMESPACE_RANK"),
)


class LocalRanks:
    """Looks at the processes of this host's ranks. What cannot be seen is taken to live."""

    def __init__(
        self,
        ranks: Collection[int],
        variable: str,
        environ: Mapping[str, str],
        *,
        at_once: bool = True,
    ) -> None:
        """`ranks`: all of this host. Each was started with a `variable` that says which it is;
        `environ` is what this one was started with. `at_once`: all were started together, so that
        one which was never seen is not still to come."""
        self._at_once = at_once
        found = launcher_process(environ, variable)
        self._parent = None if found is None else found[0]
        self._ranks, self._variable = frozenset(ranks), variable
        self._rank_of: dict[int, int] = {}
        """By process."""
        self.gone: frozenset[int] = frozenset()
        """The ranks that were seen to have ended."""
        self._seen: set[int] = set()
        """The ranks whose processes were there at any time."""
        self._begin, self._last = time.monotonic(), 0.0

    def ended(self) -> frozenset[int]:
        """The ranks whose processes have ended. Between two looks some time passes."""
        now = time.monotonic()
        if self._parent is not None and now - self._last > _PAUSE:
            self._last = now
            self.gone |= self._look(
                self._parent, all_began=self._at_once and now - self._begin > _STARTS
            )
        return self.gone

    def _look(self, parent: int, *, all_began: bool) -> frozenset[int]:
        living = {self._rank(pid) for pid in children(parent) if is_alive(pid)}
        self._seen |= living & self._ranks
        if _HIDDEN in living or not living & self._ranks:
            return frozenset()
        missing = self._ranks - living
        return missing if all_began else missing & self._seen

    def _rank(self, pid: int) -> int:
        if pid not in self._rank_of:
            environ = read_environ(pid)
            told = environ.get(self._variable, "")
            if not told.isdecimal():
                return _NO_RANK if "PATH" in environ else _HIDDEN
            self._rank_of[pid] = int(told)
        return self._rank_of[pid]


def is_orphan() -> bool:
    """Whether multiprocessing started this process, as torch's mp.spawn does, and its parent has
    ended: which waits for its children, so somebody has killed it."""
    multiprocessing = sys.modules.get("multiprocessing.process")  # or this is no child of its
    parent = multiprocessing and multiprocessing.parent_process()
    return parent is not None and is_alive(os.getpid()) and not is_alive(parent.pid)


def launcher_process(environ: Mapping[str, str], *names: str) -> tuple[int, str] | None:
    """The nearest ancestor that is not of this rank: mpirun, or its helper on this host.

    A rank may be started through shells, containers or profilers of its own; all of these have
    its variables, `names` among them. Returns the process id, and a name that no other process
    ever has: the number comes back one day, so the start time belongs to it, in ticks since boot,
    and with it which boot. None: there is no such ancestor to be seen.
    """
    mine = {name: environ[name] for name in (*_RANK_NAMES, *names) if name in environ}
    pid = os.getppid()
    while pid:
        try:
            stat = read_stat(pid)
            if not mine.items() <= read_environ(pid).items():
                return pid, f"{pid}-{stat.start_time}-{boot_id()}"
        except (FileNotFoundError, ProcessLookupError):
            return None
        pid = stat.parent
    return None
