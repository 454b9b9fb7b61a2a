"""What tests of `instep run` share: real launches whose processes can be found again."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import forked_jobs

LAUNCHER_VARIABLES = (
    *("INSTEP", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC", "GLOO"),
    *("OMPI_", "PMI", "MPI_", "SLURM_", "HOROVOD_", "JSM_"),
)
"""How variables begin that say who a process is: a test's launches do not inherit them."""
PRELUDE = """\
import json, os, select, signal, subprocess, sys, threading, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def tell(*words):
    with open(os.environ["EVENTS"], "w") as events:
        events.write(json.dumps(words) + "\\n")
class Meeting:
    def __init__(self):
        self.fd = os.open(os.environ["MEETING"], os.O_RDWR)
    def come(self):
        os.write(self.fd, b".")
    def wait_for(self, others):
        seen = 0
        while seen < others:
            seen += len(os.read(self.fd, others - seen))
meeting = Meeting()
def forever():
    while True:
        signal.pause()
"""
"""Before every test script: `tell` the test, `meeting` of the ranks, and waiting without end."""


def wait_until(condition: Callable[[], object], seconds: float = 30, message: str = "") -> None:
    """Return when the condition is true; fail with the message if it is not in so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message or f"not true in {seconds:g} s"
        time.sleep(0.01)


_held: list[socket.socket] = []


def free_port() -> int:
    """A port of this host's loopback interface, kept for the test as long as this process runs.

    A socket is bound to it and does not listen. So the system gives the port to nobody else, and
    those who name it can listen there: like all who listen, they set SO_REUSEADDR.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    port: int = held.getsockname()[1]
    return port


class Launch:
    """Launches of one test, in a folder of its own; every process of theirs carries a mark."""

    def __init__(self, folder: Path, command: tuple[str, ...] = ("run", "--plain")) -> None:
        """`command` is what `instep` is asked to do.

        Plain: these scripts tell the test what each rank of its own sees.
        """
        self.folder = folder
        self.command = command
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.mark = uuid.uuid4().hex
        for name in ("events", "meeting"):
            os.mkfifo(folder / name)
        self._events = os.fdopen(os.open(folder / "events", os.O_RDWR), "rb", buffering=0)
        self._meeting = os.open(folder / "meeting", os.O_RDWR)
        self.environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("INSTEP", "OMP", "MKL", "GLOO", "PYTHONHASH", "COV_"))
        } | {
            "LAUNCH_TEST": self.mark,
            "INSTEP_DIVIDE": "always",  # most models here are too small to gain from it
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TMPDIR": str(self.temporary),
            "EVENTS": str(folder / "events"),
            "MEETING": str(folder / "meeting"),
        }

    def script(self, text: str, name: str = "train.py") -> str:
        """Write a script and return its path."""
        path = self.folder / name
        path.write_text(PRELUDE + textwrap.dedent(text))
        return str(path)

    @contextmanager
    def start(
        self, *arguments: object, environ: Mapping[str, str] | None = None, **options: Any
    ) -> Iterator[subprocess.Popen[str]]:
        """Begin `instep command… arguments…`; its streams are pipes. Ends it if the test fails."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(
            [sys.executable, "-m", "instep", *self.command, *map(str, arguments)],
            env=self.environ | dict(environ or {}),
            text=True,
            cwd=self.folder,
            **(pipes | options),
        ) as process:
            try:
                yield process
            except BaseException:
                self.end_all()
                raise

    def run(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """`instep command… arguments…` to its end, at which nothing of it may be left."""
        text = options.pop("input", None)
        with self.start(*arguments, **options) as process:
            return self.end_of(process, text)

    def run_forked(
        self, *arguments: object, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """As `run`, without the import of torch in each rank (forked_jobs.py)."""
        words, told = [*self.command, *map(str, arguments)], self.environ | dict(environ or {})
        done = forked_jobs.run(*words, env=told, cwd=self.folder)
        assert self.processes() == []
        return done

    def end_of(
        self, process: subprocess.Popen[str], text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Wait for the supervisor's end, at which nothing of the job may be left."""
        out, err = process.communicate(text)
        assert self.processes() == []
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def event(self) -> list[Any]:
        """The next thing that a rank tells; waits for it."""
        line = b""
        while not line.endswith(b"\n"):
            line += self._events.read(1)
        return json.loads(line)

    def events(self, count: int) -> list[list[Any]]:
        """The next `count` things, sorted."""
        return sorted(self.event() for _ in range(count))

    def no_event(self) -> bool:
        """Whether nobody has told anything more."""
        return not select.select([self._events], [], [], 0)[0]

    def processes(self) -> list[psutil.Process]:
        """What lives of this test's launches."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("LAUNCH_TEST") == self.mark
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def wait_until_gone(self, processes: Sequence[psutil.Process]) -> None:
        """Wait for these to end, and then for everything else; fails if something stays."""
        _, alive = psutil.wait_procs([*processes, *self.processes()], timeout=20)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
        assert self.processes() == []

    def call(self, ranks: int = 1) -> None:
        """Come to the ranks' meeting, once for each of them."""
        os.write(self._meeting, b"." * ranks)

    def end_all(self) -> list[psutil.Process]:
        """Kill what lives, and say what that was."""
        left = self.processes()
        for process in left:
            process.kill()
        return left

    def close(self) -> None:
        """Check that nothing is left, neither a process nor a file; end what is."""
        self._events.close()
        os.close(self._meeting)
        ended, files = self.end_all(), [*self.temporary.rglob("*")]
        assert (ended, files) == ([], []), f"left: {ended} {files}"
