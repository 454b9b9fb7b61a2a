"""Ranks that wait long in a collective: the report names the others, what they do, and where."""

from __future__ import annotations

import gc
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from instep.distributed.flight_record import record_format
from instep.distributed.flight_record.recorder import FlightRecorder
from instep.distributed.watchdog.call_stack import main_thread_line, thread_frames
from instep.distributed.watchdog.connection import Connection
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.job_state import JobState
from instep.distributed.watchdog.stalls import job_socket, stall_coordinator
from instep.distributed.watchdog.stalls.probe import ProbeTarget, RankProbe, awaited_entry
from instep.distributed.watchdog.stalls.python_stacks import STACK_SIGNAL
from instep.distributed.watchdog.stalls.rank_watch import RankWatch, waiting_share
from instep.distributed.watchdog.stalls.report import (
    format_progress,
    format_seconds,
    format_stacks,
    format_states,
)
from instep.distributed.watchdog.stalls.stack_dumps import (
    StackDumps,
    is_idle_worker,
    script_position,
)
from instep.distributed.watchdog.stalls.stall_coordinator import StallCoordinator
from instep.launch.ranks.rank_process import ENTRY_MODULE
from instep.process import is_installed, is_stdlib
from instep.process.failures.last_position import write_position
from launching import Launch

SCRIPT = """
    import ctypes, pdb
    import torch, instep
    instep.init()
    one = torch.ones(4)
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 1
        def __getitem__(self, i):
            os.read(meeting.fd, 1)  # worker
            return i
    lock = threading.Lock()
    lock.acquire()
    def release():
        meeting.wait_for(1)
        lock.release()
    stopped = True
    def resume(number, frame):
        global stopped
        stopped = False
    signal.signal(signal.SIGCONT, resume)

    instep.all_reduce(one)
    if rank == 2:
        os.read(meeting.fd, 1)  # read
    instep.all_reduce(one)  # wait for read
    meeting.wait_for(1)
    instep.barrier()
    if rank == 2:
        threading.Thread(target=release).start()
        lock.acquire()  # lock
    instep.all_reduce(one)  # wait for lock
    if rank == 2:
        while not select.select([meeting.fd], [], [], 0)[0]: pass  # loop
        meeting.wait_for(1)
    instep.all_reduce(one)  # wait for loop
    if rank == 2:
        ctypes.PyDLL(None).read(meeting.fd, ctypes.create_string_buffer(1), 1)  # C
    instep.all_reduce(one)  # wait for C
    if rank == 2:
        next(iter(torch.utils.data.DataLoader(Data(), None, num_workers=1)))  # loader
    instep.all_reduce(one)  # wait for loader
    if rank == 2:
        with open(meeting.fd, closefd=False) as commands:
            debugger = pdb.Pdb(stdin=commands, stdout=sys.stderr, nosigint=True)
            debugger.set_trace()
            pass  # breakpoint
    instep.all_reduce(one)  # wait for breakpoint
    if rank == 2:
        tell(os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)  # stop
    instep.all_reduce(one)  # wait for stop
"""
FAULTS = {
    "read": "is in user code at HERE, waiting for a file, a socket or another process",
    "lock": "is in user code at HERE, waiting for a lock",
    "loop": "is in user code at HERE, running",
    "C": r"sleeps in C code that holds the interpreter's lock \(GIL\), called at HERE",
    "loader": "is in user code at HERE, loading data: its loader worker "
    r"\(process \d+\) is at WORKER, asleep",
    "breakpoint": "is at a breakpoint at HERE",
    "stop": r"is stopped \(SIGSTOP, or Ctrl-Z\) and was last seen at train.py:\d+",
}
"""What the report says of rank 2, by the comment at its line."""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.close()


def line_of(script: str, comment: str) -> str:
    lines = Path(script).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"  # {comment}")]
    return f"train.py:{number}"


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The first line of the job's stderr that has this pattern."""
    assert process.stderr is not None
    for line in process.stderr:
        print(line, end="")
        if found := re.search(pattern, line):
            return found
    raise AssertionError(pattern)


def refusal(*words: object) -> str:
    command = [sys.executable, "-m", "instep", "where", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    return done.stderr


def test_a_process_without_ranks_is_named() -> None:
    said = f"process {os.getpid()} is no job of yours on this host, or its ranks are still starting"
    assert said in refusal(os.getpid())


def test_of_several_jobs_one_is_to_be_named_by_its_program_and_folder(tmp_path: Path) -> None:
    entry = ("-m", ENTRY_MODULE, "3", "lines", "unedited", "train.py", "--name", "an instep")
    programs = {
        entry: "train.py --name 'an instep'",
        ("two.py", "instep"): "-c 'input()' two.py instep",
    }
    loop = EventLoop()
    with ExitStack() as at_end:
        said = []
        for words, program in programs.items():
            command = [sys.executable, "-c", "input()", *words]
            rank = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE)
            at_end.callback(rank.communicate, b"\n")
            job = job_socket.JobSocket(loop, rank.pid, lambda question, reply: reply(""))
            at_end.callback(job.close)
            said.append(f"\n  instep where {rank.pid}  # {program} in {tmp_path}\n")
        refused = refusal()
    assert all(line in refused for line in said), refused


def where(*words: object) -> str:
    command = [sys.executable, "-m", "instep", "where", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_questions(process: subprocess.Popen[str], predicate: str, waited_for: str) -> None:
    """The job answers `instep where` and signals, and goes on."""
    text = (
        rf"ranks 0, 1 wait in all_reduce SUM float32 \[4\] at {waited_for} .*; rank 2 {predicate}"
    )
    assert re.match(text, where(process.pid))
    stacks = where("--stacks", process.pid)
    assert re.match(text, stacks)
    assert "---- rank 2: " in stacks
    assert "---- rank 0: " in stacks or "---- ranks 0, 1: " in stacks
    assert "in release" in stacks
    status = where("--status", process.pid)
    assert re.match(r"  rank 0: epoch 0, step 0, .* MiB", status)
    assert len(status.splitlines()) == 3
    process.send_signal(signal.SIGQUIT)
    read_until(process, f"instep: {text}")
    process.send_signal(signal.SIGUSR1)
    read_until(process, r"^  rank 2: epoch 0, step 0, .* MiB")


HANGS = """
    import atexit, torch, instep
    model = instep.replicate(torch.nn.Linear(1, 1))
    for x in instep.shard(torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=2)):
        model(x).sum().backward()
    def hang():
        os.read(meeting.fd, 1)  # hangs
    if rank == 1:
        END
"""


@pytest.mark.launch
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("end", "waits"),
    [
        ("threading.Thread(target=hang).start()", r"a lock \(threading.py:\d+, _shutdown\)"),
        pytest.param(
            "atexit.register(hang)", "a file, a socket or another process",
            marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_a_rank_that_hangs_at_its_exit_is_reported_once_others_have_ended(
    launch: Launch, end: str, waits: str
) -> None:
    """And what instep does after that at its exit prints nothing, though rank 0's store is gone."""
    script = launch.script(HANGS.replace("END", end))
    with launch.start("-n", 2, script, environ={"INSTEP_STALL_SECONDS": "1"}) as process:
        what = f"is in user code at {line_of(script, 'hangs')}, waiting for {waits}"
        read_until(process, rf"^\[1\] instep: rank 1 {what}; rank 0 has ended$")
        launch.call()
        result = launch.end_of(process)
    assert result.returncode == 0
    assert "c10d" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("is_alone", [False, True])
def test_a_rank_that_goes_on_alone_may_sleep(is_alone: bool) -> None:
    """Rank 0 of an unedited script, whose other ranks have ended as planned."""
    loop = EventLoop()
    (rank, to_rank), (hub, to_hub) = socket.socketpair(), socket.socketpair()
    record = os.memfd_create("record")
    os.ftruncate(record, record_format.BYTES)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        start = {"rank": 0, "local_rank": 0, "pid": process.pid, "record": record, "seen": record}
        start |= {"stall_seconds": 0.05, "timeout": 60.0, "stack_signal": 0}
        watch = RankWatch(loop, Connection(to_rank), Connection(to_hub), start)
        if is_alone:
            watch.set_single_rank()
        watch.others_ended({1})
        loop.call_later(1.0, loop.stop)
        loop.run()
    assert bool(watch._probes) != is_alone
    for end in (rank, to_rank, hub, to_hub):
        end.close()
    os.close(record)


@pytest.mark.launch
@pytest.mark.timeout(60)
def test_a_report_names_the_rank_that_others_wait_for_and_what_it_does(launch: Launch) -> None:
    script = launch.script(SCRIPT)
    with launch.start("-n", 3, script, environ={"INSTEP_STALL_SECONDS": "1"}) as process:
        for fault, text in FAULTS.items():
            predicate = text.replace("HERE", line_of(script, fault))
            predicate = predicate.replace("WORKER", line_of(script, "worker"))
            waited_for = line_of(script, f"wait for {fault}")
            found = read_until(
                process,
                rf"instep: ranks 0, 1 wait in all_reduce SUM float32 \[4\] at {waited_for} for "
                rf"[\d.]+ s; rank 2 {predicate}",
            )
            assert found
            if fault == "read":
                stacks = read_until(process, "the stacks of rank 2 are in (.*)").group(1)
                assert line_of(script, "read").split(":")[1] in Path(stacks).read_text()
                assert os.stat(stacks).st_mode & 0o777 == 0o600
            if fault == "lock":
                check_questions(process, predicate, waited_for)
            if fault == "stop":
                os.kill(launch.event()[0], signal.SIGCONT)
            elif fault == "breakpoint":
                os.write(launch._meeting, b"c\n")
            else:
                launch.call()
            if fault == "read":
                read_until(process, r"instep: the ranks go on, after [\d.]+ s")
                launch.call(3)
        done = launch.end_of(process)
    os.unlink(stacks)
    assert done.returncode == 0


SCOPES_AND_MESSAGES = """
    import torch, instep
    instep.barrier()
    with instep.single_process_scope(2) as here:  # scope
        if here:
            with instep.single_process_scope() as nested:
                if nested:
                    os.read(meeting.fd, 1)  # nested
    if rank == 0:
        instep.recv(1)  # recv
    if rank == 1:
        os.read(meeting.fd, 1)  # late
        instep.send(torch.ones(2), 0)
    instep.barrier()  # barrier
"""


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.timeout(60)
def test_ranks_that_wait_for_a_run_once_scope_or_a_message_are_reported_too(
    launch: Launch,
) -> None:
    script = launch.script(SCOPES_AND_MESSAGES)
    scope, nested, recv, late, barrier = (
        line_of(script, comment) for comment in ("scope", "nested", "recv", "late", "barrier")
    )
    with launch.start("-n", 3, script, environ={"INSTEP_STALL_SECONDS": "1"}) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "rank 2 is in user code" in line:
                break
        assert re.search(
            rf"ranks 0, 1 wait in single_process_scope of rank 2 at {scope} for [\d.]+ s; rank 2 "
            rf"is in user code at {nested}, in a single_process_scope, waiting for a file",
            lines[-1],
        )
        assert "timed out" not in "".join(lines), "torch warns of each wait that times out"
        launch.call()
        waits = rf"rank 0 waits in recv int64 \[1\] from rank 1 at {recv} for [\d.]+ s; "
        others = rf"rank 2 waits in barrier at {barrier} for [\d.]+ s; rank 1 is in user code at "
        read_until(process, waits + others + f"{late}, waiting for a file")
        launch.call()
        assert launch.end_of(process).returncode == 0
    for stacks in launch.temporary.glob("instep-stacks-*"):
        stacks.unlink()


def test_the_line_is_not_one_of_code_that_a_library_generates() -> None:
    found: list[str] = []
    program = compile("found.append(line())", "<string>", "exec")
    exec(program, {"found": found, "line": main_thread_line})
    assert found == [f"{__file__}:{inspect.currentframe().f_lineno - 1}"]


@pytest.mark.slow
def test_a_main_thread_without_frames_is_at_the_end_of_python(tmp_path: Path) -> None:
    """At exit a function of C may wait: no line of Python has called it."""
    script = tmp_path / "ending.py"
    script.write_text(
        "import atexit, os, threading\n"
        "from instep.distributed.watchdog.call_stack import *\n"
        "from instep.distributed.watchdog.call_stack import format_main_thread_stack\n"
        "from instep.distributed.watchdog.stalls.python_stacks import *\n"
        "def look():\n"
        "    while main_thread_frames():\n"
        "        os.sched_yield()\n"
        "    found = main_thread_line(), main_thread_fields()['innermost']\n"
        "    print(*found, main_thread_wait(), [format_main_thread_stack()], flush=True)\n"
        "    os.write(write, b'x')\n"
        "read, write = os.pipe()\n"
        "atexit.register(os.read, read, 1)\n"
        "threading.Thread(target=look, daemon=True).start()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("Python's end Python's end None ['']\n", "")


def test_like_states_are_merged_and_those_that_wait_come_first() -> None:
    states = {
        0: {"what": "waits in barrier at a.py:3", "waited": 30.4, "stacks": ""},
        1: {"what": "is in user code at a.py:9", "stacks": "Thread\n"},
        2: {"what": "waits in barrier at a.py:3", "waited": 31.2, "stacks": ""},
        3: {"what": "waits in barrier at a.py:3", "waited": 0.2, "stacks": ""},
        4: {"what": "is in user code at a.py:9", "stacks": "Thread\n"},
    }
    assert format_states(states) == (
        "ranks 0, 2, 3 wait in barrier at a.py:3 for 31 s; ranks 1, 4 are in user code at a.py:9"
    )
    assert format_stacks(states) == "---- ranks 1, 4: is in user code at a.py:9\nThread\n"
    states |= {r: {"what": "is stopped", "stacks": ""} for r in (5, 6, 7)}
    assert format_states(states).endswith("; ranks 5-7 are stopped")


@pytest.mark.parametrize(("seconds", "text"), [(0.44, "0.4 s"), (31.2, "31 s"), (125, "2 min 5 s")])
def test_seconds_as_text(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_the_rank_that_waits_least_is_the_slowest() -> None:
    common = {"epoch": 1, "step": 7, "memory": 5 << 20, "rate": 2.5, "rate_unit": "steps"}
    states = {0: common | {"waiting_share": 0.6}, 1: common | {"waiting_share": 0.1}}
    assert format_progress(states).splitlines() == [
        "  rank 0: epoch 1, step 7, 2.5 steps/s, 60% of its time in collectives, 5 MiB",
        "  rank 1: epoch 1, step 7, 2.5 steps/s, 10% of its time in collectives, 5 MiB "
        "(the slowest)",
    ]


class FewRanks(JobState):
    """A job of two ranks, whose watchers are connected."""

    def __init__(self) -> None:
        super().__init__(2)
        self.connections = dict.fromkeys(range(2))
        self.requests: list[int] = []

    def broadcast(self, message_type: str, **fields: Any) -> None:
        self.requests.append(fields["request"])


@pytest.mark.parametrize(
    ("state", "printed_at"),
    [
        ({"what": "is in user code at a.py:9", "is_slow": True}, 3),
        ({"what": "is in user code at a.py:9, asleep", "is_slow": False}, 1),
        ({"what": "waits in barrier at a.py:7", "waited": 5.0, "is_slow": False}, 1),
        ({"what": "waits in barrier at a.py:7", "waited": 0.1, "is_slow": False}, 3),
    ],
)
def test_a_rank_that_is_slow_is_no_alarm_before_four_times_the_threshold(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], printed_at: int
) -> None:
    printed: list[str] = []
    monkeypatch.setattr(stall_coordinator, "_print", printed.append)
    ranks, waits = FewRanks(), {"what": "waits in all_reduce at a.py:3", "waited": 5.0}
    coordinator = StallCoordinator(EventLoop(), ranks, 1)
    for level in (1, 2, 3):
        coordinator.handle(0, "stalled", {"level": level, "waited": 5.0, "line": "a.py:3"})
        for rank, told in ((0, waits), (1, state)):
            reply = told | {"request": ranks.requests[-1], "stacks": ""}
            coordinator.handle(rank, "state", reply)
        assert len(printed) == max(0, level - printed_at + 1)


@pytest.mark.parametrize(("is_slow", "printed_again"), [(True, True), (False, False)])
def test_only_a_wait_that_was_reported_hides_another_one_at_its_line(
    monkeypatch: pytest.MonkeyPatch, is_slow: bool, printed_again: bool
) -> None:
    printed: list[str] = []
    monkeypatch.setattr(stall_coordinator, "_print", printed.append)
    ranks, waits = FewRanks(), {"what": "waits in all_reduce at a.py:3", "waited": 2.0}
    coordinator = StallCoordinator(EventLoop(), ranks, 1)
    counts = []
    for slow in (is_slow, False):
        coordinator.handle(0, "stalled", {"level": 1, "waited": 2.0, "line": "a.py:3"})
        state = {"what": "is in user code at a.py:9", "is_slow": slow}
        for rank, told in ((0, waits), (1, state)):
            reply = told | {"request": ranks.requests[-1], "stacks": ""}
            coordinator.handle(rank, "state", reply)
        coordinator.handle(0, "stall_over", {"waited": 2.5})
        counts.append(len(printed))
    assert counts == [int(not is_slow), int(not is_slow) + printed_again]


def test_a_collective_that_an_exception_left_is_not_waited_in() -> None:
    recorder = FlightRecorder()
    fd = recorder.file_descriptor()
    recorder.enter("all_reduce", (1,), torch.int64, "0:0-2")
    recorder.leave(recorder.enter("barrier", None, None, "0:0-2"))
    assert awaited_entry(record_format.read(fd)) is None
    recorder.enter("broadcast", (1,), torch.int64, "0:0-2", 0)
    recorder.enter("barrier", None, None, "1:0-1")
    entry = awaited_entry(record_format.read(fd))
    assert entry is not None
    assert entry.op == "broadcast"


def test_a_stopped_rank_was_last_seen_in_a_collective_that_it_entered_since(tmp_path) -> None:
    recorder, loop, states = FlightRecorder(), EventLoop(), []
    fd = recorder.file_descriptor()
    recorder.leave(recorder.enter("barrier", None, None, "0:0-2"))
    (entry,) = record_format.read(fd).entries
    with subprocess.Popen([sys.executable], stdin=subprocess.PIPE) as rank:
        rank.send_signal(signal.SIGSTOP)
        os.waitpid(rank.pid, os.WUNTRACED)
        try:
            with (tmp_path / "seen").open("w+b") as seen:
                write_position(seen.fileno(), "the start", seen=0.0)
                target = ProbeTarget(rank.pid, fd, seen.fileno(), lambda: None)
                dumps = StackDumps(loop, None, int(STACK_SIGNAL))
                RankProbe(loop, target, dumps, waits_too=False, waited=0.0, done=states.append)
        finally:
            rank.kill()
    (state,) = states
    assert state["what"].endswith(f" was last seen at {entry.line.removeprefix(f'{os.getcwd()}/')}")


def test_the_share_of_time_in_collectives_counts_overlaps_once() -> None:
    recorder = FlightRecorder()
    fd = recorder.file_descriptor()
    assert waiting_share(record_format.read(fd), 1.0) is None
    recorder.enter("all_reduce", (1,), torch.int64, "0:0-2")
    recorder.enter("all_reduce", (1,), torch.int64, "0:0-2")
    (first, _) = record_format.read(fd).entries
    share = waiting_share(record_format.read(fd), first.entered + 10)
    assert share == pytest.approx(1.0)


DUMP = """\
Thread 0x1 (most recent call first):
  File "/x/other.py", line 3 in wait

Current thread 0x2 (most recent call first):
  File "/x/site-packages/torch/utils/data/_utils/worker.py", line 275 in _worker_loop
  File "/x/train.py", line 12 in main
"""


def test_the_position_in_a_dump_is_that_of_the_thread_with_the_signal() -> None:
    assert script_position(DUMP) == "/x/train.py:12"
    assert script_position("") == ""
    assert is_idle_worker(DUMP)
    assert not is_idle_worker(DUMP.replace("_worker_loop", "fetch"))


def test_a_file_is_the_standard_librarys_or_an_installed_packages_by_its_folders() -> None:
    stdlib = os.path.dirname(os.__file__)
    files = {
        f"{stdlib}/threading.py": (True, False),
        "<frozen importlib._bootstrap>": (True, False),
        f"{stdlib}/site-packages/numpy/core.py": (False, True),
        "/usr/lib/python3/dist-packages/yaml/loader.py": (False, True),
        f"{stdlib}x/train.py": (False, False),
        "/home/site-packages-of-mine/train.py": (False, False),
    }
    assert {file: (is_stdlib(file), is_installed(file)) for file in files} == files


def test_a_process_without_a_handler_gets_no_signal() -> None:
    loop, found = EventLoop(), []
    file = os.memfd_create("stacks")
    handler = "import faulthandler, sys; faulthandler.register(int(sys.argv[1]), int(sys.argv[2]))"
    code = f"import sys\nif sys.argv[2:]: {handler}\nprint(flush=True)\nsys.stdin.read()"
    command = [sys.executable, "-c", code, str(int(STACK_SIGNAL))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen(command, **pipes) as bare,
        subprocess.Popen([*command, str(file)], pass_fds=[file], **pipes) as handles,
    ):
        for process in (bare, handles):
            process.stdout.readline()

        def done(dumps: dict[int, str]) -> None:
            found.append(dumps)
            loop.stop()

        StackDumps(loop, file, int(STACK_SIGNAL)).collect([bare.pid, handles.pid], done)
        loop.run()
        for process in (bare, handles):
            process.communicate()
        assert (bare.returncode, handles.returncode) == (0, 0)
    assert list(found[0]) == [handles.pid]
    assert 'File "<string>", line' in found[0][handles.pid]


@pytest.mark.launch
def test_a_job_answers_at_its_socket_and_is_found_by_process_and_name() -> None:
    loop = EventLoop()
    server = job_socket.JobSocket(
        loop, os.getpid(), lambda question, reply: reply(question["type"] + "!")
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        (address,) = [job for job in job_socket.find_jobs() if job.pid == os.getpid()]
        assert job_socket.request(address, "where") == "where!"
        assert job_socket.is_of_job(address, str(os.getpid()))
        assert job_socket.is_of_job(address, str(os.getppid()))
        assert not job_socket.is_of_job(address, "no such job")
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect("\0" + address.name)
            stranger.sendall(b"[1]\n")
            assert Connection(stranger).recv() is None
        assert job_socket.request(address, "status") == "status!"
    finally:
        loop.call_later(0, loop.stop)
        job_socket.request(address, "wake", timeout=0.1)  # the loop may stop before it answers
        thread.join()
        server.close()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="it collects between instructions only")
def test_no_garbage_is_collected_while_a_threads_frames_are_read():
    """A finalizer could let that thread leave a frame of which an object is being made: a crash."""
    during: list[str] = []

    def record(_phase: str, _info: object) -> None:
        during.extend(frame.name for frame in traceback.extract_stack())

    def read_frames() -> None:
        for _ in range(20):
            frames.append(thread_frames(reader))

    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        else:
            arrived.set()
            read.wait(30)

    frames: list[list[FrameType]] = []
    arrived, read, threshold = threading.Event(), threading.Event(), gc.get_threshold()
    reader = threading.Thread(target=deep, args=(50,))
    reader.start()
    arrived.wait(30)
    gc.callbacks.append(record)
    gc.set_threshold(1)
    try:
        read_frames()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(record)
        read.set()
        reader.join(30)
    assert sum(frame.f_code is deep.__code__ for frame in frames[0]) == 51
    assert "read_frames" in during  # garbage was collected, but not while frames were read
    assert "walk_stack" not in during
    assert gc.isenabled()
