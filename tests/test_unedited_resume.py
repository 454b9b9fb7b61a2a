"""`instep run --checkpoint`: a killed script goes on as if nothing had happened, or is refused."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from instep.check.script import Script
from instep.launch.worker.training_loops import TrainingLoops
from instep.unedited.errors import as_in_code
from pool import forkserver

pytestmark = pytest.mark.slow

PRELUDE = """\
import copy, csv, json, os, random, signal
from collections import defaultdict
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def fail_at(turn):
    if turn == 2 and os.path.exists("ends"):
        os.remove("ends")
        with open("/proc/self/environ", "rb") as environ:
            if b"RANK=0" not in environ.read().split(bytes(1)):
                os.kill(os.getpid(), signal.SIGTERM)
    if turn == 5 and os.path.exists("fails"):
        os.remove("fails")
        os.kill(os.getpid(), signal.SIGKILL)

inputs = torch.randn(120, 6, generator=torch.Generator().manual_seed(1))
labels = inputs.sum(1).gt(0).long()
"""
MODULE_LEVEL = """
class Model(nn.Sequential):
    def forward(self, x, y):
        logits = super().forward(x)
        return logits, nn.functional.cross_entropy(logits, y)

model = Model(
    nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)
)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
loader = DataLoader(TensorDataset(inputs, labels), 32, shuffle=True)
best, history = 0.0, []
draw = random.Random(2).random
log = open("log.txt", "w")
for epoch in range(8):
    total = 0
    for x, y in loader:
        optimizer.zero_grad()
        logits, loss = model(x * draw(), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    scheduler.step()
    history.append(total)
    best = max(best, total)
    print(epoch, f"{total:.4f}", file=log)
    fail_at(epoch)
torch.save([model.state_dict(), history, scheduler.get_last_lr(), best], "final.pt")
"""
IN_FUNCTIONS = """
class Meter:
    def __init__(self):
        self.values, self.count = [], 0

    def update(self, value):
        self.values.append(value)
        self.count += 1

class Average:
    "An exponential average of the parameters, as scripts copy it from one another."

    def __init__(self, model):
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}

    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p.data

class Trainer:
    def __init__(self, epochs):
        self.model = nn.Linear(6, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.average, self.meter, self.best = Average(self.model), Meter(), None
        self.by_epoch, self.rng = defaultdict(list), np.random.default_rng(3)
        self.epochs = epochs

    def train_epoch(self, loader, epoch):
        for x, y in loader:
            x = x + float(self.rng.normal()) * random.random()
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.average.update(self.model)
            self.meter.update(loss.item())
            self.by_epoch[epoch].append(loss.item())

    def train(self, loader):
        worst = 0.0
        for epoch in range(self.epochs):
            self.model.train()
            self.train_epoch(loader, epoch)
            worst = max(worst, self.meter.values[-1])
            if self.best is None or self.meter.values[-1] < self.best[0]:
                self.best = (self.meter.values[-1], copy.deepcopy(self.model.state_dict()))
                best_model = copy.deepcopy(self.model)
            with open("log.csv", "a") as file:
                csv.writer(file).writerow([epoch, self.meter.count])
            fail_at(epoch)
        return worst, best_model

def main():
    trainer = Trainer(7)
    loader = DataLoader(TensorDataset(inputs, labels), 50, shuffle=True)
    worst, best_model = trainer.train(loader)
    state = trainer.model.state_dict(), best_model.state_dict(), trainer.best, worst
    extra = trainer.average.shadow, trainer.meter.values, dict(trainer.by_epoch)
    torch.save([state, extra], "final.pt")

if __name__ == "__main__":
    main()
"""
NANOGPT = """
def get_batch():
    rows = torch.randint(len(inputs), (16,))
    return inputs[rows], labels[rows]

model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
scaler = torch.amp.GradScaler("cpu")
iter_num, best_loss, accumulate = 0, 1e9, 2
x, y = get_batch()
while True:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1 + iter_num)
    for micro_step in range(accumulate):
        loss = nn.functional.cross_entropy(model(x), y) / accumulate
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    best_loss = min(best_loss, loss.item())
    fail_at(iter_num)
    iter_num += 1
    if iter_num > 9:
        break
torch.save([model.state_dict(), best_loss, scaler.state_dict()], "final.pt")
"""
FOLDS = """
results = []
for fold in range(2):
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(4):
        for i in range(0, 120, 40):
            loss = nn.functional.cross_entropy(model(inputs[i:i + 40]), labels[i:i + 40])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        fail_at(4 * fold + epoch)
    results.append([loss.item(), model.state_dict()])
torch.save(results, "final.pt")
"""
CHANGED_TENSORS = """
model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
kept, flag, array = torch.zeros(2), torch.zeros(3), np.zeros(2)
for epoch in range(8):
    if epoch == 1:
        model[0].requires_grad_(False)
        flag.requires_grad_()
    if epoch == 2:
        model.double()
        inputs = inputs.double()
        kept.data = torch.arange(12.0).view(4, 3)
        part = kept[2:]
        array.resize(5, refcheck=False)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept += loss.item()
    array += epoch
    fail_at(epoch)
flags = [each.requires_grad for each in (*model.parameters(), flag)]
torch.save([model.state_dict(), kept, part, flags, loss.item(), array.tolist()], "final.pt")
"""
LATE_BACKWARD = """
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
total = 0
for step in range(8):
    total = total + nn.functional.cross_entropy(model(inputs), labels)
    fail_at(step)
    if step % 2:
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        total = 0
"""
RENAMED_FILE = """
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(8):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history = json.load(open("history.json")) if epoch else []
    with open("draft.json", "w") as draft:
        json.dump([*history, loss.item()], draft)
    os.replace("draft.json", "history.json")
    fail_at(epoch)
torch.save(json.load(open("history.json")), "final.pt")
"""
RESUMES_BY_ITSELF = """
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
begin = torch.load("own.pt") + 1 if os.path.exists("own.pt") else 0
for epoch in range(begin, 8):
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    torch.save(epoch, "own.pt")
    fail_at(epoch)
"""
IN_A_FOLDER_OF_ITS_OWN = """
os.mkdir(f"run-{len(os.listdir())}")
os.chdir(max(each for each in os.listdir() if each.startswith("run-")))
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    with open("../epochs.txt", "a") as epochs:
        print(epoch, file=epochs)
"""
LIVE_ITERATOR = MODULE_LEVEL.replace("best, history", "batches = iter(loader); best, history")
BOUND_SLOT = MODULE_LEVEL.replace("log = open", "length = None\nlog = open").replace(
    "    fail_at", "    length = history.__len__\n    fail_at"
)
OLD_WORKERS = MODULE_LEVEL.replace(
    "shuffle=True)", "shuffle=True, num_workers=1, persistent_workers=True)"
).replace("    total = 0", "    total = 0\n    loader.dataset.level = epoch")
APPENDS_LATE = MODULE_LEVEL.replace(
    "    fail_at(epoch)",
    """\
    if epoch >= 5:
        if not os.path.exists("new.csv"):
            with open("new.csv", "w") as file:
                print("epoch", file=file)
        for name in ("new.csv", "old.csv"):
            with open(name, "a") as file:
                print(epoch, file=file)
    fail_at(epoch)""",
).replace(
    "torch.save(",
    """with open("results.csv", "a") as file:
    print(epoch, file=file)
torch.save(""",
)
FOR_IS_LEFT = MODULE_LEVEL.replace(
    "    fail_at(epoch)", "    fail_at(epoch)\n    if epoch == 2: break\nlog.close()"
)
WHILE_IS_LEFT = FOR_IS_LEFT.replace(
    "for epoch in range(8):", "epoch = -1\nwhile True:\n    epoch += 1"
)
BEFORE, LOOP, AFTER = re.split(
    r"(?=for epoch in|log.close)",
    FOR_IS_LEFT.replace("    scheduler", "    def step():\n        return scheduler").replace(
        "    history.append", "    step()\n    history.append"
    ),
)
RETURNS = f"""{BEFORE}
def train(best):
{textwrap.indent(LOOP.replace("break", "return best"), "    ")}
best = train(best)
{AFTER}"""
NO_LOOP = "model = nn.Linear(2, 2)\nmodel(torch.ones(2, 2)).sum().backward()\n"


def _run(
    folder: str, checkpoint: str, arguments: tuple[str, ...], variables: dict[str, str]
) -> None:
    from instep.launch.worker import program

    gc.freeze()
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # a rank has none
    os.chdir(folder)
    os.environ.update(INSTEP_SEED="5", INSTEP_CHECKPOINT=checkpoint, **variables)
    with open("errors.txt", "a") as errors:
        os.dup2(errors.fileno(), 2)
    program.run_program(["train.py", *arguments])


def run(
    folder: Path, name: str = "saved", *, arguments: tuple[str, ...] = (), **variables: str
) -> int | None:
    """The script in a folder, in a process of its own: its exit code."""
    process = forkserver.Process(target=_run, args=(str(folder), name, arguments, variables))
    process.start()
    process.join(60)
    return process.exitcode


def place(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(PRELUDE + textwrap.dedent(text))
    return folder


def assert_equal(actual, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            assert_equal(actual[key], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other)
    else:
        assert actual == expected


def final(folder: Path):
    return torch.load(folder / "final.pt", weights_only=False)


def assert_same_end(killed: Path, alone: Path) -> None:
    assert_equal(final(killed), final(alone))
    for name in ("log.txt", "log.csv"):
        if (alone / name).exists():
            assert (killed / name).read_text() == (alone / name).read_text()


def at_night(*texts: str):
    return [pytest.param(text, marks=pytest.mark.nightly) for text in texts]


@pytest.mark.parametrize("text", [MODULE_LEVEL, *at_night(IN_FUNCTIONS, NANOGPT, FOLDS)])
def test_a_killed_script_goes_on_bit_for_bit(tmp_path, text) -> None:
    alone, killed = place(tmp_path / "alone", text), place(tmp_path / "killed", text)
    assert run(alone) == 0
    (killed / "ends").touch()
    (killed / "fails").touch()
    assert run(killed) == 75
    assert run(killed) == -signal.SIGKILL
    assert "goes on after iteration 3 " in (killed / "errors.txt").read_text()
    assert not (killed / "final.pt").exists()
    assert run(killed) == 0
    assert "goes on after iteration" in (killed / "errors.txt").read_text()
    assert_same_end(killed, alone)


@pytest.mark.nightly
def test_and_so_does_one_whose_batches_are_cut_into_virtual_shards(tmp_path) -> None:
    alone, killed = (
        place(tmp_path / "alone", MODULE_LEVEL),
        place(tmp_path / "killed", MODULE_LEVEL),
    )
    bitwise = {"INSTEP_BITWISE": "4", "OMP_NUM_THREADS": "1"}
    assert run(alone, **bitwise) == 0
    (killed / "fails").touch()
    assert run(killed, **bitwise) == -signal.SIGKILL
    assert run(killed, **bitwise) == 0
    assert "goes on after iteration" in (killed / "errors.txt").read_text()
    assert_same_end(killed, alone)


def test_tensors_that_the_loop_froze_or_gave_another_shape_or_dtype_stay_so(tmp_path) -> None:
    alone = place(tmp_path / "alone", CHANGED_TENSORS)
    killed = place(tmp_path / "killed", CHANGED_TENSORS)
    assert run(alone) == 0
    (killed / "ends").touch()  # after iteration 3, it is saved in any case
    (killed / "fails").touch()
    assert run(killed) == 75
    assert run(killed) == -signal.SIGKILL
    assert run(killed) == 0
    assert_same_end(killed, alone)
    assert final(alone)[3] == [False, False, True, True, True]


def test_a_file_that_the_script_replaces_by_a_rename_is_set_back(tmp_path) -> None:
    alone, killed = (
        place(tmp_path / "alone", RENAMED_FILE),
        place(tmp_path / "killed", RENAMED_FILE),
    )
    assert run(alone) == 0
    (killed / "fails").touch()
    assert run(killed) == -signal.SIGKILL
    assert run(killed) == 0
    assert "is not as it was" not in (killed / "errors.txt").read_text()
    assert_same_end(killed, alone)


def test_files_that_are_appended_to_after_the_last_checkpoint_are_set_back(tmp_path) -> None:
    alone, killed = (
        place(tmp_path / "alone", APPENDS_LATE),
        place(tmp_path / "killed", APPENDS_LATE),
    )
    for folder in (alone, killed):
        (folder / "old.csv").write_text("from before\n")
    assert run(alone) == 0
    (killed / "fails").touch()
    assert run(killed) == -signal.SIGKILL
    assert run(killed) == 0
    for name in ("new.csv", "old.csv"):
        assert (killed / name).read_text() == (alone / name).read_text()
    assert_same_end(killed, alone)
    with open(killed / "results.csv", "a") as file:
        file.write("of another job\n")
    assert run(killed) == 0
    assert (killed / "results.csv").read_text() == "7\nof another job\n7\n"


@pytest.mark.parametrize(
    "text", [FOR_IS_LEFT, pytest.param(WHILE_IS_LEFT, marks=pytest.mark.nightly)]
)
def test_a_signal_in_an_iteration_that_leaves_the_loop_saves_it(tmp_path, text) -> None:
    alone, ended = place(tmp_path / "alone", text), place(tmp_path / "ended", text)
    assert run(alone) == 0
    (ended / "ends").touch()
    assert run(ended) == 75
    assert not (ended / "final.pt").exists()
    assert run(ended) == 0
    said = (ended / "errors.txt").read_text()
    assert "goes on after iteration 3" in said
    assert_same_end(ended, alone)


def test_a_signal_in_an_iteration_that_returns_ends_the_job_and_repeats_it(tmp_path) -> None:
    alone, ended = place(tmp_path / "alone", RETURNS), place(tmp_path / "ended", RETURNS)
    assert run(alone) == 0
    (ended / "ends").touch()
    assert run(ended) == 75
    assert "was left in iteration 3 on a signal" in (ended / "errors.txt").read_text()
    assert not (ended / "final.pt").exists()
    assert run(ended) == 0
    assert "goes on after iteration" in (ended / "errors.txt").read_text()
    assert_same_end(ended, alone)


def test_a_script_that_goes_on_from_its_own_file_is_refused(tmp_path) -> None:
    folder = place(tmp_path, RESUMES_BY_ITSELF)
    (folder / "fails").touch()
    assert run(folder) == -signal.SIGKILL
    assert run(folder) == 1
    errors = (folder / "errors.txt").read_text()
    assert "begins with 6 now, and began with 0. If the script goes on from files" in errors
    (folder / "own.pt").unlink()
    assert run(folder) == 0
    assert torch.load(folder / "own.pt") == 7


def test_a_script_may_make_a_folder_for_each_run_and_go_there(tmp_path) -> None:
    folder = place(tmp_path, IN_A_FOLDER_OF_ITS_OWN)
    assert run(folder) == 0
    assert run(folder) == 0
    assert "goes on after iteration 3" in (folder / "errors.txt").read_text()
    assert (folder / "epochs.txt").read_text().split() == ["0", "1", "2"]


def test_a_loss_of_iterations_before_the_checkpoint_is_no_smaller_one_after_it(tmp_path) -> None:
    folder = place(tmp_path, LATE_BACKWARD)
    (folder / "ends").touch()
    assert run(folder) == 75
    assert run(folder) == 1
    assert "computed in an iteration before the checkpoint" in (folder / "errors.txt").read_text()


@pytest.mark.nightly
def test_a_signal_after_the_loop_ends_the_script(tmp_path) -> None:
    folder = place(tmp_path, f"{MODULE_LEVEL}os.kill(os.getpid(), signal.SIGTERM)\n")
    assert run(folder) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LIVE_ITERATOR, "batches (_SingleProcessDataLoaderIter) is in"),
        (BOUND_SLOT, "length (method-wrapper) has changed in the loop"),
        (NO_LOOP, "no loop"),
    ],
)
def test_a_script_that_cannot_be_saved_is_refused_with_the_reason(tmp_path, text, reason) -> None:
    folder = place(tmp_path / "refused", text)
    assert run(folder) == 1
    assert reason in (folder / "errors.txt").read_text()


def test_other_arguments_than_those_of_the_saved_run_are_named(tmp_path) -> None:
    folder = place(tmp_path / "other", MODULE_LEVEL)
    for arguments in (("--lr", "0.1"), ("--lr", "0.1"), ("--lr", "0.2")):
        assert run(folder, arguments=arguments) == 0
    same, other = (folder / "errors.txt").read_text().splitlines()
    assert "resumed from" in same
    assert "other arguments" not in same
    assert "; it was saved with other arguments, --lr 0.1, and what is saved" in other


def test_a_checkpoint_of_another_model_is_refused(tmp_path) -> None:
    folder = place(tmp_path / "other", MODULE_LEVEL)
    assert run(folder) == 0
    place(folder, MODULE_LEVEL.replace("16", "6"))
    assert run(folder) == 1
    said = (folder / "errors.txt").read_text()
    assert re.search(r": model\[0\]\.weight has the shape \[6, 6\] now, and had \[16, 6\]", said)
    place(folder, MODULE_LEVEL.replace("optimizer =", "model.double()\noptimizer =", 1))
    assert run(folder) == 1
    assert "is of torch.float64 now, and was of torch.float32" in (
        (folder / "errors.txt").read_text()
    )


def test_a_checkpoint_of_a_script_that_had_another_module_is_refused(tmp_path) -> None:
    folder = tmp_path / "other"
    place(
        folder, f"import turns\n{MODULE_LEVEL}".replace("total = 0\n", "total = turns.n = epoch\n")
    )
    (folder / "turns.py").write_text("n = 0\n")
    assert run(folder) == 0
    place(folder, MODULE_LEVEL)
    assert run(folder) == 1
    said = (folder / "errors.txt").read_text()
    assert "the function or module turns is another object now, or none. Run the script as" in said


@pytest.mark.parametrize(
    ("path", "written"),
    [
        ("model._modules['0']._parameters['weight']", "model[0].weight"),
        (
            "main: net._modules['fc']._modules['a b']._buffers['n'].x['k']",
            "main: net.fc['a b'].n.x['k']",
        ),
        ("""old["_modules['0']"]._modules["it's"]""", """old["_modules['0']"]["it's"]"""),
    ],
)
def test_parts_of_modules_are_named_as_scripts_write_them(path, written) -> None:
    assert as_in_code(path) == written


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (MODULE_LEVEL, "for epoch in range(8):"),
        (IN_FUNCTIONS, "for epoch in range(self.epochs):"),
        (NANOGPT, "while True:"),
        (FOLDS, "for epoch in range(4):"),
    ],
)
def test_the_loop_is_the_outermost_that_counts_and_keeps_its_optimizer(text, line) -> None:
    script = Script("train.py", PRELUDE + text)
    [found] = TrainingLoops([script]).lines(script)
    assert script.lines[found - 1].strip() == line


def test_a_script_that_imports_auto_says_how_it_can_be_saved(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import instep.auto\nprint('it runs')\n")
    environ = os.environ | {"INSTEP_CHECKPOINT": str(tmp_path / "saved")}
    ran = subprocess.run(
        [sys.executable, script], env=environ, timeout=60, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "Start it with instep run --checkpoint" in ran.stderr
    assert not (tmp_path / "saved").exists()
    ran = subprocess.run(
        [sys.executable, "-m", "instep", script],
        env=environ, timeout=60, capture_output=True, text=True,
    )  # fmt: skip
    assert "no loop" in ran.stderr  # it is read before it runs


def launch(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The script in a folder under `instep run` with these options."""
    return subprocess.run(
        [sys.executable, "-m", "instep", "run", *options, "--checkpoint", "saved", "train.py"],
        cwd=folder,
        env=os.environ | {"INSTEP_SEED": "5", "INSTEP_DIVIDE": "always"},
        timeout=90,
        capture_output=True,
        text=True,
    )


@pytest.mark.nightly
@pytest.mark.launch
def test_workers_whose_data_set_has_changed_since_they_started_are_not_started_anew(
    tmp_path,
) -> None:
    ran = launch(place(tmp_path, OLD_WORKERS), "-n", "1")
    assert ran.returncode == 1
    assert "loader (DataLoader) has persistent workers" in ran.stderr


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.parametrize(
    "commands",
    [
        [["-n", "2", "--max-restarts", "1"]],
        [["-n", "2"], ["-n", "3"]],
    ],
    ids=["started again by itself", "at another number of ranks"],
)
def test_a_killed_job_goes_on_with_the_numbers_of_one_process(tmp_path, commands) -> None:
    alone, killed = (
        place(tmp_path / "alone", MODULE_LEVEL),
        place(tmp_path / "killed", MODULE_LEVEL),
    )
    assert run(alone) == 0
    (killed / "ends").touch()
    (killed / "fails").touch()
    ended = launch(killed, "-n", "2")  # SIGTERM comes to rank 1 only
    assert ended.returncode == 75, ended.stderr
    assert ended.stderr.count("was left after iteration 3 on a signal") == 1
    for options in commands:
        ran = launch(killed, *options)
        assert (ran.returncode == 0) == (options is commands[-1]), ran.stderr
    assert "goes on after iteration" in ran.stderr
    assert "starts again" not in ran.stderr
    (state, history, rate, _), (expected, history_alone, rate_alone, _) = (
        final(killed),
        final(alone),
    )
    assert rate == rate_alone
    assert history == pytest.approx(history_alone, rel=1e-4)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4)
    assert (killed / "log.txt").read_text().count("\n") == 8


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.timeout(200)
def test_a_job_goes_on_at_other_numbers_of_ranks_with_the_same_bits(tmp_path) -> None:
    alone, killed = (
        place(tmp_path / "alone", MODULE_LEVEL),
        place(tmp_path / "killed", MODULE_LEVEL),
    )
    bitwise = ("--bitwise", "4")
    assert launch(alone, "-n", "1", *bitwise).returncode == 0
    (killed / "ends").touch()
    (killed / "fails").touch()
    assert launch(killed, "-n", "4", *bitwise).returncode == 75
    assert launch(killed, "-n", "2", *bitwise).returncode != 0
    assert not (killed / "final.pt").exists()
    ended = launch(killed, "-n", "1", *bitwise)
    assert ended.returncode == 0, ended.stderr
    assert "goes on after iteration" in ended.stderr
    assert "starts again" not in ended.stderr
    assert_same_end(killed, alone)
