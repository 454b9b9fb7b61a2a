"""Where several ranks take more time than one process, rank 0 goes on alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import components
from instep.distributed.communication.transport import get_transport
from instep.unedited.sharded_call.one_process.process_choice import (
    FIRST_MEASURE,
    WHOLE_STEPS,
    Phase,
    ProcessChoice,
)
from instep.unedited.sharded_call.one_process.sequential import Cores, run_sequential
from pool import ranks

RUN = (sys.executable, "-m", "instep", "run", "-n", "2")
OPEN_MPI = (
    *("mpirun.openmpi", "--allow-run-as-root", "--mca", "oob_tcp_if_include", "lo"),
    *("--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable, "-m", "instep"),
)
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--local-addr", "127.0.0.1", "--rdzv-endpoint", "127.0.0.1:0"),
    *("-m", "instep"),
)

# ---------------------------------------------------------------------------------- the choice


def steps(choice: ProcessChoice, count: int, *, divided: bool = True, calls: int = 1) -> None:
    """Each with so many calls; none was compared."""
    for _ in range(count):
        for _ in range(calls):
            choice.add_call(has_grad=True)
            if divided and choice.phase is Phase.SHARED:
                choice.add_divided()
        choice.add_step(trials=0)


def pair(choice: ProcessChoice, ratio: float, calls: Sequence[int] = (1, 1)) -> None:
    """A phase of each sort, of which the second takes `ratio` times as long."""
    assert choice.phase is Phase.SHARED
    while not choice.is_phase_over:
        steps(choice, 1, calls=calls[0])
    choice.finish_phase(1.0)
    assert choice.phase is Phase.WHOLE
    steps(choice, 2)
    choice.finish_drain()
    assert choice.phase is Phase.SEQUENTIAL
    while not choice.is_phase_over:
        steps(choice, 1, calls=calls[1])
    choice.finish_phase(ratio)


def measuring() -> ProcessChoice:
    """A choice that has begun to measure, with phases of ten steps."""
    choice = ProcessChoice()
    while not choice.is_due:
        steps(choice, 1)
    choice.begin(is_possible=True)
    steps(choice, 4)
    assert choice.is_phase_over
    choice.finish_phase(0.04)
    return choice


@pytest.mark.parametrize(
    ("ratios", "is_for_one"),
    [((0.9, 0.9, 0.9), True), ((0.5, 0.9, 1.2), True), ((1.0, 0.9, 0.97), False), ((1.3,), False)],
)
def test_rank_0_goes_on_alone_where_that_takes_less_time(
    ratios: Sequence[float], is_for_one: bool
) -> None:
    choice = measuring()
    for ratio in ratios:
        assert choice.is_measuring
        pair(choice, ratio)
    assert choice.is_for_one == is_for_one
    assert choice.is_measured == is_for_one or len(ratios) == 3
    assert choice.phase is (Phase.WHOLE if is_for_one else Phase.SHARED)
    if not is_for_one:
        seen = choice._steps
        while not choice.is_due:
            steps(choice, 1)
        assert choice._steps == 10 * seen


def test_phases_that_do_not_compare_do_not_count() -> None:
    choice = measuring()
    pair(choice, 2.0, calls=(1, 2))
    for _ in range(3):
        pair(choice, 0.9)
    assert choice.is_for_one
    choice = measuring()
    for _ in range(8):
        assert choice.is_measuring
        pair(choice, 0.1, calls=(1, 2))
    assert not choice.is_measuring


def test_a_phase_with_a_trial_does_not_count() -> None:
    choice = measuring()
    choice.add_step(trials=1)
    while not choice.is_phase_over:
        choice.add_step(trials=1)
    choice.finish_phase(1.0)
    choice.finish_drain()
    while not choice.is_phase_over:
        choice.add_step(trials=1)
    choice.finish_phase(5.0)
    assert choice.is_measuring
    assert choice.phase is Phase.SHARED


def test_where_nothing_is_divided_nothing_is_measured() -> None:
    choice = ProcessChoice(can_measure=False)
    steps(choice, 100)
    assert not choice.is_due
    steps(choice, WHOLE_STEPS - 2, divided=False)
    assert not choice.is_for_one
    steps(choice, 1, divided=False)
    assert choice.is_for_one
    assert not choice.is_measured


def test_it_waits_while_loading_is_shared_and_gives_up_where_outputs_are_kept() -> None:
    choice = ProcessChoice()
    steps(choice, FIRST_MEASURE)
    assert choice.is_due
    choice.begin(is_possible=False)
    steps(choice, FIRST_MEASURE - 1)
    assert not choice.is_due
    steps(choice, 1)
    assert choice.is_due
    choice = measuring()
    while not choice.is_phase_over:
        steps(choice, 1)
    choice.finish_phase(1.0)
    while not choice.is_drain_too_long():
        steps(choice, 1)
    choice.stop()
    assert choice.phase is Phase.SHARED
    assert not choice.is_measuring


# ------------------------------------------------------------------------------------ the turns


def _in_turns(folder: str) -> tuple[int, bool]:
    transport = get_transport()
    cores = Cores.of_all(2, transport)
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    file = Path(folder, "running")

    def alone() -> int:
        file.touch(exist_ok=False)  # nobody else is at work
        file.unlink()
        return torch.get_num_threads()

    def fails() -> None:
        raise KeyError(transport.rank)

    seen, waited = run_sequential(alone, cores, transport)
    with pytest.raises(KeyError, match=str(transport.rank)):
        run_sequential(fails, cores, transport)
    transport.barrier()
    assert waited > 0
    return seen, before == (torch.get_num_threads(), os.sched_getaffinity(0))


@ranks(2)
def test_ranks_take_turns_with_the_cores_of_all(tmp_path: Path) -> None:
    assert _in_turns(str(tmp_path.parent)) == (2, True)


# ----------------------------------------------------------------------------------- the script

WHOLE = """
import atexit, json, os, signal, subprocess, sys, tempfile, time
import torch
from torch import nn
from torch.utils.data import DataLoader
from instep.unedited.data import exchange_policy

exchange_policy.is_exchange_faster = lambda *given: False

class Net(nn.Module):
    "Each row depends on the others; it has no parts."
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 4)
    def forward(self, x):
        h = torch.tanh(x @ self.weight)
        return h + torch.softmax(h @ h.T, 1) @ h

class Rows:
    def __len__(self):
        return 512
    def __getitem__(self, index):
        return torch.sin(torch.arange(8.0) * index).double()

folder, workers, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(Rows(), batch_size=16, shuffle=True, num_workers=workers)
atexit.register(print, "at exit")
temporary = tempfile.TemporaryDirectory(dir=os.environ["TMPDIR"])
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print("read", sys.stdin.readline())
with open(f"{folder}/log", "w") as log:
    for epoch in range(3):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
        print(epoch, round(loss.item(), 12), file=log, flush=True)
        if epoch == 1:
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
print("read", sys.stdin.readline())
print(subprocess.run(["echo", "once"], capture_output=True, text=True).stdout)
print(child.poll(), child.communicate(b"end")[0], child.returncode)
print(os.environ.get("RANK"), torch.distributed.is_initialized())
torch.save(model.state_dict(), f"{folder}/model.pt")
children = subprocess.run(["ps", "-ww", "-o", "stat=,args=", "--ppid", str(os.getppid())],
                          capture_output=True, text=True).stdout.splitlines()
alive = [line for line in children if "train.py" in line and not line.startswith("Z")]
with open(f"{folder}/processes.json", "w") as file:
    threads = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    json.dump([len(alive), threads, sorted(os.listdir(folder))], file)
if end == "signal":
    signal.signal(signal.SIGINT, lambda number, frame: print("interrupted"))
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)
elif end == "raise":
    raise ValueError("late")
elif end == "exit":
    sys.exit(3)
"""


def run(
    folder: Path, command: Sequence[str], text: str, *arguments: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    (folder / "files").mkdir(parents=True)
    temporary = tempfile.mkdtemp(dir="/tmp")  # a socket's path may have 107 letters
    (folder / "train.py").write_text(text)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("INSTEP", "OMP", "MKL"))}
    done = subprocess.run(
        [*command, str(folder / "train.py"), str(folder / "files"), *arguments],
        env=clean | {"TMPDIR": temporary, "INSTEP_SEED": "0"} | environ,
        cwd=folder,
        input="first\nsecond\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    of_launchers = ("ompi.", "torchelastic_", "torchinductor_")
    assert [name for name in os.listdir(temporary) if not name.startswith(of_launchers)] == []
    shutil.rmtree(temporary)
    return done


@pytest.mark.launch
@pytest.mark.parametrize(
    ("command", "workers", "end"),
    [
        pytest.param(RUN, "0", "signal", id="instep run"),
        pytest.param(RUN, "2", "", id="workers"),
        pytest.param(RUN, "0", "raise", id="raises", marks=pytest.mark.nightly),
        pytest.param(RUN, "0", "exit", id="exits", marks=pytest.mark.nightly),
        pytest.param(OPEN_MPI, "2", "signal", id="MPI", marks=components.needs("Open MPI")),
        pytest.param(TORCHRUN, "0", "", id="torchrun", marks=pytest.mark.nightly),
    ],
)
def test_a_script_of_which_nothing_can_be_divided_goes_on_as_one_process(
    tmp_path: Path, command: Sequence[str], workers: str, end: str
) -> None:
    one = run(tmp_path / "one", [sys.executable], WHOLE, workers, end)
    several = run(tmp_path / "several", command, WHOLE, workers, end)
    assert "rank 0 goes on alone, with" in several.stderr, several.stderr
    assert (
        "had nothing that pays to be divided. The other ranks have ended. [INS717]"
        in several.stderr
    )
    same = [line for line in several.stdout.splitlines() if "mpirun" not in line and line]
    kept = [line for line in same if not line.startswith(("---", "Primary", "a non-zero"))]
    assert kept[: len(one.stdout.split())] == [line for line in one.stdout.splitlines() if line]
    if command is RUN:
        assert several.returncode == one.returncode
        assert several.stderr.count("ValueError: late") == (end == "raise")
    logs = [(tmp_path / which / "files/log").read_text() for which in ("several", "one")]
    assert logs[0] == logs[1]
    alive, threads, listed = json.loads((tmp_path / "several/files/processes.json").read_text())
    assert (alive, listed) == (1, ["log", "model.pt", "processes.json"])
    if command is RUN:
        assert threads == [len(os.sched_getaffinity(0)), None]
    model, expected = (
        torch.load(tmp_path / which / "files/model.pt")["weight"] for which in ("several", "one")
    )
    torch.testing.assert_close(model, expected, rtol=1e-12, atol=1e-14)


MEASURED = """
import sys
import torch
from torch import nn
from instep.unedited.sharded_call.one_process.process_choice import Phase, ProcessChoice
from instep.unedited.sharded_call.plan.call_tuner import CallTuner

ratio = float(sys.argv[2])
seen = []
finish = ProcessChoice.finish_phase
def pretend(choice, seconds):
    seen.append((choice.phase.name, torch.get_num_threads()))
    finish(choice, ratio if choice.phase is Phase.SEQUENTIAL else 1.0)
ProcessChoice.finish_phase = pretend
CallTuner.is_due = CallTuner.has_chosen_whole = property(lambda tuner: False)

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
first = nn.Linear(8, 16, bias=False)
model = nn.Sequential(first, nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
x, y = torch.randn(32, 8), torch.randint(3, (32,))
kept = []
for step in range(120):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    if len(sys.argv) > 3:
        kept.append(loss)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, f"{loss.item():.10f}")
print(sorted({*seen}) if len(sys.argv) < 5 else "", file=sys.stderr)
torch.save([model.state_dict(), optimizer.state_dict()["state"][0]], sys.argv[1] + "/model.pt")
"""


@pytest.mark.launch
@pytest.mark.parametrize(
    ("ratio", "arguments", "is_alone"),
    [
        pytest.param("0.5", (), True, id="faster alone"),
        pytest.param("1.1", (), False, id="faster together"),
        pytest.param("0.5", ("kept",), False, id="keeps graphs", marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_take_more_time_than_one_process_end(
    tmp_path: Path, ratio: str, arguments: tuple[str, ...], is_alone: bool
) -> None:
    one = run(tmp_path / "one", [sys.executable], MEASURED, ratio, *arguments)
    several = run(tmp_path / "several", RUN, MEASURED, ratio, *arguments)
    assert several.returncode == 0, several.stderr
    assert ("which takes less time than 2 ranks do together" in several.stderr) == is_alone
    assert ("SEQUENTIAL" in several.stderr) == (not arguments)
    assert several.stdout == one.stdout
    model, expected = (
        torch.load(tmp_path / which / "files/model.pt") for which in ("several", "one")
    )
    torch.testing.assert_close(model, expected, rtol=1e-9, atol=1e-11)
