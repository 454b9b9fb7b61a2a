"""Processes that are stopped, as by Ctrl-Z: a supervisor on one of two hosts, whose line stays and
is silent, and ranks, which do not wait meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from instep.distributed.watchdog import progress_checks
from instep.distributed.watchdog.connection import Connection
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.progress_checks import ProgressChecks
from instep.distributed.watchdog.stalls.rank_watch import RankWatch
from launching import Launch, free_port

pytestmark = pytest.mark.launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.close()


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_stopped_supervisor_is_not_waited_for_without_end(launch: Launch, fails: bool) -> None:
    script = launch.script(f"""
        tell(rank)
        meeting.wait_for(1)
        sys.exit(3 if {fails} and rank == 0 else 0)
    """)
    master = f"127.0.0.1:{free_port()}"

    def start(node: int, seconds: int) -> AbstractContextManager[subprocess.Popen[str]]:
        where = ["--nnodes", 2, "--node-rank", node, "--master", master]
        environ = {"INSTEP_TIMEOUT": str(seconds)}
        return launch.start("-n", 1, *where, script, environ=environ)

    with start(1, 60) as stopped, start(0, 60 if fails else 4) as first:
        assert launch.events(2) == [[0], [1]]
        stopped.send_signal(signal.SIGSTOP)
        launch.call(2)
        _, err = first.communicate()
        assert "does not answer; has it been stopped (Ctrl-Z)?\n" in err
        assert first.returncode == (3 if fails else 1)
        culprit = "0 of 2 exited with code 3" if fails else "1 of 2 was lost with its host"
        assert f"\ninstep: rank {culprit}" in err
        stopped.send_signal(signal.SIGCONT)
        stopped.communicate()
        assert stopped.returncode != 0


def test_a_stopped_rank_is_in_no_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stops whole jobs now and then would end them: two ranks may be stopped for long in
    collectives that differ, since one of them has left the last one before the other."""
    monkeypatch.setattr(progress_checks, "CHECK_SECONDS", 0.02)
    wait = {"op": "sum", "members": [[0, 1]], "call": "sum", "line": "train.py:1", "sequence": 7}
    loop, told = EventLoop(), list[str]()
    with ExitStack() as stack:
        sockets = [*socket.socketpair(), *socket.socketpair()]
        to_rank, rank, to_hub, hub = (Connection(stack.enter_context(each)) for each in sockets)
        record = os.memfd_create("record")
        stack.callback(os.close, record)
        os.truncate(record, 65_536)
        process = stack.enter_context(subprocess.Popen(["sleep", "60"]))
        stack.callback(process.kill)

        def answer() -> None:
            for message in rank.recv() or ():
                if message["type"] == "get_position":
                    checks.add_position(wait)

        def hear() -> None:
            told.extend(message["type"] for message in hub.recv() or ())
            if "waits" in told:
                process.send_signal(signal.SIGSTOP)
            if "resumed" in told:
                loop.stop()

        start = {"rank": 0, "local_rank": 0, "pid": process.pid, "record": record, "seen": record}
        start |= {"stall_seconds": 0, "timeout": 60.0, "stack_signal": 0}
        stalls = RankWatch(loop, to_rank, to_hub, start)
        checks = ProgressChecks(loop, to_rank, to_hub, start, stalls, lambda *_: False)
        loop.add_reader(rank, answer)
        loop.add_reader(hub, hear)
        loop.call_later(10, loop.stop)
        loop.run()
    assert told == ["waits", "resumed"]
