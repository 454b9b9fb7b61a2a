"""A process that has imported torch and forks pytest runs: `python zygote.py` in a copy.

Reads jobs as lines of JSON: arguments of pytest, a log, a limit in seconds. Answers with the exit
status, None where the limit was passed. What a run has left behind is ended with it: each has a
process of its own above it to which orphans come.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import time
import traceback
from multiprocessing import connection, resource_tracker
from typing import Any

PRELOAD = (
    *("torch", "torch._dynamo", "torch.distributed", "numpy", "pytest", "psutil", "hypothesis"),
    *("pytest_timeout", "cloudpickle", "torch.nn.parallel", "torch.utils.data"),
    *("sklearn.datasets", "torchmetrics", "torchdata", "PIL.Image"),
)
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Answer jobs until stdin ends."""
    import warnings

    warnings.simplefilter("ignore")
    for name in PRELOAD:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"not preloaded: {error}", file=sys.stderr)
    warnings.resetwarnings()
    importlib.import_module("recording")
    sys.path[0] = ""  # as under `python -m pytest`
    answers = os.fdopen(os.dup(1), "w")
    assert not any(name.partition(".")[0] == "instep" for name in sys.modules)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        job = json.loads(line)
        answers.write(json.dumps(_run(job)) + "\n")
        answers.flush()


def _run(job: dict[str, Any]) -> int | None:
    ours, theirs = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        os.close(ours)
        os.setsid()
        status = _keep(job, theirs)
        os.write(theirs, json.dumps(status).encode())
        os._exit(0)
    os.close(theirs)
    answer = b""
    while part := os.read(ours, 100):
        answer += part
    os.close(ours)
    os.waitpid(keeper, 0)
    return json.loads(answer)  # type: ignore[no-any-return]


def _keep(job: dict[str, Any], pipe: int) -> int | None:
    """Run pytest in a child, and end whatever it has left."""
    import psutil

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        try:
            _pytest(job)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(3)
    status = _wait(child, time.monotonic() + job["limit"])
    me = psutil.Process()
    while left := me.children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        while _ended() is not None:
            pass
        time.sleep(0.01)
    return status


def _wait(child: int, deadline: float) -> int | None:
    """The child's exit status; buries orphans meanwhile, and ends the child at the deadline."""
    while time.monotonic() < deadline:
        match _ended():
            case None:
                time.sleep(0.02)
            case pid, status if pid == child:
                return os.waitstatus_to_exitcode(status)
    os.kill(child, signal.SIGKILL)
    return None


def _ended() -> tuple[int, int] | None:
    """One child that has ended, with its status."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _pytest(job: dict[str, Any]) -> None:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 1000)
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.update(job["environ"])
    import pytest

    sys.modules["__main__"] = importlib.import_module("pytest.__main__")
    sys.argv = ["pytest", *job["arguments"]]
    _fork_the_forkserver()
    plugin = importlib.import_module("recording").Recording(job)
    code = int(pytest.main(job["arguments"], plugins=[plugin]))
    atexit._run_exitfuncs()
    os._exit(code)


def _fork_the_forkserver() -> None:
    """Pools of ranks begin in a process that has torch already; started anew it would take 3 s."""
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    resource_tracker.ensure_running()
    address = connection.arbitrary_address("AF_UNIX")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    alive, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(held)
        try:
            multiprocessing.forkserver.main(
                listener.detach(), alive, ["instep.training.replicas"], sys_path=list(sys.path)
            )
        finally:
            os._exit(0)
    os.close(alive)
    listener.close()
    server._forkserver_pid, server._forkserver_alive_fd = pid, held
    server._forkserver_address = address


if __name__ == "__main__":
    main()
