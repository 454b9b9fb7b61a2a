"""Where several ranks take more time than one process, rank 0 goes on alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import pytest
import torch

import components
import forked_jobs
from instep.distributed.communication.local_transport import LocalTransport
from instep.distributed.communication.transport import use_transport
from instep.process import settings
from instep.unedited.data.exchange_policy import ExchangePolicy
from instep.unedited.data.row_loading import RowBatchSampler
from instep.unedited.sharded_call.one_process.cores import Cores
from instep.unedited.sharded_call.one_process.fallback import Fallback
from instep.unedited.sharded_call.one_process.process_choice import (
    FIRST_MEASURE,
    WARM_UP,
    WHOLE_STEPS,
    Phase,
    ProcessChoice,
)
from instep.unedited.sharded_call.plan.control_flow import WATCHED_CALLS

NIGHTLY = pytest.mark.nightly
RUN = (sys.executable, "-m", "instep", "run", "-n", "2")
FORKED = ("forked instep", "run", "-n")
"""The same without the import of torch in each rank (forked_jobs.py)."""
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
        choice.add_step(slow_calls=0)


def pair(choice: ProcessChoice, ratio: float, calls: Sequence[int] = (1, 1)) -> None:
    """A phase of each sort, of which the second takes `ratio` times as long."""
    assert choice.phase is Phase.SHARED
    while not choice.is_phase_over:
        steps(choice, 1, calls=calls[0])
    choice.finish_phase(1.0)
    assert choice.phase is Phase.WHOLE
    steps(choice, 2)
    choice.finish_drain()
    assert choice.phase is Phase.ALONE
    while not choice.is_phase_over:
        steps(choice, 1, calls=calls[1])
    choice.finish_phase(ratio)


def measuring() -> ProcessChoice:
    """A choice that has begun to measure, with phases of ten steps."""
    choice = ProcessChoice()
    while not choice.is_due:
        steps(choice, 1)
    choice.begin(is_possible=True)
    steps(choice, WARM_UP)
    assert choice.is_warmed_up
    steps(choice, 1)
    assert not choice.is_phase_over
    steps(choice, 1)
    assert choice.is_phase_over
    choice.finish_phase(0.02)
    return choice


@pytest.mark.parametrize(
    ("ratios", "is_for_one"),
    [
        ((0.9, 0.9), True),
        ((0.5, 1.2, 0.9), True),
        ((1.0, 0.9, 0.99), False),
        ((1.0, 1.0), False),
        ((1.3,), False),
        ((0.9, 1.3), False),
    ],
)
def test_rank_0_goes_on_alone_where_that_takes_less_time(
    ratios: Sequence[float], is_for_one: bool
) -> None:
    choice = measuring()
    for ratio in ratios:
        assert choice.is_measuring
        assert not choice.is_for_one
        pair(choice, ratio)
    assert choice.is_for_one == is_for_one
    assert choice.phase is Phase.SHARED
    if not is_for_one:
        seen = choice._steps
        while not choice.is_due:
            steps(choice, 1)
        assert choice._steps == 10 * seen


def test_phases_that_do_not_compare_do_not_count() -> None:
    choice = measuring()
    pair(choice, 2.0, calls=(1, 2))
    for _ in range(2):
        assert not choice.is_for_one
        pair(choice, 0.9)
    assert choice.is_for_one
    choice = measuring()
    for _ in range(8):
        assert choice.is_measuring
        pair(choice, 0.1, calls=(1, 2))
    assert not choice.is_measuring


def test_a_phase_with_a_trial_does_not_count() -> None:
    choice = measuring()
    choice.add_step(slow_calls=1)
    while not choice.is_phase_over:
        choice.add_step(slow_calls=1)
    choice.finish_phase(1.0)
    choice.finish_drain()
    while not choice.is_phase_over:
        choice.add_step(slow_calls=1)
    choice.finish_phase(5.0)
    assert choice.is_measuring
    assert choice.phase is Phase.SHARED


def test_where_nothing_is_divided_nothing_is_measured() -> None:
    choice = ProcessChoice(ranks=9)
    steps(choice, 4)
    steps(choice, WHOLE_STEPS - 2, divided=False)
    assert not choice.is_for_one
    steps(choice, 1, divided=False)
    assert choice.is_for_one


def test_phases_hold_equally_many_evaluations() -> None:
    """A model that is computed whole, but for evaluations after each nine steps."""
    choice, seconds = ProcessChoice(), {Phase.SHARED: 1.0, Phase.WHOLE: 1.0, Phase.ALONE: 0.9}
    clock, start = 0.0, 0.0
    for step in range(400):
        if choice.is_for_one:
            break
        if step and step % 9 == 0:
            choice.add_call(has_grad=False)
            choice.add_divided()
            clock += 5 * seconds[choice.phase]
        choice.add_call(has_grad=True)
        choice.add_step(slow_calls=0)
        clock += seconds[choice.phase]
        if choice.phase is Phase.WHOLE:
            choice.finish_drain()
        elif choice.is_warmed_up:
            start = clock
        elif choice.is_phase_over:
            choice.finish_phase(0.01 * (clock - start))
        elif choice.is_due:
            choice.begin(is_possible=True)
    assert choice.is_for_one
    assert choice._pairs <= 4  # of which the first may have another number


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
    while not choice.is_drain_too_long:
        steps(choice, 1)
    choice.stop()
    assert choice.phase is Phase.SHARED
    assert not choice.is_measuring


class Ranks:
    """What rank 0 tells the others, and why it leaves them."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def tell(self, verdict: Callable[[], str]) -> str:
        self.said.append(verdict())
        return self.said[-1]

    def leave_to_rank0(self, cores: Cores, why: str) -> None:
        self.said.append(why)


class Two(LocalTransport):
    size = 2


@pytest.mark.parametrize(
    ("timeout", "said"),
    [(600, ["catch up"]), (0, ["end", "since it has made steps that the other ranks have not"])],
)
def test_rank_0_goes_on_where_the_others_would_catch_up_too_late(
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    timeout: int,
    said: list[str],
) -> None:
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    monkeypatch.setattr(settings, "timeout", lambda: timedelta(seconds=timeout))
    ranks = Ranks()
    with use_transport(Two()):
        fallback = Fallback(2, ranks)  # type: ignore[arg-type]  # these methods are enough
        fallback._choice = measuring()
        steps(fallback._choice, 12)
        fallback._choice.finish_phase(1.0)
        fallback._choice.finish_drain()
        fallback._cores = Cores(2, frozenset(os.sched_getaffinity(0)))
        fallback._begin_turn()
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: -1)
            assert fallback.may_interrupt()
        assert not ranks.said
        torch.set_num_threads(3)  # as the script may
        fallback._end_turn()
    assert ranks.said == said
    assert torch.get_num_threads() == 3


def test_a_thread_goes_on_with_whole_batches_of_a_pass_that_a_rank_has_begun_alone() -> None:
    sampler = RowBatchSampler([[0, 1], [2, 3]], None, ExchangePolicy(2, 0))
    begun_alone = iter(sampler)
    with use_transport(Two()), ThreadPoolExecutor(1) as thread:
        assert all(request.is_whole for request in thread.submit(list, begun_alone).result(20))
        assert not any(
            request.is_whole for request in thread.submit(list, iter(sampler)).result(20)
        )


# ----------------------------------------------------------------------------------- the script

WHOLE = """
import atexit, json, multiprocessing, os, signal, subprocess, sys, tempfile, time
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
    noise = 0.0
    def __getitem__(self, index):
        row = torch.sin(torch.arange(8.0) * index).double()
        return row + self.noise * torch.randn(8) if self.noise else row

folder, workers, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(Rows(), batch_size=16, shuffle=True, num_workers=workers)

class Step(nn.Module):
    "Trains in its forward."
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, batch):
        optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

step = Step() if workers else Step().forward
pool = multiprocessing.get_context("fork").Pool(1)
atexit.register(print, "at exit")
temporary = tempfile.TemporaryDirectory(dir=os.environ["TMPDIR"])
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print("read", sys.stdin.readline())
with open(f"{folder}/log", "w") as log:
    for epoch in range(3):
        for batch in loader:
            loss = step(batch)
        print(epoch, round(loss.item(), 12), file=log, flush=True)
        if epoch == 1:
            Rows.noise = 0.1 if end == "draws" else 0.0
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
print("read", sys.stdin.readline())
print(subprocess.run(["echo", "once"], capture_output=True, text=True).stdout)
print(pool.map(abs, [-1, 2]))
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
    folder: Path, command: Sequence[str], script: str, *arguments: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    (folder / "files").mkdir(parents=True)
    temporary = tempfile.mkdtemp(dir="/tmp")  # a socket's path may have 107 letters
    (folder / "train.py").write_text(script)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("INSTEP", "OMP", "MKL"))}
    words = [*command, str(folder / "train.py"), str(folder / "files"), *arguments]
    told = clean | {"TMPDIR": temporary, "INSTEP_SEED": "0"} | environ
    text = "first\nsecond\n"
    if words[: len(FORKED)] == [*FORKED]:
        done = forked_jobs.run(*words[1:], env=told, cwd=folder, input=text)
    else:
        done = subprocess.run(
            words, env=told, cwd=folder, input=text, capture_output=True, text=True, timeout=100
        )
    of_launchers = ("ompi.", "torchelastic_", "torchinductor_")
    assert [name for name in os.listdir(temporary) if not name.startswith(of_launchers)] == []
    shutil.rmtree(temporary)
    return done


@pytest.mark.launch
@pytest.mark.parametrize(
    ("command", "workers", "end"),
    [
        pytest.param(RUN, "0", "signal", id="instep run", marks=NIGHTLY),
        pytest.param(RUN, "2", "", id="workers", marks=NIGHTLY),
        pytest.param(RUN, "0", "raise", id="raises", marks=NIGHTLY),
        pytest.param(RUN, "0", "exit", id="exits", marks=NIGHTLY),
        pytest.param(OPEN_MPI, "2", "signal", id="MPI", marks=components.needs("Open MPI")),
        pytest.param(TORCHRUN, "0", "", id="torchrun", marks=NIGHTLY),
        pytest.param(RUN, "0", "draws", id="samples begin to draw"),
    ],
)
def test_a_script_of_which_nothing_can_be_divided_goes_on_as_one_process(
    tmp_path: Path, command: Sequence[str], workers: str, end: str
) -> None:
    one = run(tmp_path / "one", [sys.executable], WHOLE, workers, end)
    several = run(tmp_path / "several", command, WHOLE, workers, end)
    assert "rank 0 goes on alone, with" in several.stderr, several.stderr
    assert "since nothing in its last 24 steps pays to be divided" in several.stderr
    assert (several.returncode, several.stdout) == (one.returncode, one.stdout), several.stderr
    if command is RUN:
        assert several.stderr.count("ValueError: late") == (end == "raise")
    logs = [(tmp_path / which / "files/log").read_text() for which in ("several", "one")]
    assert logs[0] == logs[1]
    alive, threads, listed = json.loads((tmp_path / "several/files/processes.json").read_text())
    assert (alive, listed) == (1, ["log", "model.pt", "processes.json"])
    if command in (RUN, TORCHRUN):
        assert threads == [len(os.sched_getaffinity(0)), None]
    model, expected = (
        torch.load(tmp_path / which / "files/model.pt")["weight"] for which in ("several", "one")
    )
    torch.testing.assert_close(model, expected, rtol=1e-12, atol=1e-14)


MEASURED = """
import os, signal, subprocess, sys
import torch
from torch import nn
from torch.utils.data import DataLoader
from instep.unedited.data import exchange_policy
from instep.unedited.sharded_call.one_process.fallback import current_fallback
from instep.unedited.sharded_call.one_process.process_choice import Phase, ProcessChoice
from instep.unedited.sharded_call.plan.call_tuner import CallTuner

ratio, event, stop = float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
workers = int(event.endswith("loads ahead"))
finish = ProcessChoice.finish_phase
def pretend(choice, seconds):
    print("phase", choice.phase.name, torch.get_num_threads(), file=sys.stderr)
    finish(choice, ratio if choice.phase is Phase.ALONE else 1.0)
ProcessChoice.finish_phase = pretend
CallTuner.is_due = CallTuner.has_chosen_whole = property(lambda tuner: False)
# Who imports instep.training is left alone.
divided_steps = sys.modules["instep.unedited.optimizer_steps.divided_steps"]
one_copy = sys.modules["instep.distributed.one_copy"]
one_copy.FEWEST_ELEMENTS, one_copy.MOST_WRITES = 100, 0

def is_ahead():
    fallback = current_fallback()
    return fallback is not None and fallback._choice.phase is Phase.ALONE

torch.manual_seed(0)
first = nn.Linear(8, 16, bias=False)
model = nn.Sequential(first, nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3)).double()
optimizer = torch.optim.Adam(model.parameters(), 0.01)

class Rows:
    def __len__(self):
        return 1920 if workers else 96
    def __getitem__(self, index):
        return torch.sin(torch.arange(8.0) * index).double(), index % 3

exchange_policy.is_exchange_faster = lambda *given: False
next_batch = exchange_policy.ExchangePolicy.next_batch
def next_checked(policy, **options):
    if not workers or is_ahead():
        policy._batches = 3  # this batch is checked, where ranks can compare
    return next_batch(policy, **options)
exchange_policy.ExchangePolicy.next_batch = next_checked
loader = DataLoader(Rows(), batch_size=32, shuffle=True, num_workers=workers)
def batches():
    while True:
        yield from loader

def save():
    "What a script that ends with this step prints, and its states."
    states = model.state_dict(), optimizer.state_dict()["state"][0]
    torch.save((f"{loss.item():.10f}\\n", *states), f"{sys.argv[1]}/after{step + 1}.pt")

kept, caught, data = [], 0, batches()
for step in range(stop):
    x, y = next(data)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    if event == "keeps graphs":
        kept.append(loss)
    loss.backward()
    optimizer.step()
    if workers and is_ahead() and current_fallback()._transport.rank > 0:
        with torch.no_grad():
            first.weight *= 1 + 2**-50  # as kernels do that add in another order each time
    if event.startswith("each step"):
        save()
    if is_ahead() and event.startswith("ends"):
        break
    if is_ahead() and event == "runs a command":
        subprocess.run(["true"], check=True)
    if is_ahead() and event == "is interrupted":
        try:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                caught += 1
        except KeyboardInterrupt:
            pass
data.close()
print(f"{loss.item():.10f}")
save()
copies = [len(each.copy.slices) for each in divided_steps._steps_of.values()]
print("copies", copies, "divided", divided_steps.step_counts.divided, file=sys.stderr)
hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
print("hooks", len(hooks), file=sys.stderr)
print(step + 1, file=sys.stderr)
if event == "ends at once":
    sys.stdout.flush()
    os._exit(0)
"""


MEASURED_STEPS = "120"


@pytest.fixture(scope="module")
def measured_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """The folder of plain Python's run of MEASURED, which saves each step."""

    @cache
    def alone(has_workers: bool) -> Path:
        event = "each step, loads ahead" if has_workers else "each step"
        folder = tmp_path_factory.mktemp("measured") / "one"
        one = run(folder, [sys.executable], MEASURED, "0", event, MEASURED_STEPS)
        assert one.returncode == 0, one.stderr
        return folder / "files"

    return alone


@pytest.mark.launch
@pytest.mark.parametrize(
    ("ranks", "ratio", "event", "why"),
    [
        pytest.param("2", "0.5", "", "which takes less time", id="faster alone"),
        pytest.param("3", "1.1", "loads ahead", None, id="faster together", marks=NIGHTLY),
        pytest.param("2", "0.5", "keeps graphs", None, id="keeps graphs", marks=NIGHTLY),
        pytest.param("2", "1.1", "ends", None, id="ends meanwhile", marks=NIGHTLY),
        pytest.param("2", "1.1", "ends at once", None, id="ends at once"),
        pytest.param(
            *("2", "1.1", "runs a command", "since it has made"),
            id="runs a command",
            marks=NIGHTLY,
        ),
        pytest.param(
            *("3", "1.1", "is interrupted", "since it has made"),
            id="is interrupted",
            marks=NIGHTLY,
        ),
    ],
)
def test_ranks_that_take_more_time_than_one_process_end(
    tmp_path: Path,
    measured_alone: Callable[[bool], Path],
    ranks: str,
    ratio: str,
    event: str,
    why: str | None,
) -> None:
    # A signal takes effect in the script's frames, and a forked job has frames below these.
    command = RUN[:-1] if event == "is interrupted" else FORKED
    several = run(tmp_path / "several", (*command, ranks), MEASURED, ratio, event, MEASURED_STEPS)
    assert several.returncode == 0, several.stderr
    threads = len(os.sched_getaffinity(0))
    assert (f"rank 0 goes on alone, with {threads} threads, {why}" in several.stderr) == (
        why is not None
    )
    assert several.stderr.count("INS717") == (why is not None)
    assert f"hooks {int(why is None)}\n" in several.stderr  # alone, its optimizers cost no more
    assert ("phase ALONE" in several.stderr) == (event in ("", "loads ahead"))
    if event == "loads ahead":  # all but the first two steps and those that each rank makes alone
        assert "copies [4] divided 100\n" in several.stderr
        assert "INS703" not in several.stderr
    last = f"after{several.stderr.split()[-1]}.pt"
    printed, *expected = torch.load(measured_alone(event == "loads ahead") / last)
    _, *states = torch.load(tmp_path / "several/files" / last)
    assert several.stdout == printed
    torch.testing.assert_close(states, expected, rtol=1e-9, atol=1e-11)


WATCHED = """
import sys
import torch
from torch import nn
from instep.unedited.sharded_call.one_process.process_choice import ProcessChoice
from instep.unedited.sharded_call.plan.call_tuner import CallTuner

CallTuner.is_due = CallTuner.has_chosen_whole = property(lambda tuner: False)
begin = ProcessChoice.begin
def said(choice, **options):
    print("measures after", choice._steps, file=sys.stderr)
    begin(choice, **options)
ProcessChoice.begin = said

class Branching(nn.Linear):
    limit = 1000.0
    def forward(self, x):
        if self.limit < 0:
            x = x / x.mean()
        return super().forward(x)

torch.manual_seed(0)
model = {"Linear": nn.Linear, "Branching": Branching}[sys.argv[1]](8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(90):
    x = torch.randn(16, 8)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("model", "first"), [("Linear", 16), ("Branching", WATCHED_CALLS)])
def test_nothing_is_measured_while_calls_are_watched(tmp_path, model, first):
    script = tmp_path / "script.py"
    script.write_text(WATCHED)
    env = {**os.environ, "INSTEP_DIVIDE": "auto"}
    ran = forked_jobs.run("run", "-n", "2", script, model, env=env)
    assert ran.returncode == 0, ran.stderr
    measured = [line.split()[-1] for line in ran.stderr.splitlines() if "measures after" in line]
    assert first <= int(measured[0]) < first + 24
