"""Standby processes: they have imported PyTorch, and become the ranks of a job's next attempt.

Without them each rank of a restarted job imports PyTorch first, which takes seconds.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType

from instep.distributed.identity.launchers import JOB, is_launcher_variable
from instep.launch.ranks import rank_process
from instep.launch.ranks.rank_process import RankProcess, RankSpec
from instep.launch.worker import static_opt_out
from instep.process import python_command
from instep.process.procfs import environ_size

DELAY = 5.0
"""Seconds from the start of the ranks to that of their standbys, which would otherwise take time
from them while they import PyTorch themselves."""
_ROOM = "INSTEP_STANDBY"
"""A variable that makes room for those of a rank."""
_READ_AT_IMPORT = re.compile(r"""["'](GOMP|KMP|MKL|OMP|OPENBLAS|PYTORCH|TORCH)_\w+["']""")
"""Variables that PyTorch and its libraries read when they are loaded, in the text of a script."""


class Standbys:
    """A standby for each rank of this host; a context manager that ends those it has left."""

    def __init__(self) -> None:
        self._processes: dict[str, _Standby] = {}
        """Those that have imported PyTorch, by the local rank. Until then a process does not show
        the variables of a rank, and would count as a rank that has ended."""
        self._importing: _Standby | None = None
        self._environments: dict[str, dict[str, str]] = {}
        """What the next standby of each local rank is started with."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        """Stops the thread that starts standbys."""

    def start_rank(self, spec: RankSpec) -> RankProcess:
        """As `rank_process.start_rank`, by a standby if there is one that suits."""
        local_rank, lasting = spec.environ["LOCAL_RANK"], _lasting_variables(spec.environ)
        self._stop_starting()
        standby = self._processes.pop(local_rank, None)
        if not _is_configured_by(spec.command):
            self._environments[local_rank] = lasting
            self._stop = threading.Event()
            threading.Thread(
                target=self._start_all, args=(dict(self._environments), self._stop), daemon=True
            ).start()
        if standby is not None:
            if standby.is_compatible(lasting, spec.environ):
                try:
                    return standby.start_rank(spec)
                except ConnectionError:  # it was killed
                    pass
            standby.close()
        return rank_process.start_rank(spec)

    def _start_all(self, environments: Mapping[str, dict[str, str]], stop: threading.Event) -> None:
        """Start one after the other, so that all together take no more than a core."""
        if stop.wait(DELAY):
            return
        for local_rank, environ in environments.items():
            with self._lock:
                if stop.is_set():
                    return
                if local_rank in self._processes:
                    continue
                try:
                    standby = self._importing = _Standby(environ)
                except OSError:  # the host has no process or memory left for it
                    return
            standby.wait_for_imports()
            with self._lock:
                if stop.is_set():
                    return
                self._processes[local_rank], self._importing = standby, None

    def _stop_starting(self) -> None:
        """Start no more of them, and end the one that is importing PyTorch."""
        with self._lock:
            self._stop.set()
            unfinished, self._importing = self._importing, None
        if unfinished is not None:
            unfinished.close()

    def __enter__(self) -> Standbys:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self._stop_starting()
        for standby in self._processes.values():
            standby.close()


class _Standby:
    """A process that is not a rank yet."""

    def __init__(self, environ: dict[str, str]) -> None:
        """Raises OSError if the operating system refuses."""
        self._environ = environ
        room = environ | {_ROOM: "." * 4096}
        self._size = environ_size(room)
        self._line, theirs = socket.socketpair()
        self._imported, imported = os.pipe()
        worker = python_command("-P", "-m", "instep.launch.worker.standby")
        try:
            self._process = subprocess.Popen(
                [*worker, str(theirs.fileno()), str(imported)],
                env=room,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno(), imported],
            )
        except OSError:
            self._line.close()
            os.close(self._imported)
            raise
        finally:
            theirs.close()
            os.close(imported)

    def wait_for_imports(self) -> None:
        """Return when it has imported PyTorch, or has ended. Call it once."""
        os.read(self._imported, 1)
        os.close(self._imported)

    def is_compatible(self, lasting: Mapping[str, str], environ: Mapping[str, str]) -> bool:
        """Whether it was started with these variables, and has room for those of the rank."""
        return lasting == self._environ and environ_size(environ) <= self._size

    def start_rank(self, spec: RankSpec) -> RankProcess:
        """Let it run a rank's entry point. Raises ConnectionError if it has ended."""
        message = json.dumps([dict(spec.environ), spec.entry_arguments]).encode()
        with open(os.devnull, "r+b", buffering=0) as devnull:
            stdin = subprocess.DEVNULL if spec.number else None
            special = {subprocess.DEVNULL: devnull.fileno()}
            passed = [
                own if stream is None else special.get(stream, stream)
                for own, stream in enumerate((stdin, *spec.streams))
            ]
            if spec.store is not None:
                passed.append(spec.store.fileno())
            socket.send_fds(self._line, [len(message).to_bytes(8)], passed)
        self._line.sendall(message)
        return RankProcess(spec, self._process, self._line)

    def close(self) -> None:
        """End it."""
        self._line.close()
        self._process.kill()
        self._process.wait()


def _lasting_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank that all attempts have in common."""
    lasting = {name: environ[name] for name in environ if not is_launcher_variable(name, environ)}
    del lasting[JOB]
    return lasting | {name: os.environ[name] for name in (JOB,) if name in os.environ}


def _is_configured_by(command: Sequence[str]) -> bool:
    """Whether a program sets variables that PyTorch reads when it is imported."""
    return any(
        _READ_AT_IMPORT.search(line)
        for script in static_opt_out.read_files(command)
        for line in script.lines
    )
