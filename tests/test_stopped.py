"""Two hosts' supervisors, one of which is stopped, as by Ctrl-Z: its line stays, and is silent."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from launching import Launch

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
    with socket.create_server(("127.0.0.1", 0)) as free:
        master = f"127.0.0.1:{free.getsockname()[1]}"

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
