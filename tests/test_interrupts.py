"""Ctrl-C takes effect at the same point of the program on every rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import components
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.signals import rank_signals
from instep.distributed.watchdog.signals.signal_coordinator import (
    NO_COLLECTIVE_POLLS,
    SAME_LINE_POLLS,
    STALLED_NOW_POLLS,
    STALLED_POLLS,
    UNCONNECTED_POLLS,
    JobSignal,
    SignalCoordinator,
)
from launching import LAUNCHER_VARIABLES, Launch, free_port

TRAINING = """
import signal, sys, time, torch
{door}
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
{wrap}
x, steps, stop = torch.randn(16, 8), 0, []
{before}
try:
    while not stop:
        {body}
        steps += 1
        if steps == 10:
            print("go", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    {after}
with torch.no_grad():
    evaluated = float(model(x).sum())
steps_of_all = {steps}
print("all at the same step:", steps_of_all, flush=True)
torch.save(model.state_dict(), "model.pt")
"""
STEP = "model.zero_grad(); model(x).square().mean().backward()"
UNEDITED = {"door": "", "wrap": "", "before": "", "body": STEP, "after": "", "steps": "steps"}
TWO_LINES = UNEDITED | {
    "door": "import instep",
    "wrap": "model = instep.replicate(model)",
    "steps": "len({int(n) for n in instep.all_gather(torch.tensor([steps]))}) == 1",
}
HANDLER = "signal.signal(signal.SIGINT, lambda number, frame: stop.append(number))"
SLEEPS = {"body": "print('go', flush=True); time.sleep(1000)", "after": "time.sleep(1000)"}


SAVES = TWO_LINES | {
    "door": """
def save(number, frame):
    torch.save(optimizer.state_dict(), "optimizer.pt")  # a collective
    stop.append(number)

signal.signal(signal.SIGUSR1, save)
import instep""",
    "wrap": """model = instep.replicate(model)
optimizer = instep.shard(torch.optim.Adam(model.parameters()))""",
    "body": f"{STEP}; optimizer.step()",
}


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path, ("run",))
    launch.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
    yield launch
    launch.close()


def script(launch: Launch, **parts: str) -> str:
    path = launch.folder / "train.py"
    path.write_text(TRAINING.format(**parts))
    return str(path)


def until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    raise AssertionError(f"it ended before {word!r}")


@pytest.mark.launch
@pytest.mark.parametrize(
    ("parts", "said"),
    [
        pytest.param(UNEDITED, "interrupted\nall at the same step: ", id="unedited"),
        pytest.param(
            UNEDITED | {"before": HANDLER},
            "all at the same step: ",
            id="handler",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            TWO_LINES,
            "all at the same step: True\n",
            id="two lines",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_script_goes_on_after_ctrl_c(launch: Launch, parts: dict[str, str], said: str) -> None:
    with launch.start("-n", 2, "--output", "rank0", script(launch, **parts)) as process:
        until(process, "go")
        process.send_signal(signal.SIGINT)
        result = launch.end_of(process)
    assert said in result.stdout
    assert (result.returncode, "Traceback" in result.stderr) == (0, False)
    assert (launch.folder / "model.pt").exists()


ONE_SAVES = """
import os, signal
rank = int(os.environ["RANK"])
try:
    with open("both", "rw"[rank]):
        print("go", flush=True)
    signal.pause()
except KeyboardInterrupt:
    if rank:
        raise
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("told to end" if signal.sigtimedwait([signal.SIGTERM], 5) else "saved", flush=True)
"""


@pytest.mark.nightly
@pytest.mark.launch
def test_after_ctrl_c_a_rank_may_save_while_others_have_ended(tmp_path: Path) -> None:
    """For longer than a rank that fails leaves to the others."""
    launch = Launch(tmp_path)
    os.mkfifo(tmp_path / "both")
    (tmp_path / "train.py").write_text(ONE_SAVES)
    with launch.start("-n", 2, "--output", "rank0", "train.py") as process:
        until(process, "go")
        process.send_signal(signal.SIGINT)
        result = launch.end_of(process)
    launch.close()
    assert result.stdout == "saved\n"
    assert result.returncode != 0


@pytest.mark.nightly
@pytest.mark.launch
def test_a_sleep_is_interrupted_and_the_second_ctrl_c_ends_the_job(launch: Launch) -> None:
    with launch.start("-n", 2, script(launch, **UNEDITED | SLEEPS)) as process:
        until(process, "go")
        process.send_signal(signal.SIGINT)
        until(process, "interrupted")
        process.send_signal(signal.SIGINT)
        result = launch.end_of(process)
    assert result.returncode == 130
    assert result.stderr.startswith("instep: interrupted at ")
    assert result.stderr.count("\n") == 1


def test_an_interrupt_that_an_import_of_torch_loses_comes_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal, weakref\n"
        "class Lock: pass\n"
        "lock = Lock()\n"
        "held = weakref.ref(lock, lambda _: os.kill(os.getpid(), signal.SIGINT))\n"
        "del lock\n"
        "print('imported', flush=True)\n"
    )
    code = (
        "import signal\n"
        "from instep.launch.worker import torch_import\n"
        "torch_import.prepare()\n"
        "try:\n    import torch\n"
        "except KeyboardInterrupt:\n"
        "    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "imported\nTrue\n", done.stderr


@pytest.mark.launch
def test_an_interrupt_that_nobody_catches_is_one_line(launch: Launch) -> None:
    path = script(launch, **UNEDITED | {"after": "raise"})
    with launch.start("-n", 2, path) as process:
        until(process, "go")
        process.send_signal(signal.SIGINT)
        result = launch.end_of(process)
    assert (result.returncode, result.stdout) == (130, "interrupted\n")
    assert re.fullmatch(
        rf"instep: interrupted at {path}:\d+; ranks 0, 1 were stopped\n", result.stderr
    )


@pytest.mark.launch
def test_an_interrupt_in_the_last_line_is_not_lost(launch: Launch) -> None:
    path = launch.folder / "train.py"
    path.write_text("import signal, torch\nsignal.raise_signal(signal.SIGINT)\n")
    result = launch.run_forked("-n", 2, path)
    assert result.returncode == 130
    assert re.search(r"instep: rank [01] of 2 was killed by SIGINT", result.stderr)
    assert "ignored" not in result.stderr


@pytest.mark.nightly
@pytest.mark.launch
def test_one_rank_that_is_interrupted_interrupts_all(launch: Launch) -> None:
    """Without `instep run`: a launcher may interrupt them one after the other."""
    path = script(launch, **TWO_LINES)
    port = str(free_port())
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, path], cwd=launch.folder, text=True, stdout=subprocess.PIPE,
            env=launch.environ | place | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    until(ranks[0], "go")
    ranks[1].send_signal(signal.SIGINT)
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said[0] == "interrupted\nall at the same step: True\n"
    launch.wait_until_gone([])


@pytest.mark.launch
@pytest.mark.parametrize("parts", [UNEDITED, SAVES], ids=["unedited", "two lines"])
def test_a_signal_that_the_script_handles_takes_effect_on_all_ranks_at_one_step(
    launch: Launch, parts: dict[str, str]
) -> None:
    """It comes to one rank. The job is one that a shell has started with `&`: Ctrl-C is ignored."""
    handler = HANDLER.replace("SIGINT", "SIGUSR1")
    in_background = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    path = script(launch, **parts | ({} if parts["door"] else {"before": handler}))
    with launch.start("-n", 2, path, **in_background) as process:
        until(process, "go")
        (rank_1,) = [
            each
            for each in launch.processes()
            if each.environ().get("RANK") == "1" and "instep.launch.worker.entry" in each.cmdline()
        ]
        rank_1.send_signal(signal.SIGUSR1)
        result = launch.end_of(process)
    assert result.returncode == 0, result.stderr
    assert "all at the same step: " in result.stdout
    assert "all at the same step: False" not in result.stdout
    assert (launch.folder / "model.pt").exists()


RAISES = """
import os, signal, sys, torch
came = []
signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))
print(signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL)
for _ in range(2):
    signal.raise_signal(signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR2)
print(len(came), callable(signal.signal(signal.SIGUSR2, signal.SIG_IGN)))
os.kill(os.getpid(), signal.SIGUSR2)
print(len(came), signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN)
"""


@pytest.mark.launch
def test_a_signal_that_the_script_sends_itself_comes_at_once(launch: Launch) -> None:
    path = launch.folder / "train.py"
    path.write_text(RAISES)
    result = launch.run_forked("-n", 2, path)
    assert result.stdout == "True\n4 True\n4 True\n", result.stderr


OPEN_MPI = (
    *("mpirun.openmpi", "--allow-run-as-root", "--mca", "oob_tcp_if_include", "lo"),
    *("--oversubscribe", "--bind-to", "none"),
)
ELASTIC = ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1")
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", *ELASTIC),
    *("--rdzv-endpoint", "127.0.0.1:0", "--local-ranks-filter", "0"),
)


@pytest.mark.launch
def test_another_signal_ends_no_job_whose_ranks_come_to_no_common_point() -> None:
    """Rank 0 evaluates, say, and rank 1 waits for it."""
    told = Told()
    looks(begun(told, 7, 8, number=signal.SIGUSR1), STALLED_POLLS + 1, (7, "a:1"), (8, "a:2"))
    assert told.words[-1] == ("interrupt_now", None)
    looks(begun(told, 7, 8, number=signal.SIGUSR1), STALLED_NOW_POLLS, (7, "a:1"), (8, "a:2"))
    assert told.text == ""


def test_another_signal_comes_at_once_where_a_rank_has_failed() -> None:
    """The others may have a second left to save."""
    told = Told()
    told.incomplete = True
    begun(told, number=signal.SIGTERM)
    assert told.words == [("pause", None), ("interrupt_now", True)]
    told = Told()
    coordinator = begun(told, 7, 8, number=signal.SIGTERM)
    told.incomplete = True
    looks(coordinator, 2, (8, "a:1"), (8, "a:2"))
    assert told.words[2:] == [("interrupt_now", True)]
    told = Told()
    told.incomplete = True
    begun(told)
    assert told.words == [("pause", None)]  # of Ctrl-C


def test_a_signal_that_comes_again_takes_effect_again() -> None:
    told = Told()
    coordinators = SignalCoordinator(EventLoop(), told)
    number = signal.SIGUSR1
    for _ in range(2):
        coordinators.handle(1, "interrupt", {"signal": number})
        for rank in range(2):
            coordinators.handle(rank, "paused", {"signal": number, "count": 3})
            coordinators.handle(rank, "interrupted", {"signal": number, "line": "a:1"})
        coordinators.handle(0, "interrupt", {"signal": number})  # it is being handled
        coordinators._signals[number]._poll()
    assert told.words == [("pause", None), ("interrupt_at", 4)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "parts", "said", "code"),
    [
        pytest.param(
            TORCHRUN, TWO_LINES, "all at the same step: True\n", 1, id="torchrun, two lines",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ("mpirun.mpich", "-n", "2", sys.executable, "-m", "instep"), UNEDITED,
            "all at the same step: ", 0, id="MPICH, unedited", marks=components.needs("MPICH"),
        ),
    ],
)  # fmt: skip
def test_a_script_goes_on_after_ctrl_c_of_another_launcher(
    launch: Launch, launcher: tuple[str, ...], parts: dict[str, str], said: str, code: int
) -> None:
    """As a terminal sends it: to the launcher's process group."""
    environ = {k: v for k, v in launch.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    kept = {k: v for k, v in environ.items() if k != "TMPDIR"}  # torchrun leaves its folder there
    process = subprocess.Popen(
        [*launcher, script(launch, **parts)], cwd=launch.folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=kept | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    until(process, "go")
    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=50)
    launch.wait_until_gone([])  # the watchers may outlive this launcher
    assert (process.returncode, said in out) == (code, True), out + errors
    assert (launch.folder / "model.pt").exists()


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.slow
@components.needs("Open MPI")
def test_open_mpi_ends_the_job_at_ctrl_c(launch: Launch) -> None:
    """No script hears of it, and nothing is left."""
    environ = {k: v for k, v in launch.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    process = subprocess.Popen(
        [*OPEN_MPI, "-n", "2", sys.executable, "-m", "instep", script(launch, **UNEDITED)],
        cwd=launch.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    until(process, "go")
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=50)[0]
    launch.wait_until_gone([])
    assert process.returncode != 0
    assert "interrupted" not in said


# ---------------------------------------------------------------------------------- pure parts


class Told:
    """What an coordinator says to two ranks."""

    def __init__(self, came: bool = True) -> None:
        self.words: list[tuple[str, Any]] = []
        self.came, self.incomplete = came, False
        self.text = ""

    def broadcast(self, message_type: str, **fields: object) -> None:
        if message_type != "get_progress":
            self.words.append((message_type, fields.get("count", fields.get("anywhere") or None)))

    def running_ranks(self) -> set[int]:
        return {0, 1}

    def all_connected(self) -> bool:
        return self.came

    def is_incomplete(self) -> bool:
        return self.incomplete

    def abort_job(self, text: str) -> None:
        self.text = text


def begun(told: Told, *counts: int, number: int = signal.SIGINT) -> JobSignal:
    coordinator = JobSignal(EventLoop(), told, number)
    coordinator.handle(1, "interrupt", {})
    coordinator.handle(0, "interrupt", {})
    for rank, count in enumerate(counts):
        coordinator.handle(rank, "paused", {"count": count})
    return coordinator


def looks(coordinator: JobSignal, count: int, *points: tuple[int, str]) -> None:
    for _ in range(count):
        for rank, (number, line) in enumerate(points):
            coordinator.handle(rank, "progress", {"count": number, "line": line})
        coordinator._poll()


def test_ranks_are_interrupted_at_a_collective_that_none_has_begun() -> None:
    told = Told()
    begun(told, 7, 8)
    assert told.words == [("pause", None), ("interrupt_at", 9)]


class ToldRank:
    """What a coordinator says to one rank."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def send(self, message_type: str, **fields: object) -> None:
        self.words.append(message_type)


def test_a_rank_that_connects_after_the_interrupt_pauses_like_the_others() -> None:
    told = Told(came=False)
    coordinator = begun(told, 7)
    looks(coordinator, 1, (7, "a:1"))
    assert told.words == [("pause", None)]
    told.came, late = True, ToldRank()
    coordinator.add_rank(1, late)
    assert late.words == ["pause"]
    coordinator.handle(1, "paused", {"count": 8})
    assert told.words == [("pause", None), ("interrupt_at", 9)]


def test_ranks_that_wait_in_vain_for_others_are_interrupted_where_they_are() -> None:
    told = Told(came=False)
    coordinator = begun(told, 7)
    looks(coordinator, UNCONNECTED_POLLS, (7, "a:1"))
    assert told.words == [("pause", None), ("interrupt_now", None)]
    late = ToldRank()
    coordinator.add_rank(1, late)
    assert late.words == ["interrupt_now"]


@pytest.mark.parametrize(
    ("count", "points", "expected"),
    [
        (SAME_LINE_POLLS + 1, [(7, "a:1"), (7, "a:1")], True),  # asleep at one line
        (NO_COLLECTIVE_POLLS, [(7, "a:1"), (7, "a:2")], False),
        (NO_COLLECTIVE_POLLS + 1, [(7, "a:1"), (7, "a:2")], True),  # a loop without collectives
        (STALLED_POLLS, [(7, "a:1"), (8, "a:2")], False),  # one waits in a collective for the other
    ],
)
def test_ranks_that_come_to_no_collective_are_interrupted_where_they_are(
    count: int, points: list[tuple[int, str]], expected: bool
) -> None:
    told = Told()
    looks(begun(told, 7, 8), count, *points)
    assert (("interrupt_now", None) in told.words) is expected


@pytest.mark.parametrize(
    ("count", "points"),
    [
        (STALLED_POLLS + 1, [(7, "a:1"), (8, "a:2")]),
        (NO_COLLECTIVE_POLLS + STALLED_NOW_POLLS + 2, [(7, "a:1"), (7, "a:2")]),
    ],
)
def test_ranks_that_come_to_no_common_point_are_named(
    count: int, points: list[tuple[int, str]]
) -> None:
    told = Told()
    looks(begun(told, 7, 8), count, *points)
    assert told.text.endswith(":\n  rank 0 is at a:1\n  rank 1 is at a:2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("forkserver", marks=pytest.mark.nightly)],  # Python 3.14 uses the latter
)
def test_an_interrupt_in_a_loaders_worker_is_its_ranks_affair(tmp_path: Path, method: str) -> None:
    program = tmp_path / "loads.py"
    program.write_text(
        "import os, signal, torch\n"
        "from instep.distributed.watchdog.signals.rank_signals import rank_signals\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n"
        "        return 4\n"
        "    def __getitem__(self, index):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        return index\n"
        "if __name__ == '__main__':\n"
        "    rank_signals.install(print)\n"
        "    loader = torch.utils.data.DataLoader(\n"
        f"        Data(), None, num_workers=1, multiprocessing_context={method!r})\n"
        "    print(list(loader))\n"
    )
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("[0, 1, 2, 3]\n", "")


def test_an_exception_of_a_signals_handler_is_known_as_one():
    def leave(number, frame):
        sys.exit("by a signal")

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        with pytest.raises(SystemExit) as by_signal:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        known = rank_signals.is_from_signal(by_signal.value)
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(SystemExit) as by_script:
        sys.exit("by the script")
    assert known
    assert not rank_signals.is_from_signal(by_script.value)
    with pytest.raises(KeyboardInterrupt) as here:  # in a process that waits for no other
        raise KeyboardInterrupt
    assert rank_signals.is_from_signal(here.value)
