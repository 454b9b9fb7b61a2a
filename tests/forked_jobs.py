"""`instep run` without the second that each rank takes to import torch.

`run("run", "-n", "2", "train.py")` is subprocess.run for that command of instep's. The command and
its ranks are forked from one process of this test run's, which has imported torch as a standby does
(instep/launch/worker/standby.py). All else is as usual: a supervisor, its reaper, for each rank a
session and a watcher, and Python's own end of each rank. What only a fresh interpreter shows
(whether torch is imported, its options, variables that Python or torch reads when it starts) is
not for it.

    the tests' process
        the server, which has imported torch
            the supervisor, of which the ranks are children
                the process from which they are forked
"""

from __future__ import annotations

import array
import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NoReturn

FIXED = ("PYTHON", "LD_", "MALLOC_", "GOMP_")
"""How variables begin that are read once, when the process starts."""
_IMPORTS = (
    *("torch", "torch.distributed", "torch.utils.data"),
    *("instep.launch.command", "instep.unedited.multi_rank"),
)
_NUMBER = 16
"""Letters of a process id or an exit code."""
_SET_CHILD_SUBREAPER = 36
_ROOM = "x" * 2**15
"""A variable of the server's; the variables of the forked processes stand in its place."""
_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None


def run(
    *words: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    input: str = "",  # noqa: A002
    timeout: float = 100,
) -> subprocess.CompletedProcess[str]:
    """Run `instep words…` to its end; its output is captured as text.

    Raises TimeoutError, after its supervisor was killed.
    """
    environ = dict(os.environ if env is None else env)
    assert fixed(environ) == fixed(os.environ), "these are for an interpreter that starts"
    asked = {
        "words": [os.fspath(word) for word in words],
        "environ": environ,
        "folder": os.path.abspath("" if cwd is None else cwd),
    }
    stdin, stdout, stderr = (os.pipe() for _ in range(3))
    ours, theirs = socket.socketpair()
    texts: dict[int, str] = {}
    threads = [
        threading.Thread(target=_write, args=(stdin[1], input)),
        threading.Thread(target=_read, args=(stdout[0], 1, texts)),
        threading.Thread(target=_read, args=(stderr[0], 2, texts)),
    ]
    with ours:
        given = [stdin[0], stdout[1], stderr[1], theirs.detach()]
        _send(_connection(), asked, given)
        for fd in given:
            os.close(fd)
        for thread in threads:
            thread.start()
        pid = int(ours.recv(_NUMBER))
        ours.settimeout(timeout)
        try:
            code = int(ours.recv(_NUMBER))
        except BaseException:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            raise
        finally:
            for thread in threads:
                thread.join()
    return subprocess.CompletedProcess(words, code, texts[1], texts[2])


def fixed(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables that are read once, but for the order of sets, which ranks share."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(FIXED) and name != "PYTHONHASHSEED"
    }


def _write(fd: int, text: str) -> None:
    with suppress(BrokenPipeError), open(fd, "w") as file:
        file.write(text)


def _read(fd: int, k: int, texts: dict[int, str]) -> None:
    with open(fd) as file:
        texts[k] = file.read()


def _connection() -> socket.socket:
    """To the server, which is started for the first job."""
    global _server
    if _server is None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                env=os.environ | {"ROOM": _ROOM, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        _server = process, ours
    return _server[1]


@atexit.register
def _end_server() -> None:
    if _server is not None:
        process, connection = _server
        connection.close()
        process.wait()


def _send(connection: socket.socket, value: Any, fds: Sequence[int]) -> None:
    data = json.dumps(value).encode()
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    connection.sendmsg([len(data).to_bytes(8)], [rights])
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[Any, list[int]] | None:
    """What was sent, or None at the end."""
    size, fds, _, _ = socket.recv_fds(connection, 8, 8)
    if not size:
        return None
    data = bytearray()
    while len(data) < int.from_bytes(size):
        data += connection.recv(int.from_bytes(size) - len(data))
    return json.loads(data), fds


# ---------------------------------------------------------------------------- the forked processes
def _serve(connection: socket.socket) -> None:
    """Import torch, and fork a supervisor for each request. Returns in the forked processes, where
    Python then ends by itself."""
    from importlib import import_module

    from instep.launch.worker import torch_import, torch_init

    torch_import.prepare()
    torch_init.install_patches()
    for name in _IMPORTS:
        import_module(name)
    while (request := _receive(connection)) is not None:
        asked, (*streams, answer) = request
        pid = os.fork()
        if not pid:
            connection.close()
            os.close(answer)
            _become(asked["environ"], streams)
            os.chdir(asked["folder"])
            _supervise(asked["words"])
        for fd in streams:
            os.close(fd)
        with socket.socket(fileno=answer) as told, suppress(BrokenPipeError):
            told.send(f"{pid:{_NUMBER}}".encode())
            told.send(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):{_NUMBER}}".encode())


def _become(environ: Mapping[str, str], streams: Sequence[int]) -> None:
    """Take over the variables and the streams of the process that this one is."""
    from instep.process import procfs

    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    procfs.replace_environ(environ)


def _supervise(words: Sequence[str]) -> NoReturn:
    """Be `instep …`, whose ranks are forked."""
    from instep import cli
    from instep.launch import job_run

    origin = RankOrigin()
    assert job_run.run_job.__kwdefaults__ is not None
    job_run.run_job.__kwdefaults__["start"] = origin.start_rank
    sys.argv[:] = ["instep", *words]
    try:
        code = cli.main()
    finally:
        origin.close()
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End without the quarter of a second that torch takes at Python's end. A supervisor that was
    not forked has not imported it."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class RankOrigin:
    """A process from which this one's ranks are forked before it has threads, handlers of signals
    or files of its own."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            self._connection.close()
            _fork_ranks(theirs)
        theirs.close()

    def start_rank(self, spec: Any) -> Any:
        """As instep.launch.ranks.rank_process.start_rank."""
        from instep.launch.ranks.rank_process import RankProcess

        ours, theirs = socket.socketpair()
        with theirs, open(os.devnull) as nothing:
            stdin = 0 if spec.number == 0 else nothing.fileno()
            out, err = (k if fd is None else fd for k, fd in enumerate(spec.streams, start=1))
            store = [] if spec.store is None else [spec.store.fileno()]
            asked = {"arguments": spec.entry_arguments, "environ": dict(spec.environ)}
            _adopt(True)
            _send(self._connection, asked, [stdin, out, err, theirs.fileno(), *store])
            pid = int(self._connection.recv(_NUMBER))
            _adopt(False)
        process = SimpleNamespace(pid=pid, wait=lambda: os.waitpid(pid, 0))
        return RankProcess(spec, process, ours)

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        os.waitpid(self._pid, 0)


def _adopt(adopting: bool) -> None:
    """Whether this process is the parent of descendants whose own parent has ended."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(adopting), 0, 0, 0)


def _fork_ranks(connection: socket.socket) -> NoReturn:
    """Fork a rank for each request; its parent ends at once, and the supervisor adopts it."""
    from instep.distributed.identity.launchers import STORE_FD
    from instep.launch.worker import entry

    torch = sys.modules["torch"]
    while (request := _receive(connection)) is not None:
        asked, (*streams, line) = request[0], request[1][:4]
        store = request[1][4:]
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                os.write(writing, f"{pid:{_NUMBER}}".encode())
                os._exit(0)
            os.close(reading)
            os.close(writing)
            connection.close()
            os.setsid()
            environ = asked["environ"]
            if store:
                environ[STORE_FD] = str(store[0])
            _become(environ, streams)
            torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
            sys.argv[:] = [entry.__file__, str(line), *asked["arguments"]]
            entry.main(*sys.argv[1:])
            sys.exit()
        os.waitpid(between, 0)
        connection.send(os.read(reading, _NUMBER))
        for fd in (reading, writing, *request[1]):
            os.close(fd)
    os._exit(0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
