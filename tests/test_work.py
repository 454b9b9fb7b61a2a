"""What a step of two ranks costs in the steady state, in counts: however long the job has run, and
whatever the script keeps or makes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from launching import Launch

pytestmark = [pytest.mark.slow, pytest.mark.launch]

SCRIPT = """\
import gc, json, os, sys
from collections import Counter
from statistics import median_high
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def training():
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 3)
    )
    data = TensorDataset(torch.randn(72, 8), torch.randint(3, (72,)))
    return model, DataLoader(data, 12, shuffle=True)

torch.manual_seed(0)
model, loader = training()
{lines}
optimizer = torch.optim.SGD(model.parameters(), 0.01)
step, waits = Counter(), set()

def note(frame, event, argument):
    code = frame.f_code
    if "/instep/" not in code.co_filename:
        return
    name = code.co_qualname
    if name == "Signals._wait" and event in ("call", "return"):
        waits.symmetric_difference_update({{frame}})  # it takes turns until the other rank comes
    if waits:
        return
    step["functions"] += event == "call"
    step["in C"] += event == "c_call"
    if event == "call":
        step["collectives"] += name == "FlightRecorder.enter"
        step["barriers"] += name == "Signals.barrier"
        step["messages"] += name in ("Connection.send", "Connection.send_line")
        step["nodes"] += name.endswith(".visit") or name.startswith("ObjectGraph.")

def run_epochs(count, kept=None, steps=None):
    for _ in range(count):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if kept is not None:
                kept.append((x, y, loss))
            if steps is not None:
                steps.append(Counter(step))
                step.clear()

def counted():
    steps = []
    sys.setprofile(note)
    run_epochs(1, steps=steps)
    sys.setprofile(None)
    gc.collect()
    names = set().union(*steps)
    work = {{name: median_high(each[name] for each in steps[1:]) for name in names}}
    return work | {{"objects": len(gc.get_objects())}}

found, kept = {{}}, []
run_epochs(5)
counted()
found["first"] = counted()
run_epochs(20)
found["after many steps"] = counted()
run_epochs(10, kept)
found["with batches and losses kept"] = counted()
others = []
for _ in range(4):
    {makes}
found["with what else it has made"] = counted()
with open(os.path.join(os.environ["COUNTS"], str(os.getpid())), "w") as file:
    json.dump(found, file)
"""
TWO_LINES = {
    "lines": """\
import instep
from instep.training.draws import replica_draws
replica_draws._MAX_DRAWS = 8  # so many stay
model, loader = instep.replicate(model), instep.shard(loader)""",
    "makes": "others.append(instep.group([0, 1]))",
}
UNEDITED = {
    "lines": "",
    "makes": "others.append(training())\n    others[-1][0](next(iter(others[-1][1]))[0])",
}
STEPS_BETWEEN = 120
"""The first time of counting and the second."""


def work_of_ranks(folder: Path, door: dict[str, str]) -> Iterator[dict[str, dict[str, int]]]:
    """What each rank has counted, at each time."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(**door))
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as counts,  # where each rank itself writes
        closing(Launch(folder, ("run", "-n", "2"))) as launch,
    ):
        ended = launch.run_forked(script, environ={"COUNTS": counts})
        assert ended.returncode == 0, ended.stderr
        files = [*Path(counts).iterdir()]
        assert len(files) == 2, ended.stderr
        for file in files:
            yield json.loads(file.read_text())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("door", "most"),
    [
        pytest.param(
            TWO_LINES,
            {"collectives": 3, "barriers": 3, "nodes": 6, "functions": 1000, "in C": 900},
            id="two lines",
        ),
        pytest.param(
            UNEDITED,
            {"collectives": 5, "barriers": 5, "nodes": 20, "functions": 2000, "in C": 2000},
            id="unedited",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_step_costs_the_same_however_late_it_is_and_whatever_is_kept(
    tmp_path: Path, door: dict[str, str], most: dict[str, int]
) -> None:
    """A collective more in each step is found here, and a step that looks at all that there is."""
    for rank in work_of_ranks(tmp_path, door):
        first = rank["first"]
        for time, work in rank.items():
            assert work["messages"] == 0, time  # from this process to its watcher
            for name, limit in most.items():
                assert work[name] <= limit, (time, name)
                assert work[name] <= 1.02 * first[name] + 2, (time, name)
        made = rank["after many steps"]["objects"] - first["objects"]
        assert made < STEPS_BETWEEN / 2, "each step leaves an object"
