"""`instep run`: when a rank fails, when the job is asked to end, when the supervisor is killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from instep.distributed.identity.launchers import FAILURE_FILE
from instep.launch.ranks.rank_process import RankProcess, RankSpec
from instep.launch.ranks.reaper import end_ranks
from instep.process import PACKAGE_FOLDER
from instep.process.exit_status import system_exit_code
from instep.process.failures.last_position import LastPosition, format_last_words, write_position
from instep.process.failures.record import (
    DETECTION_DELAY,
    Failure,
    RankExit,
    first_failure,
    format_interrupt,
    format_report,
)
from launching import Launch

pytestmark = pytest.mark.launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.close()


FAILING_CALLS = """
import torch
try:
    open('missing.csv')
except OSError:
    try:
        torch.load('missing.pt')
    except OSError:
        try:
            torch.ones(1).backward()
        except RuntimeError:
            torch.nn.Sequential(torch.nn.Linear(2, 3))(torch.ones(2, 4))
"""


def test_the_traceback_of_the_rank_that_failed_stands_last_and_once(launch: Launch) -> None:
    script = launch.script("""
        def step():
            raise ValueError("boo")
        if rank == 2:
            meeting.wait_for(2)
            print("before")
            step()
        meeting.come()
        forever()
    """)
    result = launch.run("-n", 3, script)
    assert result.returncode == 1
    assert result.stdout == "[2] before\n"
    head, traceback = result.stderr.split("\n", 1)
    assert head == "instep: rank 2 of 3 failed (exit code 1); ranks 0, 1 were stopped"
    assert traceback.startswith("Traceback (most recent call last):\n  File ")
    assert traceback.count("  File ") == 2
    assert traceback.count(script) == 2
    assert traceback.endswith("ValueError: boo\n")


@pytest.mark.parametrize("text", ["1 +", "import nowhere_to_be_found", "raise RuntimeError"])
def test_a_traceback_reads_as_under_python(launch: Launch, text: str) -> None:
    path = launch.folder / "bad.py"
    path.write_text(text)
    alone = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    result = launch.run("-n", 1, path)
    assert result.stderr == f"instep: rank 0 of 1 failed (exit code 1)\n{alone.stderr}"


def test_a_traceback_of_an_unedited_script_reads_as_under_python(tmp_path: Path) -> None:
    launch = Launch(tmp_path, ("run",))
    path = tmp_path / "train.py"
    path.write_text(FAILING_CALLS)
    alone = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    result = launch.run_forked("-n", 2, path)
    launch.close()
    lines = [line for line in result.stderr.splitlines()[1:] if line.strip(" ^")]
    assert lines == [line for line in alone.stderr.splitlines() if line.strip(" ^")]


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("raise SystemExit(9)", 9, "instep: rank 0 of 2 exited with code 9; so did rank 1\n"),
        pytest.param(
            "raise ValueError('boo')",
            1,
            "instep: rank 0 of 2 failed (exit code 1); so did rank 1\n",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_ranks_that_fail_in_the_same_way_were_not_stopped(
    tmp_path: Path, ending: str, code: int, said: str
) -> None:
    launch = Launch(tmp_path, ("run",))
    path = tmp_path / "train.py"
    path.write_text(f"import torch\n{ending}\n")
    result = launch.run_forked("-n", 2, path)
    launch.close()
    assert result.returncode == code
    assert said in result.stderr


@pytest.mark.parametrize(
    "starts",
    [
        "raise RuntimeError(os.strerror(errno.EAGAIN))  # as in C++",
        "threading.Thread(target=print).start()",
        "subprocess.run(['true'])",
    ],
)
def test_a_rank_that_may_start_no_thread_or_process_is_told_of_the_limit(
    launch: Launch, starts: str
) -> None:
    script = launch.script(f"""
        import errno, subprocess, threading, _thread, _posixsubprocess
        def start(*args, **kwargs):
            if args[-1:] == ((),):
                raise RuntimeError("can't start new thread")
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        threading._start_new_thread = subprocess._fork_exec = start
        {starts}
    """)
    result = launch.run("-n", 1, script)
    assert result.stderr.splitlines()[-1].startswith("The system lets this user or container start")


WRITES_SLOWLY = """
import ctypes, os
import torch
from instep.unedited.processes import failure_reports

failure_reports.WAIT_SECONDS = 0.01
announce = failure_reports.client.announce_failure
class Announced:
    "Tells the test when rank 1 has looked often enough whether rank 0 waits."
    def __init__(self):
        self.rank_0_waits, self.looks = announce(), 0
    def wait(self, seconds):
        self.looks += 1
        if self.looks == 3:
            libc, line = ctypes.CDLL(None), b'["rank 1 waits"]\\n'
            libc.write(libc.open(os.environ["EVENTS"].encode(), os.O_WRONLY), line, len(line))
        return self.rank_0_waits.wait(seconds)
failure_reports.client.announce_failure = Announced
for _ in range(4):
    print("x" * 50_000, flush=True)
print("end", flush=True)
"""

EXITS_IN_A_THREAD = """
import threading
thread = threading.Thread(target=lambda: os._exit(3))
thread.start()
thread.join()
"""


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("raise ValueError('late')", 1, "ValueError: late"),
        pytest.param("os._exit(3)", 3, "exited with code 3", marks=pytest.mark.nightly),
        pytest.param(EXITS_IN_A_THREAD, 3, "exited with code 3", marks=pytest.mark.nightly),
        pytest.param(
            *("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"), marks=pytest.mark.nightly
        ),
    ],
)
def test_a_rank_0_that_writes_when_all_fail_is_not_ended_before_it_has_written(
    tmp_path: Path, ending: str, code: int, said: str
) -> None:
    launch = Launch(tmp_path, ("run",))
    path = tmp_path / "train.py"
    path.write_text(WRITES_SLOWLY + ending)
    with launch.start("-n", 2, path) as process:
        assert launch.event() == ["rank 1 waits"]  # while nobody reads what rank 0 writes
        stdout, stderr = process.communicate()
    launch.close()
    assert (process.returncode, stdout.count("x"), stdout[-4:]) == (code, 200_000, "end\n")
    assert stderr.count(said) == stderr.count("instep: rank 0 of 2 ") == 1


@pytest.mark.parametrize(
    "source", [b"import os\n\nprint('\xd6\xd0')\n", b"print('\xd6\xd0')\n", b"# \xd6\xd0\n"]
)
def test_a_script_in_another_encoding_than_it_declares_is_named(
    launch: Launch, source: bytes
) -> None:
    path = launch.folder / "train.py"
    path.write_bytes(source)
    alone = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    result = launch.run("-n", 1, path)
    assert result.stderr == f"instep: rank 0 of 1 failed (exit code 1)\n{alone.stderr}"


def test_a_rank_that_leaves_in_a_library_is_named_by_the_line_of_its_script(
    launch: Launch,
) -> None:
    path = launch.folder / "options.py"
    path.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    result = launch.run("-n", 1, path, "--unknown")
    assert result.returncode == 2
    assert result.stderr.endswith(f"It left at {path}:2.\n")


def test_files_of_output_take_a_path_that_the_locale_cannot_write(launch: Launch) -> None:
    script = launch.folder / "训练.py"
    script.write_text("raise ValueError('boo')")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = launch.run("-n", 1, "--output", "logs", script, environ=ascii_only)
    assert result.stderr.endswith("ValueError: boo\n")
    assert "ValueError: boo" in (launch.folder / "logs" / "rank0.err").read_text()


def test_a_rank_that_fails_because_its_peer_did_is_not_named(launch: Launch) -> None:
    script = launch.script("""
        if rank == 1:
            meeting.wait_for(1)
            raise ValueError("the cause")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        meeting.come()
        while not os.path.exists(os.environ["INSTEP_FAILURE_FILE"].replace("rank0", "rank1")):
            pass
        raise ConnectionError("connection closed by peer")
    """)
    result = launch.run("-n", 2, script)
    assert result.stderr.startswith("instep: rank 1 of 2 failed (exit code 1); rank 0 was stopped")
    assert "the cause" in result.stderr
    assert "by peer" not in result.stderr


def test_a_killed_rank_is_named_though_its_peer_complains_first(launch: Launch) -> None:
    script = launch.script("""
        import socket
        if rank == 0:
            store = socket.socket(fileno=int(os.environ["INSTEP_STORE_FD"]))
            store.listen()
            meeting.come()
            store.accept()[0].recv(1)
            raise ConnectionError("connection closed by peer")
        meeting.wait_for(1)
        connection = socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    result = launch.run("-n", 2, script)
    assert result.returncode == 128 + signal.SIGKILL
    assert result.stderr == (
        "instep: rank 1 of 2 was killed by SIGKILL; rank 0 was stopped\n"
        "SIGKILL nearly always means that the host's memory was full.\n"
    )


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit('no data')", 1, "exited with code 1; rank 0 was stopped\nno data"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV"),
        *(
            pytest.param(*row, marks=pytest.mark.nightly)
            for row in [
                ("sys.exit(3)", 3, "exited with code 3; rank 0 was stopped\nIt left at "),
                ("os._exit(4)", 4, "exited with code 4"),
                ("os.kill(os.getpid(), signal.SIGINT); forever()", 130, "was killed by SIGINT"),
                ("raise ValueError", 1, "failed (exit code 1)"),
            ]
        ),
    ],
)
def test_the_exit_code_is_that_of_the_rank(
    launch: Launch, ending: str, code: int, said: str
) -> None:
    result = launch.run("-n", 2, launch.script(f"if rank == 0: forever()\n{ending}"))
    assert result.returncode == code
    assert f"rank 1 of 2 {said}" in result.stderr
    assert result.stderr.count("no data") == said.count("no data")


@pytest.mark.parametrize(
    ("given", "code"), [(None, 0), (256, 0), (-1, 255), (True, 1), ("", 1), ("no data", 1)]
)
def test_the_system_keeps_eight_bits_of_an_exit_code(given: object, code: int) -> None:
    assert system_exit_code(SystemExit(given)) == code


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "sys.exit(256)",
        pytest.param("sys.exit()", marks=pytest.mark.nightly),
        pytest.param("sys.exit(0)", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_has_finished_is_no_failure(launch: Launch, ending: str) -> None:
    script = launch.script(f"""
        if rank == 1:
            tell(os.getpid())
            {ending}
        else:
            meeting.wait_for(1)
            tell("went on")
    """)
    with launch.start("-n", 2, script) as process:
        launch.event()
        _wait_for_zombie(psutil.Process(process.pid))
        launch.call()
        result = launch.end_of(process)
    assert launch.event() == ["went on"]
    assert (result.returncode, result.stderr) == (0, "")


def test_who_had_finished_is_said(launch: Launch) -> None:
    script = launch.script("""
        if rank == 0: sys.exit()
        meeting.wait_for(1)
        raise ConnectionError
    """)
    with launch.start("-n", 2, script) as process:
        _wait_for_zombie(psutil.Process(process.pid))
        launch.call()
        result = launch.end_of(process)
    assert "rank 1 of 2 failed (exit code 1); rank 0 had finished\n" in result.stderr


def _wait_for_zombie(supervisor: psutil.Process) -> None:
    while True:
        for child in supervisor.children():
            if child.status() == psutil.STATUS_ZOMBIE:
                return


def test_a_rank_that_fails_runs_what_its_script_has_registered_for_its_end(launch: Launch) -> None:
    script = launch.script("""
        import atexit, psutil
        if rank == 0:
            with open("draft", "w") as file:
                file.write(str(os.getpid()))
            os.rename("draft", "pid")
            meeting.come()
            forever()
        meeting.wait_for(1)
        other = psutil.Process(int(open("pid").read()))

        def save():
            while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
                pass  # it is ended first
            open("saved", "w").close()

        atexit.register(save)
        sys.exit(7)
    """)
    assert launch.run("-n", 2, script).returncode == 7
    assert (launch.folder / "saved").exists()


def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(launch: Launch) -> None:
    script = launch.script("""
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.Popen(["sleep", "1000"])
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            meeting.come()
            forever()
        meeting.wait_for(1)
        raise ValueError
    """)
    assert launch.run("-n", 2, script).returncode == 1  # and run() finds nothing left


def test_a_rank_that_fails_and_does_not_end_is_ended(launch: Launch) -> None:
    script = launch.script("""
        if rank == 1:
            threading.Thread(target=threading.Event().wait).start()
            raise ValueError("boo")
        forever()
    """)
    result = launch.run("-n", 2, script)
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: boo\n")


def test_what_a_finished_job_left_running_is_ended(launch: Launch) -> None:
    script = launch.script("""subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)""")
    assert launch.run("-n", 2, script).returncode == 0  # and run() finds nothing left


def test_the_scripts_own_excepthook_is_called(launch: Launch) -> None:
    script = launch.script("""
        before = sys.excepthook
        def hook(kind, error, frames):
            tell(kind.__name__)
            before(kind, error, frames)
        sys.excepthook = hook
        try:
            raise KeyError("shown by the script itself")
        except KeyError:
            sys.excepthook(*sys.exc_info())
        raise ValueError("boo")
    """)
    stderr = launch.run("-n", 1, script).stderr
    assert [launch.event(), launch.event()] == [["KeyError"], ["ValueError"]]
    assert stderr.count("KeyError: 'shown by the script itself'") == 1
    assert stderr.count("ValueError: boo") == 1
    assert stderr.endswith("ValueError: boo\n")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_job_with_a_line(
    launch: Launch, number: signal.Signals, code: int
) -> None:
    script = launch.script("""
        subprocess.Popen(["sleep", "1000"])
        tell(rank)
        forever()
    """)
    with launch.start("-n", 2, script) as process:
        launch.events(2)
        process.send_signal(number)
        result = launch.end_of(process)
    assert (result.returncode, result.stdout) == (code, "")
    what = "interrupted" if number is signal.SIGINT else f"ended by {number.name}"
    assert re.fullmatch(rf"instep: {what}(| at \S+); ranks 0, 1 were stopped\n", result.stderr)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM]
)
def test_a_signal_to_verify_ends_the_run_under_way(launch: Launch, number: signal.Signals) -> None:
    script = launch.folder / "waits.py"
    script.write_text(
        "import os, signal\n"
        "with open(os.environ['EVENTS'], 'w') as events:\n"
        "    events.write('[\"here\"]\\n')\n"
        "signal.pause()\n"
    )
    launch.command = ("verify", "-n", "2")
    of_torch = {"TORCHINDUCTOR_CACHE_DIR": str(launch.folder / "cache")}
    with launch.start(script, environ=of_torch) as process:
        launch.event()
        process.send_signal(number)
        result = launch.end_of(process)
    assert (result.returncode, result.stdout) == (128 + number, "")
    assert result.stderr == "instep verify: run 1 of 6: 1 process\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_ranks_get_the_signal_and_may_finish(launch: Launch, number: signal.Signals) -> None:
    script = launch.script("""
        def save(number, frame):
            tell(rank, number)
            sys.exit()
        signal.signal(signal.SIGINT, save)
        signal.signal(signal.SIGTERM, save)
        tell(rank, 0)
        forever()
    """)
    with launch.start("-n", 2, script) as process:
        launch.events(2)
        process.send_signal(number)
        assert launch.events(2) == [[0, number], [1, number]]
        result = launch.end_of(process)
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("handles", "code", "said"),
    [
        ("True", 3, r"instep: ended by SIGTERM at \S+; ranks 0, 1 exited with code 3\n"),
        ("rank == 0", 143, r"instep: ended by SIGTERM\S* at \S+; ranks 0, 1 were stopped\n"),
    ],
)
def test_a_job_ends_with_the_code_that_its_ranks_have_chosen_on_sigterm(
    launch: Launch, handles: str, code: int, said: str
) -> None:
    script = launch.script(f"""
        def leave(number, frame):
            sys.exit(3)
        if {handles}:
            signal.signal(signal.SIGTERM, leave)
        tell(rank)
        forever()
    """)
    with launch.start("-n", 2, script) as process:
        launch.events(2)
        process.send_signal(signal.SIGTERM)
        result = launch.end_of(process)
    assert result.returncode == code
    assert re.fullmatch(said, result.stderr), result.stderr


def test_an_exception_of_a_handler_of_sigterm_is_reported(launch: Launch) -> None:
    script = launch.script("""
        def save(number, frame):
            raise ValueError("no room")
        signal.signal(signal.SIGTERM, save)
        tell(rank)
        forever()
    """)
    with launch.start("-n", 2, script) as process:
        launch.events(2)
        process.send_signal(signal.SIGTERM)
        result = launch.end_of(process)
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: no room\n")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_the_ranks_get_other_signals_and_go_on(launch: Launch, number: signal.Signals) -> None:
    script = launch.script("""
        for each in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(each, lambda number, frame: tell(rank, number))
        tell(rank, 0)
        meeting.wait_for(1)
    """)
    with launch.start("-n", 2, script) as process:
        launch.events(2)
        process.send_signal(number)
        assert launch.events(2) == [[0, number], [1, number]]
        launch.call(2)
        assert launch.end_of(process).returncode == 0


def test_sigusr1_is_a_question_only_where_no_rank_handles_it(launch: Launch) -> None:
    script = launch.script("""
        if rank == 0:
            signal.signal(signal.SIGUSR1, lambda number, frame: tell(rank, number))
        tell(rank, 0)
        meeting.wait_for(1)
    """)
    with launch.start("-n", 2, script) as process:
        launch.events(2)
        process.send_signal(signal.SIGUSR1)
        assert launch.event() == [0, signal.SIGUSR1]
        launch.call(2)
        assert launch.end_of(process).returncode == 0  # rank 1 has not died of it


def test_the_second_signal_is_sigterm_and_the_third_sigkill(launch: Launch) -> None:
    script = launch.script("""
        def stay(number, frame):
            tell(rank, number)
        signal.signal(signal.SIGINT, stay)
        signal.signal(signal.SIGTERM, stay)
        tell(rank, 0)
        forever()
    """)
    with launch.start("-n", 2, script) as process:
        launch.events(2)
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(signal.SIGINT)
            assert launch.events(2) == [[0, number], [1, number]]
        process.send_signal(signal.SIGINT)
        assert launch.end_of(process).returncode == 130


def test_an_interrupt_while_the_ranks_start_is_one_line(launch: Launch) -> None:
    script = launch.script("tell(rank)\nforever()")
    with launch.start("-n", 4, script) as process:
        launch.event()
        process.send_signal(signal.SIGINT)
        result = launch.end_of(process)
    assert result.returncode == 130
    assert re.fullmatch(r"instep: interrupted(| at \S+); ranks .* were stopped\n", result.stderr)
    while not launch.no_event():
        launch.event()


def test_ctrl_c_at_the_terminal_ends_the_job(launch: Launch) -> None:
    script = launch.script("tell(rank)\nforever()")
    ours, terminal = os.openpty()
    at_terminal = (
        "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
        "os.execv(sys.executable, [sys.executable, '-m', 'instep', 'run', *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", at_terminal, "--plain", "-n", "2", script]
    with subprocess.Popen(
        command, stdin=terminal, stderr=subprocess.PIPE, text=True, env=launch.environ
    ) as process:
        os.close(terminal)
        launch.events(2)
        os.write(ours, b"\x03")
        result = launch.end_of(process)
    os.close(ours)
    assert result.returncode == 130
    assert re.fullmatch(r"instep: interrupted(| at \S+); ranks .* were stopped\n", result.stderr)


GRANDCHILDREN = """
for options in ({}, {"start_new_session": True}, {"env": {}}, {"process_group": 0}):
    tell(subprocess.Popen(["/bin/sleep", "1000"], **options).pid)
tell(os.getpid())
signal.signal(signal.SIGTERM, signal.SIG_IGN)
forever()
"""


def test_nothing_outlives_a_supervisor_that_was_killed(launch: Launch) -> None:
    with launch.start("-n", 2, launch.script(GRANDCHILDREN)) as process:
        pids = [launch.event()[0] for _ in range(10)]
        family = [psutil.Process(pid) for pid in pids]
        process.kill()
    launch.wait_until_gone(family)


def test_nothing_outlives_a_supervisor_that_was_killed_while_it_started_ranks(
    launch: Launch,
) -> None:
    with launch.start("-n", 12, launch.script("tell(rank)\nforever()")) as process:
        launch.event()
        process.kill()
    launch.wait_until_gone([])
    while not launch.no_event():
        launch.event()


def test_a_job_inside_a_rank_goes_with_it(launch: Launch) -> None:
    inner = launch.script("tell(os.getpid())\nforever()", "inner.py")
    outer = launch.script(f"""
        command = ["-m", "instep", "run", "--plain", "-n", "2", {inner!r}]
        os.execv(sys.executable, [sys.executable, *command])
    """)
    with launch.start("-n", 1, outer) as process:
        family = [psutil.Process(launch.event()[0]) for _ in range(2)]
        process.kill()
    launch.wait_until_gone(family)
    for left in launch.temporary.iterdir():  # the inner job's guard was killed with it
        shutil.rmtree(left)


@pytest.mark.parametrize("hang_up", [socket.socket.close, lambda ours: ours.shutdown(1)])
def test_a_rank_that_nobody_watches_over_does_not_begin(
    launch: Launch, hang_up: Callable[[socket.socket], None]
) -> None:
    ours, theirs = socket.socketpair()
    hang_up(ours)
    worker = [sys.executable, "-m", "instep.launch.worker.entry"]
    worker += [str(theirs.fileno()), "lines", "plain"]
    failure_file = str(launch.folder / "failure")
    environ = launch.environ | {"RANK": "0", "WORLD_SIZE": "1", "INSTEP_FAILURE_FILE": failure_file}
    with theirs:
        script = launch.script("tell('ran')")
        result = subprocess.run(
            [*worker, script],
            pass_fds=[theirs.fileno()],
            env=environ,
            stderr=subprocess.PIPE,
            check=False,
        )
    ours.close()
    assert (result.returncode, result.stderr) == (1, b"")
    assert launch.no_event()


def test_a_process_that_has_the_id_of_an_ended_rank_is_not_killed() -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        end_ranks([stranger.pid], "a job of another name")
        alive = stranger.poll() is None
        stranger.kill()
    assert alive


def test_a_job_goes_on_without_its_reaper(launch: Launch) -> None:
    script = launch.script("tell(rank)\nmeeting.wait_for(1)")
    with launch.start("-n", 2, script) as process:
        launch.events(2)
        (reaper,) = [
            p for p in launch.processes() if any("launch.ranks.reaper" in w for w in p.cmdline())
        ]
        reaper.kill()
        launch.call(2)
        assert launch.end_of(process).returncode == 0


PEERLESS = """
import os, sys, torch, instep
def end(how):
    if how == "exit":
        sys.exit(0)
    if how == "_exit":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), 9)
    if how == "end":
        return
    try:
        raise ValueError("boo")
    finally:
        instep.broadcast(torch.ones(3), 0)
instep.barrier()
if instep.rank == 1:
    end(sys.argv[1])
if instep.rank == 0 or sys.argv[1] != "end":
    instep.all_reduce(torch.ones(2))
"""
EARLY = (
    "instep: rank 1 of 2 ended with exit code 0 while rank 0 waited for it; rank 0 was stopped\n"
)


SLOW_TO_REPORT = """
import os, select, time, torch, instep
class Boo(Exception):
    def __str__(self):
        select.select([rank_0], [], [])
        time.sleep(0.5)  # on a busy host
        return "boo"
rank_0 = os.pidfd_open(int(instep.broadcast(torch.tensor(os.getpid()), 0)))
if instep.rank == 0:
    instep.all_reduce(torch.ones(2))
try:
    raise Boo
finally:
    instep.broadcast(torch.ones(3), 0)
"""


PATIENT = """
import sys
from instep import cli
from instep.launch import supervisor
supervisor.CAUSE_SECONDS = 60  # a busy host takes its time
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_rank_that_reports_the_cause_after_one_that_saw_only_its_effect_is_named(
    launch: Launch,
) -> None:
    path = launch.folder / "train.py"
    path.write_text(SLOW_TO_REPORT)
    result = subprocess.run(
        [sys.executable, "-c", PATIENT, "run", "--plain", "-n", "2", path],
        env=launch.environ,
        capture_output=True,
        text=True,
    )
    assert "instep: rank 1 of 2 failed (exit code 1); rank 0 was stopped\nTrace" in result.stderr
    assert "Boo: boo\nAfter that: DisagreementError: " in result.stderr


FORKS = """
import os, sys, torch, instep
data = torch.utils.data.TensorDataset(torch.ones(4, 1))
loader = instep.shard(torch.utils.data.DataLoader(data, 2))
ends = ("exit", "raise", "end") if instep.rank == 1 else ()
for batch in loader:
    pass
for end in ends:
    child = os.fork()
    if child == 0:
        if end == "raise":
            raise ValueError("of a child")
        if end == "exit":
            sys.exit(0)
        break
    tell(end, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    for batch in loader:
        pass
    tell("end of", instep.rank, float(instep.all_reduce(torch.ones(()))))
"""


@pytest.mark.parametrize("backend", [{}, {"INSTEP_BACKEND": "gloo"}])
def test_a_process_that_a_rank_forks_ends_as_any_process_and_not_as_that_rank(
    launch: Launch, backend: dict[str, str]
) -> None:
    result = launch.run_forked("-n", 2, launch.script(FORKS), environ=backend)
    assert result.returncode == 0, result.stderr
    ends = [["end", 0], ["end of", 0, 2.0], ["end of", 1, 2.0], ["exit", 0], ["raise", 1]]
    assert launch.events(5) == ends
    assert "failed" not in result.stderr
    assert "INS719" not in result.stderr
    assert result.stderr.count("ValueError: of a child") == 1


CHILD_ENDS = """
import signal, subprocess
def handle(number, frame):
    raise RuntimeError("a child has ended")
signal.signal(signal.SIGCHLD, handle)
class Boo(Exception):
    def __str__(self):
        subprocess.run(["true"])
        return "boo"
raise Boo
"""


def test_a_child_that_ends_while_a_failure_is_reported_does_not_disturb_the_report(
    launch: Launch,
) -> None:
    result = launch.run("-n", 1, launch.script(CHILD_ENDS))
    assert result.returncode == 1
    assert result.stderr.endswith("Boo: boo\n")


def test_a_report_of_a_fatal_signal_without_a_line_is_followed_by_the_last_position() -> None:
    """A thread of C++ aborts, such as Gloo's."""
    aborted, seen = "Fatal Python error: Aborted\n\n", "12.0 train.py:3\0\0"
    assert format_last_words(aborted, seen, 12.5) == (
        "Fatal Python error: Aborted\nIt was last seen at train.py:3, 0.5 s before its end.\n"
    )
    with_line = f'{aborted}Current thread 0x1:\n  File "train.py", line 3 in train\n'
    assert format_last_words(with_line, seen, 12.5) == with_line
    assert format_last_words("", seen, 12.5).startswith("It was last seen at train.py:3")


def test_a_clock_that_is_set_meanwhile_moves_no_last_position(tmp_path, monkeypatch) -> None:
    position = LastPosition(tmp_path / "rank0")
    ours, theirs = socket.socketpair()
    with theirs, open(position.line_file, "w+b") as file:
        write_position(file.fileno(), "train.py:3")
        monkeypatch.setattr(time, "time", lambda now=time.time: now() + 3600)
        killed = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
        spec = RankSpec(0, [], {FAILURE_FILE: str(tmp_path / "rank0")}, (None, None), None, False)
        rank = RankProcess(spec, killed, ours)
        end = rank.record_end(None)
        rank.reap()
    seen = position.describe(end.code, end.monotonic)
    assert re.fullmatch(r"It was last seen at train.py:3, \d{1,3}\.\d s before its end.\n", seen)


@pytest.mark.parametrize(
    ("end", "by_itself"), [("exit 0", False), ("exit 3", True), ("kill -9 $$", True)]
)
def test_a_rank_fails_by_itself_by_any_code_and_signal(tmp_path, end, by_itself) -> None:
    assert failed_by_itself(tmp_path, end) == by_itself


def test_a_rank_that_gloo_aborts_may_not_be_the_first_to_fail(tmp_path) -> None:
    """It aborts a rank that receives more than it expects, from one that is out of step."""
    assert not failed_by_itself(tmp_path, "ulimit -c 0; kill -ABRT $$")


def failed_by_itself(folder: Path, end: str) -> bool:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(["/bin/sh", "-c", end])
        spec = RankSpec(0, [], {FAILURE_FILE: str(folder / "rank0")}, (None, None), None, False)
        rank = RankProcess(spec, process, ours)
        rank.record_end(None)
        found = rank.failed_by_itself()
        rank.reap()
    return found


def test_the_rank_is_named_that_left_where_an_error_says_only_that_a_peer_has_gone(
    launch: Launch,
) -> None:
    path = launch.folder / "train.py"
    path.write_text(PEERLESS)
    launch.environ["INSTEP_BACKEND"] = "gloo"
    result = launch.run_forked("-n", 2, path, "end")
    assert EARLY in result.stderr
    assert f"It left at the end of the script, after barrier at {path}:16." in (result.stderr)


@pytest.mark.parametrize(
    "call", ["recv(1)", pytest.param("send(big, 1)", marks=pytest.mark.nightly)]
)
def test_a_message_of_a_rank_that_has_left_is_an_error_that_names_it(
    launch: Launch, call: str
) -> None:
    path = launch.folder / "train.py"
    path.write_text(
        "import torch, instep\n"
        "instep.barrier()\n"
        "big = torch.ones(10**6)\n"
        "while instep.rank == 0:\n"
        f"    instep.{call}\n"
    )
    result = launch.run_forked("-n", 2, path)
    assert EARLY in result.stderr
    assert f"    instep.{call}\n" in result.stderr
    op = call.partition("(")[0]
    assert result.stderr.rstrip().endswith(
        "PeerLeftError: rank 1 has ended, or destroyed its process group; this rank was waiting "
        f"for it in {op}. Every rank must call the same collectives."
    )


@pytest.mark.parametrize(
    ("how", "head", "line"),
    [
        ("exit", EARLY + "It left at {}:5.\nTraceback", "all_reduce(torch.ones(2))"),
        pytest.param(
            "_exit",
            EARLY + "It was last seen at {}:",
            "all_reduce(torch.ones(2))",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "kill",
            "instep: rank 1 of 2 was killed by SIGKILL; rank 0 was stopped\nIt was last ",
            "SIGKILL nearly always means that the host's memory was full.\n",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "finally",
            "instep: rank 1 of 2 failed (exit code 1); rank 0 was stopped\nTrace",
            "boo",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_rank_is_named_that_others_wait_for(
    launch: Launch, how: str, head: str, line: str
) -> None:
    path = launch.folder / "train.py"
    path.write_text(PEERLESS)
    result = launch.run_forked("-n", 2, path, how)
    assert head.format(path) in result.stderr
    assert line in result.stderr
    assert "ValueError: boo\nAfter that: DisagreementError: " in result.stderr or how != "finally"
    assert "PeerLeftError: rank 1 (pid " in result.stderr or how != "exit"
    assert (
        ") has ended, or destroyed its process group; this rank was waiting" in result.stderr
        or how != "exit"
    )
    assert result.stderr.count("/src/instep/") == 0
    assert result.returncode == (137 if how == "kill" else 1)


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        pytest.param("os.abort()", "SIGABRT", marks=pytest.mark.nightly),
        ("raise KeyboardInterrupt", "SIGINT"),
    ],
)
def test_a_death_by_a_signal_names_the_line(launch: Launch, ending: str, said: str) -> None:
    script = launch.script(f"if rank == 0: forever()\n{ending}")
    last = len(Path(script).read_text().splitlines())
    stderr = launch.run("-n", 2, script).stderr
    assert f"rank 1 of 2 was killed by {said}" in stderr
    assert f'File "{script}", line {last} in <module>' in stderr.replace(", in", " in")
    assert stderr.count('  File "') == 1


def test_an_exception_that_cannot_say_what_it_is(launch: Launch) -> None:
    script = launch.script("""
        class Mute(Exception):
            def __str__(self):
                raise RuntimeError
        if rank == 0:
            forever()
        raise Mute
    """)
    stderr = launch.run("-n", 2, script).stderr
    assert stderr.startswith("instep: rank 1 of 2 failed (exit code 1); rank 0 was stopped\n")
    assert stderr.endswith("raise Mute\nMute: <exception str() failed>\n")


def test_who_only_says_that_another_failed_is_not_the_first() -> None:
    complaint = Failure(0, 10.0, 1, raised=True, is_consequence=True, awaited_rank=1)
    cause = Failure(1, 10.5, 1, raised=True)
    ends = [RankExit(0, 10.2, 1, stopped=False), RankExit(1, 11.0, 1, stopped=False)]
    assert first_failure(ends, [complaint, cause]) is cause


def test_of_two_that_disagree_the_one_with_a_text_is_reported() -> None:
    """Rank 1 of an unedited script leaves the report of what all ranks raise to rank 0."""
    text = Failure(0, 10.1, 1, raised=True, text="DisagreementError", is_consequence=True)
    silent = Failure(1, 10.0, 1, is_consequence=True)
    ends = [RankExit(0, 10.2, 1, stopped=True), RankExit(1, 10.1, 1, stopped=False)]
    assert first_failure(ends, [silent, text]) is text
    cause = Failure(1, 10.2, 3)
    assert first_failure(ends, [text, cause]) is cause


def test_a_death_that_is_seen_late_is_still_the_first() -> None:
    complaint = Failure(0, 10.0, 1, raised=True, is_consequence=True, awaited_rank=1)
    ends = [
        RankExit(0, 10.2, 1, stopped=False),
        RankExit(1, 10.3, -9, stopped=True, details="There.\n"),
    ]
    first = first_failure(ends, [complaint])
    assert first is not None
    assert (first.rank, first.exit_code, first.text) == (1, 137, "There.\n")


def test_who_left_while_another_waited_is_the_first() -> None:
    complaint = Failure(0, 10.0, 1, raised=True, text="gone\n", is_consequence=True, awaited_rank=1)
    ends = [
        RankExit(0, 10.2, 1, stopped=False),
        RankExit(1, 9.0, 0, stopped=False, details="There.\n"),
    ]
    first = first_failure(ends, [complaint])
    assert first is not None
    early = "instep: rank 1 of 2 ended with exit code 0 while rank 0 waited for it"
    assert format_report(first, ends, 2) == f"{early}; rank 0 was stopped\nThere.\ngone\n"
    assert first.exit_code == 1


def test_the_earliest_failure_is_the_first() -> None:
    late, early = Failure(0, 20.0, 1, raised=True), Failure(1, 10.0, 1, raised=True)
    ends = [RankExit(0, 21.0, 1, stopped=False), RankExit(1, 21.5, 1, stopped=False)]
    assert first_failure(ends, [late, early]) is early


def test_a_silent_death_is_older_than_it_looks() -> None:
    complaint = Failure(0, 10.0, 1, raised=True)
    death = RankExit(1, 10.0 + DETECTION_DELAY / 2, -9, stopped=False)
    first = first_failure([death], [complaint])
    assert first is not None
    assert (first.rank, first.exit_code) == (1, 137)


def test_a_job_that_ends_its_ranks_by_sigterm_has_killed_none(launch: Launch) -> None:
    script = launch.script("""
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        if rank == 0:
            while not os.path.exists("rank1_is_ready"):
                pass
            raise ConnectionError("connection closed by peer")
        open("rank1_is_ready", "w").close()
        forever()
    """)
    result = launch.run("-n", 2, script)
    assert result.returncode == 128 + signal.SIGKILL
    assert result.stderr.startswith(
        "instep: rank 1 of 2 was killed by SIGKILL; rank 0 was stopped\n"
    )


def test_who_was_stopped_is_not_to_blame() -> None:
    complaint = Failure(0, 10.0, 1, raised=True)
    assert first_failure([RankExit(1, 10.0, -15, stopped=True)], [complaint]) is complaint


def test_nobody_failed_where_everybody_ended_with_0() -> None:
    assert (
        first_failure([RankExit(0, 1.0, 0, stopped=False), RankExit(1, 2.0, 0, stopped=True)], [])
        is None
    )


def test_an_interrupted_job_names_the_scripts_line() -> None:
    within = (f"{PACKAGE_FOLDER}x.py", "/lib/site-packages/torch/optim/optimizer.py", os.__file__)
    ends = [RankExit(rank, 1.0, -2, stopped=True) for rank in range(2)]
    for file in within:
        text = f'  File "/a/train.py", line 7, in f\n  File "{file}", line 2, in g\n'
        assert format_interrupt(signal.SIGINT, Failure(0, 1.0, -2, text=text), ends) == (
            "instep: interrupted at /a/train.py:7; ranks 0, 1 were stopped\n"
        )
    text = f'  File "{within[1]}", line 2, in g\n'
    report = format_interrupt(signal.SIGINT, Failure(0, 1.0, -2, text=text), ends)
    assert f"interrupted at {within[1]}:2;" in report


def test_a_signal_without_a_name_has_its_number() -> None:
    ends = [RankExit(0, 1.0, -40, stopped=False)]
    first = first_failure(ends, [])
    assert first is not None
    assert format_report(first, ends, 1) == "instep: rank 0 of 1 was killed by signal 40\n"


def test_a_failure_survives_the_disk(tmp_path: Path) -> None:
    failure = Failure(3, 1.5, 1, raised=True, text="Träce\udc80\n")
    failure.write(tmp_path / "rank3")
    assert Failure.read(tmp_path / "rank3") == failure
    assert Failure.read(tmp_path / "rank4") is None
    assert list(tmp_path.iterdir()) == [tmp_path / "rank3"]


def test_a_peer_that_has_closed_its_connection_is_the_culprit_though_it_fails_later(
    launch: Launch,
) -> None:
    """On a group of torch's own, whose error says no more than that the connection is closed."""
    script = launch.script("""
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 0:
            dist.destroy_process_group()
            meeting.wait_for(1)
            raise ValueError("boo")
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            meeting.come()
    """)
    result = launch.run_forked("--plain", "-n", 2, script)
    assert "instep: rank 0 of 2 failed (exit code 1)" in result.stderr
    assert result.stderr.endswith("ValueError: boo\n")
