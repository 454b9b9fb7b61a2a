"""Run a script under plain python or on N ranks in forks of a process that has imported torch.

It saves the seconds that fresh interpreters cost. Apart from that the ranks are those of
`instep run`: the same entry, without the supervisor.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Sequence
from pathlib import Path

preloaded: list[str] = []


def preload(modules: Sequence[str]) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for module in ("torch._dynamo", "instep.launch.worker.program", *modules):
        importlib.import_module(module)
        preloaded.append(module)
    importlib.import_module("torch").set_num_threads(1)
    gc.freeze()


def start(
    case: Path, observer: Path, ranks: int, work: Path, variables: dict[str, str], limit: float
) -> tuple[int, str, str]:
    """The exit code of the rank that failed first or 0, and what was printed to both streams."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            pids = []
            for rank in range(max(ranks, 1)):
                os.set_inheritable(listener.fileno(), True)
                pid = os.fork()
                if not pid:
                    fd = listener.fileno() if rank == 0 else None
                    run_rank(case, observer, rank, ranks, port, fd, work, variables, folder)
                pids.append(pid)
        code = wait(pids, limit)
        outs = [Path(folder, f"out{rank}").read_text() for rank in range(max(ranks, 1))]
        errs = [Path(folder, f"err{rank}").read_text() for rank in range(max(ranks, 1))]
        return code, "".join(outs), "\n".join(errs)


def wait(pids: list[int], limit: float) -> int:
    deadline, alive, code = time.monotonic() + limit, set(pids), 0
    while alive and not code:
        for pid in list(alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                alive.remove(pid)
                code = code or os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            code = 124
        time.sleep(0.02)
    if alive and code != 124:
        time.sleep(2)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return code


def run_rank(
    case: Path,
    observer: Path,
    rank: int,
    ranks: int,
    port: int,
    listener: int | None,
    work: Path,
    variables: dict[str, str],
    folder: str,
) -> None:
    """Does not return."""
    code = 0
    weakref.finalize._registry.clear()  # the folders are the parent's
    try:
        for stream, name in ((1, "out"), (2, "err")):
            fd = os.open(f"{folder}/{name}{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(fd, stream)
            os.close(fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  (as long as the process)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.chdir(work)
        os.environ |= variables
        if ranks:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sys.argv = [str(case)]
        runpy.run_path(str(observer))
        if ranks > 1:
            from instep.distributed.identity.launchers import STORE_FD
            from instep.launch.worker import program

            if listener is not None:
                os.environ[STORE_FD] = str(listener)
            program.run_program([str(case)])
        else:
            runpy.run_path(str(case), run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else bool(error.code)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
