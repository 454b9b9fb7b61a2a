"""The ranks of this host before they have joined: children of the process that started them all.

Slurm and MPICH do not stop the other ranks when one fails. A rank that fails on its first line has
sent nothing to any other; but /proc shows that its process has ended.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping

from instep.process.procfs import boot_id, children, is_alive, read_environ, read_stat

_PAUSE = 0.25
"""Seconds between two scans."""
_START_SECONDS = 1.0
"""Seconds within which a launcher has started all ranks of a host, once one of them waits."""
_NOT_A_RANK, _UNKNOWN = -1, -2
"""A child that is no rank; one that may be, but has overwritten its environment (setproctitle)."""
_RANK_VARIABLES = (
    *("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "PMI_RANK", "PMI_FD"),
    *("HOROVOD_RANK", "JSM_NAMESPACE_RANK"),
)


class LocalRanks:
    """The processes of this host's ranks. One that cannot be seen counts as alive."""

    def __init__(
        self,
        ranks: Collection[int],
        variable: str,
        environ: Mapping[str, str],
        *,
        at_once: bool = True,
    ) -> None:
        """`ranks`: all of this host. Each was started with its number in `variable`; `environ` is
        the environment with which this one was started. `at_once`: all were started together, so
        that one which was never seen will not be started later."""
        self._at_once = at_once
        found = find_launcher_process(environ, variable)
        self._parent = None if found is None else found[0]
        self._ranks, self._variable = frozenset(ranks), variable
        self._rank_of: dict[int, int] = {}
        """By process id."""
        self.gone: frozenset[int] = frozenset()
        """The ranks that have ended, as of the last scan."""
        self._seen: set[int] = set()
        """The ranks whose processes existed at any scan."""
        self._begin, self._last = time.monotonic(), 0.0

    def ended(self) -> frozenset[int]:
        """The ranks whose processes have ended. Scans at most every 0.25 seconds."""
        now = time.monotonic()
        if self._parent is not None and now - self._last > _PAUSE:
            self._last = now
            self.gone |= self._scan(
                self._parent, all_started=self._at_once and now - self._begin > _START_SECONDS
            )
        return self.gone

    def _scan(self, parent: int, *, all_started: bool) -> frozenset[int]:
        living = {self._rank(pid) for pid in children(parent) if is_alive(pid)}
        self._seen |= living & self._ranks
        if not living & self._ranks or living - self._ranks - {_NOT_A_RANK}:
            return frozenset()  # one that is not known, or the ranks are placed in another order
        missing = self._ranks - living
        return missing if all_started else missing & self._seen

    def _rank(self, pid: int) -> int:
        if pid not in self._rank_of:
            try:
                environ = read_environ(pid)
            except (FileNotFoundError, ProcessLookupError):  # it has ended just now
                return _NOT_A_RANK
            number = environ.get(self._variable, "")
            if not number.isdecimal():
                return _NOT_A_RANK if "PATH" in environ else _UNKNOWN
            self._rank_of[pid] = int(number)
        return self._rank_of[pid]


def is_orphan() -> bool:
    """Whether multiprocessing started this process, as torch's mp.spawn does, and its parent has
    ended. The parent waits for its children, so it was killed."""
    multiprocessing = sys.modules.get("multiprocessing.process")  # else this is no child of it
    parent = multiprocessing and multiprocessing.parent_process()
    return parent is not None and is_alive(os.getpid()) and not is_alive(parent.pid)


def find_launcher_process(environ: Mapping[str, str], *names: str) -> tuple[int, str] | None:
    """The nearest ancestor that is not of this rank: mpirun, or its helper on this host.

    A rank may be started through shells, containers or profilers of its own; all of these have
    its variables, `names` among them. Returns the process id, and a name that no other process
    ever has: process ids are reused, so the name has the start time, in ticks since the boot, and
    the boot. None where no such ancestor can be seen.
    """
    own = {name: environ[name] for name in (*_RANK_VARIABLES, *names) if name in environ}
    pid = os.getppid()
    while pid:
        try:
            stat = read_stat(pid)
            if not own.items() <= read_environ(pid).items():
                return pid, f"{pid}-{stat.start_time}-{boot_id()}"
        except (FileNotFoundError, ProcessLookupError):
            return None
        pid = stat.parent
    return None
