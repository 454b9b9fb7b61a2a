"""A rank fails under each launcher: the whole job ends, and the one to blame is named."""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import components
import failures
from instep.distributed.flight_record.record_format import BYTES
from instep.distributed.watchdog import watcher
from instep.distributed.watchdog.connection import Connection
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.hub.deadlocks import find_deadlock
from instep.distributed.watchdog.hub.first_failure import COLLECT_SECONDS
from instep.distributed.watchdog.hub.hub import Hub
from instep.distributed.watchdog.messages import failure_fields
from instep.process.exit_status import describe_exit, format_failure, rank_ranges, shell_exit_code
from instep.process.procfs import exit_code
from launching import LAUNCHER_VARIABLES, free_port
from slurm import Slurm


@pytest.fixture(scope="module")
def jobs(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[failures.Jobs]:
    slurm = None
    if components.missing("Slurm") is None:
        slurm = request.getfixturevalue("cluster")
    return failures.Jobs(tmp_path_factory.mktemp("failures"), slurm)


def cell(jobs: failures.Jobs, launcher: str, busy: str, fails: str) -> failures.Cell:
    (found,) = [known for known in jobs.launchers() if known.name == launcher]
    return jobs.fail(found, fails, busy)


@pytest.mark.launch
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "expected",
    [
        pytest.param(
            {
                ("instep run", "held", "exit 0"): 1,
                ("two bare processes", "gil", "raise"): 137,
                ("two bare processes", "meeting", "kill"): 137,
            },
            id="ours",
        ),
        pytest.param(
            {
                ("two bare processes", "loading", "kill"): 137,
                ("two bare processes", "collective", "raise"): 1,
            },
            id="ours at night",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {
                ("Open MPI", "held", "exit 0"): 1,
                ("MPICH", "meeting", "exit 0"): 1,
            },
            id="mpirun",
            marks=[components.needs("Open MPI", "MPICH"), pytest.mark.nightly],
        ),
        pytest.param(
            {
                ("srun, one node", "meeting", "raise"): 1,
                ("srun", "held", "kill"): 137,
                ("srun", "loading", "raise"): 1,
            },
            id="srun",
            marks=[components.needs("Slurm"), pytest.mark.nightly],
        ),
        pytest.param(
            {
                ("torchrun", "held", "exit 0"): 1,
                ("two bare processes", "held", "exit 3"): 3,
                ("MPICH", "loading", "raise"): 1,
            },
            id="others",
            marks=[components.needs("MPICH"), pytest.mark.nightly],
        ),
    ],
)
def test_the_jobs_are_down_and_their_culprits_named(
    jobs: failures.Jobs, expected: dict[tuple[str, str, str], int]
) -> None:
    """Jobs of one kind of launcher, at once: most of their time they wait."""
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda asked: cell(jobs, *asked), expected))
    for seen, code in zip(found, expected.values(), strict=True):
        where = f"{seen.launcher}, {seen.busy}, {seen.fails}: {seen}\n{seen.output}"
        assert (seen.seconds is not None, seen.culprit, seen.code) == (True, True, code), where


SPAWNS = """
import atexit, os, sys, time
import torch, torch.multiprocessing as mp

def main(rank, folder):
    atexit.register(time.sleep, 0.5)  # it has left its peers long before its parent sees that
    import instep
    instep.init(f"file://{folder}/meet", rank=rank, world_size=2)
    if rank == 1:
        raise ValueError("boo")
    instep.all_reduce(torch.ones(2))

if __name__ == "__main__":
    mp.start_processes(main, (sys.argv[1],), nprocs=2, start_method=sys.argv[2])
"""


EFFECT_FIRST = """
import os, sys
import torch, torch.multiprocessing as mp

def main(rank, folder):
    import instep
    from instep.distributed.watchdog import client
    instep.init(f"file://{folder}/meet", rank=rank, world_size=2)
    instep.barrier()
    if rank == 1:
        torch.distributed.destroy_process_group()
        with open(f"{folder}/told") as told:
            told.read()
        raise ValueError("boo")
    told = open(f"{folder}/told", "w")
    watcher = client._active.value
    send = watcher.send

    def send_and_tell(kind, **fields):
        send(kind, **fields)
        if kind == "failed":
            told.close()

    watcher.send = send_and_tell
    instep.all_reduce(torch.ones(2))

if __name__ == "__main__":
    os.mkfifo(f"{sys.argv[1]}/told")
    mp.start_processes(main, (sys.argv[1],), nprocs=2, start_method="fork")  # torch is there
"""


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_a_spawned_rank_that_waited_in_vain_and_reports_it_first_is_not_the_one_that_is_shown(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(EFFECT_FIRST)
    ran = subprocess.run(
        [sys.executable, "train.py", str(tmp_path)],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "instep: rank 1 of 2 failed (exit code 1); rank 0 was stopped\n" in ran.stderr
    assert ran.stderr.rstrip().endswith("\nValueError: boo")
    assert "PeerLeftError" not in ran.stderr


@pytest.mark.launch
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_the_parent_of_spawned_ranks_sees_the_one_that_failed_first(
    tmp_path: Path, method: str
) -> None:
    (tmp_path / "train.py").write_text(SPAWNS)
    ran = subprocess.run(
        [sys.executable, "train.py", str(tmp_path), method],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "instep: rank 1 of 2 failed (exit code 1); rank 0 was stopped\n" in ran.stderr
    assert ran.stderr.rstrip().endswith("\nValueError: boo")
    assert "PeerLeftError" not in ran.stderr


UNEDITED = """
import torch
model = torch.nn.Linear(4, 4)
model(torch.ones(8, 4))
rank = open("/proc/self/environ").read().split("\\0RANK=")[1].split("\\0")[0]
if rank in "{failing}":
    {end}
model(torch.ones(8, 4))
"""


@pytest.mark.launch
@pytest.mark.parametrize(
    ("end", "failing", "what", "last"),
    [
        pytest.param(
            "raise ValueError('boo')",
            "1",
            "1 of 2 failed (exit code 1); rank 0 was stopped",
            "ValueError: boo\n",
            marks=pytest.mark.nightly,
        ),
        (
            "raise SystemExit(3)",
            "01",
            "0 of 2 exited with code 3; so did rank 1",
            " s before its end.\n",
        ),
        pytest.param(
            "raise SystemExit(3)",
            "1",
            "1 of 2 exited with code 3; rank 0 was stopped",
            " s before its end.\n",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_an_unedited_rank_that_fails_under_another_launcher_is_named(
    tmp_path: Path, end: str, failing: str, what: str, last: str
) -> None:
    (tmp_path / "train.py").write_text(UNEDITED.format(end=end, failing=failing))
    port = str(free_port())
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "instep", "train.py"], cwd=tmp_path, text=True,
            stderr=subprocess.PIPE, env=os.environ | place | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = "".join([rank.communicate(timeout=50)[1] for rank in ranks])
    assert said.startswith(f"instep: rank {what}\n")
    assert said.endswith(last)
    assert (said.count("Traceback"), said.count("/src/instep/")) == (end.count("boo"), 0)


def test_all_watchers_look_closely_when_a_rank_waits_at_the_end_of_its_script() -> None:
    loop = EventLoop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub = Hub(loop, 2, listener, "token")
        watchers, ends = [], []
        for rank in range(2):
            ours, theirs = socket.socketpair()
            ends.append(theirs)
            ours.settimeout(20)
            hub.new_connections.add(theirs)
            watchers.append(Connection(ours))
            watchers[-1].send("hello", rank=rank, host="a", token="token")
        running = threading.Thread(target=loop.run)
        running.start()
        watchers[1].send("at_exit")
        assert [watcher.recv() for watcher in watchers] == [[{"type": "check_often"}]] * 2
        for watcher in watchers:
            watcher.send("ended", code=0)
        running.join(20)
        assert not running.is_alive()
        for end in (*watchers, *map(Connection, ends)):
            end.close()


class Timers(EventLoop):
    """An event loop whose timers the test runs itself."""

    def __init__(self) -> None:
        super().__init__()
        self.due: list[Callable[[], None]] = []

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Only if it is about the choice of the first failure."""
        if seconds == COLLECT_SECONDS:
            self.due.append(callback)


def test_a_rank_that_exits_slowly_is_named_with_its_exit_code() -> None:
    """Its peer sees that it has left a second before its watcher sees its exit code."""
    loop = Timers()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub = Hub(loop, 2, listener, "token")
        watchers = [FakeWatcher(hub, loop, rank) for rank in range(2)]
        watchers[1].tell("finished")
        failure = failure_fields(0, "a", 1, "failed (exit code 1)", silent=False)
        watchers[0].tell("failed", **failure, is_consequence=True, awaited_rank=1)
        for _ in range(20):
            loop.due.pop()()
        watchers[1].tell("failed", **failure_fields(1, "a", 3, silent=True))
        watchers[1].tell("ended", code=3)
        loop.due.pop()()
        headline = "instep: rank 1 of 2 exited with code 3; rank 0 was stopped"
        assert [watcher.headline() for watcher in watchers] == [headline] * 2
        for watcher in watchers:
            watcher.close()


def test_a_rank_that_reports_its_failure_after_the_one_that_waited_for_it_is_named() -> None:
    loop = Timers()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub = Hub(loop, 2, listener, "token")
        watchers = [FakeWatcher(hub, loop, rank) for rank in range(2)]
        failed = [failure_fields(rank, "a", 1, "failed", silent=False) for rank in range(2)]
        watchers[0].tell("failed", **failed[0], is_consequence=True, awaited_rank=1)
        for _ in range(20):
            loop.due.pop()()
        watchers[1].tell("failed", **failed[1], is_consequence=False, awaited_rank=None)
        loop.due.pop()()
        headline = "instep: rank 1 of 2 failed; rank 0 was stopped"
        assert [watcher.headline() for watcher in watchers] == [headline] * 2
        for watcher in watchers:
            watcher.close()


def test_what_a_failing_rank_has_told_of_its_collectives_before_a_failure_is_known_is_kept(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        loop = Timers()
        hub = Hub(loop, 2, listener, "token")
        watchers = [FakeWatcher(hub, loop, rank) for rank in range(2)]
        watchers[1].tell("collectives", steps=[["0", 1, 5, "broadcast at a.py:2"]])
        watchers[1].tell("failed", **failure_fields(1, "a", 1, silent=True))
        watchers[0].tell("collectives", steps=[["0", 1, 6, "barrier at a.py:1"]])
        for watcher in watchers:
            watcher.close()
    assert "barrier at a.py:1 on rank 0; broadcast at a.py:2 on rank 1" in capfd.readouterr().err


def test_a_rank_that_fails_while_another_one_is_named_has_not_finished() -> None:
    """Both leave by SystemExit, as at the same check of the arguments."""
    loop = Timers()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub = Hub(loop, 2, listener, "token")
        watchers = [FakeWatcher(hub, loop, rank) for rank in range(2)]
        for watcher in watchers:
            watcher.tell("finished")  # it is at its exit
        watchers[0].tell("failed", **failure_fields(0, "a", 1, silent=True))
        watchers[0].tell("ended", code=1)
        loop.due.pop()()
        watchers[1].tell("failed", **failure_fields(1, "a", 1, silent=True))
        watchers[1].tell("ended", code=1)
        expected = "instep: rank 0 of 2 exited with code 1; rank 1 was stopped"
        assert [watcher.headline("over") for watcher in watchers] == [expected] * 2
        for watcher in watchers:
            watcher.close()


def test_ranks_that_have_saved_and_ask_for_another_turn_have_not_failed() -> None:
    loop = Timers()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub = Hub(loop, 2, listener, "token")
        watchers = [FakeWatcher(hub, loop, rank) for rank in range(2)]
        for rank in (1, 0):
            watchers[rank].tell("finished")
            watchers[rank].tell("failed", **failure_fields(rank, "a", 75, silent=True))
            watchers[rank].tell("ended", code=75)
            loop.due.pop()()
        assert hub.job.first_failure is None
        for watcher in watchers:
            watcher.close()


LAUNCHES = """
import os, subprocess, sys
common = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job", "MASTER_PORT": sys.argv[1]}
common |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}
for rank in "01":
    command = [sys.executable, "train.py"]
    if rank == "1":
        command = ["sh", "-c", '"$0" "$1"; exit $?', *command]
    subprocess.Popen(command, env=os.environ | common | {"RANK": rank, "LOCAL_RANK": rank})
sys.stdin.read()
"""


def launcher_of(folder: Path, script: str, **variables: str) -> subprocess.Popen[str]:
    """A launcher of two ranks of this script, which waits for its standard input to end."""
    (folder / "train.py").write_text(script)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHES, str(free_port())],
        cwd=folder, env=environ | variables, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


LEFT = """
import instep, threading
instep.init()
instep.barrier()
print("met", flush=True)
threading.Event().wait()  # left here
"""


@pytest.mark.launch
@pytest.mark.timeout(60)
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    """One of them was started by a script of the user's, which goes on."""
    with launcher_of(tmp_path, LEFT) as launcher:
        assert launcher.stdout is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["met\n"] * 2
        launcher.kill()
        _, said = launcher.communicate(timeout=30)  # until all ranks have closed it
    what = r"has lost its launcher \(torchrun\), which has ended before it\."
    assert re.match(rf"instep: rank [01] of 2 {what}\n", said), said
    assert "    threading.Event().wait()  # left here\n" in said
    assert said.count("instep: ") == 1


SLOW_EXIT = """
import atexit, os, select, sys
def wait_for_peer():
    select.select([os.pidfd_open(peer)], [], [], 20)
if os.environ["RANK"] == "0":
    atexit.register(wait_for_peer)  # after all that was registered later, as joined workers are
import instep, torch
peer = instep.all_gather_object(os.getpid())[1]
if instep.rank == 0:
    raise ValueError("the cause")
instep.all_reduce(torch.ones(4))
"""


@pytest.mark.launch
@pytest.mark.timeout(60)
def test_a_rank_without_a_peer_prints_nothing_while_the_peer_is_still_exiting(tmp_path) -> None:
    with launcher_of(tmp_path, SLOW_EXIT) as launcher:
        _, said = launcher.communicate(timeout=50)
    assert said.count("ValueError: the cause") == 1
    assert "PeerLeftError" not in said
    assert said.count("Traceback") == 1


ALONE = """
import os, sys
print("begins", flush=True)
if os.environ["RANK"] == "1":
    sys.exit(sys.stdin.read())
import instep
instep.init()
"""


@pytest.mark.launch
@pytest.mark.timeout(60)
def test_a_rank_that_waits_for_others_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    with launcher_of(tmp_path, ALONE, INSTEP_ARRIVAL_NOTICE="1") as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["begins\n"] * 2
        assert "instep: has waited" in launcher.stderr.readline()
        launcher.kill()
        why = "RendezvousError: the process that started this rank was ended before all ranks had"
        assert any(why in line for line in iter(launcher.stderr.readline, ""))


class FakeWatcher:
    """A watcher's connection to a hub whose loop does not run."""

    def __init__(self, hub: Hub, loop: EventLoop, rank: int) -> None:
        ours, self._hubs = socket.socketpair()
        ours.settimeout(20)
        self._loop, self._connection = loop, Connection(ours)
        hub.new_connections.add(self._hubs)
        self.tell("hello", rank=rank, host="a", token="token")

    def tell(self, message_type: str, **fields: object) -> None:
        """Send a message, and let the hub handle it."""
        self._connection.send(message_type, **fields)
        self._loop._selector.get_key(self._hubs).data()

    def headline(self, message_type: str = "failed") -> str:
        """Of the first failure, which the hub has sent."""
        messages = self._connection.recv() or []
        return "".join(m["headline"] for m in messages if m["type"] == message_type)

    def close(self) -> None:
        """Close both ends."""
        self._connection.close()
        self._hubs.close()


@pytest.mark.parametrize("hub_is_there", [True, False])
def test_a_death_is_reported_though_the_hub_does_not_say_that_the_others_have_ended(
    hub_is_there: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher, "REPORT_SECONDS", 0.1 if hub_is_there else 100.0)
    rank = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(rank.pid)
    (_, ranks), (hub, hubs) = sockets = socket.socketpair(), socket.socketpair()
    start = {
        "rank": 1,
        "size": 2,
        "local_rank": 1,
        "host": "a",
        "token": "",
        "supervised": False,
        "pid": rank.pid,
        "pidfd": pidfd,
        "stall_seconds": 0,
        "timeout": 100,
        "stack_signal": 0,
        **{name: os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("seen", "record")},
    }
    os.ftruncate(start["record"], BYTES)
    loop = EventLoop()
    watcher.Watcher(loop, Connection(ranks), Connection(hubs), start)
    rank.kill()
    report = Connection(hub)
    report.send("failed", **failure_fields(1, "a", -9, silent=True), headline="instep: rank 1")
    if not hub_is_there:
        hub.shutdown(socket.SHUT_WR)
    loop.run()
    assert capfd.readouterr().err == "instep: rank 1\n"
    rank.communicate()
    for end in [each for pair in sockets for each in pair]:
        end.close()
    for number in (pidfd, start["seen"], start["record"]):
        os.close(number)


DIES = """
import os, signal, torch, instep
instep.all_reduce(torch.ones(2))
if instep.rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
instep.all_reduce(torch.ones(2))
"""


@pytest.mark.launch
@components.needs("MPICH")
def test_rank_0_is_named_though_its_launcher_kills_all_others_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DIES)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    ran = subprocess.run(
        ["mpirun.mpich", "-n", "2", sys.executable, "train.py"], cwd=tmp_path,
        env=environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=50,
        check=False,
    )  # fmt: skip
    said = [line for line in ran.stderr.splitlines() if line.startswith("instep: ")]
    assert len(said) == 1, ran.stderr
    # Where a watcher was not yet there when the first rank died, both are named.
    assert re.match(r"instep: rank (0 of 2|1 of 2 .* at the same moment as rank 0)", said[0])


FAILS_FIRST = """
import sys, instep
if str(instep.rank) == sys.argv[1]:
    raise ValueError("boo")
instep.barrier()
"""


@pytest.mark.launch
@components.needs("Slurm")
@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 3])
def test_the_other_host_hears_of_a_rank_that_never_came(
    cluster: Slurm, tmp_path: Path, rank: int
) -> None:
    (tmp_path / "train.py").write_text(FAILS_FIRST)
    ran = subprocess.run(
        ["srun", "-N2", "-n4", sys.executable, "train.py", str(rank)],
        cwd=tmp_path, env=os.environ | cluster.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert ran.stderr.count("ValueError: boo\n") == 1
    said = f"RendezvousError: rank {rank} of 4 ended on {socket.gethostname()} before all ranks had"
    assert ran.stderr.count(said) == 3


@pytest.mark.launch
def test_a_rank_that_is_merely_finished_is_no_failure(jobs: failures.Jobs) -> None:
    found = cell(jobs, "two bare processes", "loading", "exit 0")
    assert (found.code, found.output) == (0, "")


DIVERGING = """
import sys, torch, instep
import torch.distributed as dist
instep.init(f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
loss = (instep.replicate(torch.nn.Linear(2, 2))(torch.ones(1, 2))).sum()
if instep.rank == 0:
    loss.backward()
else:
    dist.broadcast(torch.ones(2), 0)
"""


NORMED = """
import sys, torch, instep
instep.init(f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
model.register_forward_hook(lambda *values: None)
model, x = instep.replicate(model), torch.ones(4, 2)
if instep.rank == 0:
    model(x)
else:
    instep.recv(0)
"""


PAST = """
import sys, torch, instep
instep.init(f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
x = torch.ones(4, requires_grad=True)
if sys.argv[3] == "scatter":
    part = instep.scatter(x.split(2) if instep.rank == 0 else None)
else:
    part = instep.recv(0) if instep.rank == 1 else instep.send(x, 1)
weight = torch.ones(part.shape, requires_grad=True)
torch.autograd.grad((part * weight).sum(), x if instep.rank == 0 else weight)
instep.barrier()
"""


WAIT = """instep: the ranks wait for each other in different collectives:
  rank 0 waits in {}
  rank 1 waits in {}
"""
DISAGREE = (
    "instep: the ranks disagree about which collective comes next: all_to_all at {}:10 on rank 0; "
    "barrier at {}:11 on rank 1. "
)


@pytest.mark.launch
@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(
            [
                (DIVERGING, (), "gloo", WAIT.format("backward at {}:7", "broadcast at {}:9")),
                (NORMED, (), "gloo", WAIT.format("forward at {}:8", "recv at {}:10")),
                (PAST, ("scatter",), "auto", DISAGREE),
            ],
            id="at once",
        ),
        pytest.param(
            [(PAST, ("send",), "auto", WAIT.format("grad at {}:10", "barrier at {}:11"))],
            id="send",
            marks=pytest.mark.nightly,
        ),
    ],
)
@pytest.mark.nightly
def test_what_only_some_ranks_compute_is_named_with_its_lines(
    tmp_path: Path, jobs: list[tuple[str, tuple[str, ...], str, str]]
) -> None:
    """Jobs at once: most of their time they wait."""
    with ThreadPoolExecutor() as pool:
        running = [
            pool.submit(assert_named, tmp_path / f"job{number}", *job)
            for number, job in enumerate(jobs)
        ]
    for job in running:
        job.result()


def assert_named(
    folder: Path, text: str, asked: tuple[str, ...], backend: str, expected: str
) -> None:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(text)
    ranks = [
        subprocess.Popen(
            [sys.executable, script, folder / "meet", str(rank), *asked],
            env=os.environ | {"INSTEP_BACKEND": backend}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=50)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert said[1] == ""
    assert said[0].startswith(expected.replace("{}", str(script)))
    shown = re.search(r":(\d+)", expected.partition("{}")[2])  # rank 0's line, with its text
    assert shown is not None
    assert said[0].rstrip().endswith(text.splitlines()[int(shown[1]) - 1].strip())


# ---------------------------------------------------------------------------------- pure parts


def waits(**of: tuple[str, list[int]]) -> dict[int, dict[str, object]]:
    return {
        int(r[1:]): {"op": op, "members": rank_ranges(members)} for r, (op, members) in of.items()
    }


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        (waits(r0=("all_reduce", [0, 1])), []),  # rank 1 may still come
        (waits(r0=("all_reduce", [0, 1]), r1=("all_reduce", [0, 1])), []),  # a slow network
        (waits(r0=("all_reduce", [0, 1]), r1=("broadcast", [0, 1])), [0, 1]),
        (waits(r0=("barrier", [0, 1]), r1=("barrier", [1, 2]), r2=("barrier", [0, 2])), [0, 1, 2]),
        (waits(r0=("barrier", [0, 1]), r1=("barrier", [1, 2])), []),  # rank 2 may come, then 1
        (
            waits(r0=("reduce", [0, 1]), r1=("barrier", [0, 1]), r2=("barrier", [2, 3])),
            [0, 1],
        ),
    ],
)
def test_who_waits_in_vain(waiting: dict[int, dict[str, object]], expected: list[int]) -> None:
    assert find_deadlock(waiting) == expected


@pytest.mark.parametrize(
    ("code", "said", "shell"),
    [
        (3, "exited with code 3", 3),
        (-9, "was killed by SIGKILL", 137),
        (-63, "was killed by signal 63", 191),
        (None, "ended and reported nothing (killed, or by os._exit)", 1),
    ],
)
def test_how_a_rank_ended(code: int | None, said: str, shell: int) -> None:
    assert (describe_exit(code), shell_exit_code(code)) == (said, shell)


def test_the_headline_says_what_became_of_the_others() -> None:
    expected = "instep: rank 1 of 5 failed; rank 0 had finished; ranks 2, 3, 4 were stopped"
    assert format_failure(1, 5, "failed", {0}, {4, 2, 3}) == expected


@pytest.mark.parametrize(("ending", "code"), [("os._exit(5)", 5), ("os.abort()", -6)])
def test_the_exit_code_of_a_process_is_seen_from_outside(ending: str, code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", f"import os; {ending}"])
    pidfd = os.pidfd_open(process.pid)
    try:
        select.select([pidfd], [], [])
        assert exit_code(pidfd) == code  # a zombie
        process.wait()
        assert exit_code(pidfd) in (code, None)  # None before Linux 6.15
    finally:
        os.close(pidfd)


def test_a_connection_receives_messages_in_pieces_and_its_end() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    theirs.sendall(b'{"type": "a"}\n{"typ')
    assert connection.recv() == [{"type": "a"}]
    theirs.sendall(b'e": "b"}\n')
    assert connection.recv() == [{"type": "b"}]
    theirs.close()
    assert connection.recv() is None
    connection.close()
