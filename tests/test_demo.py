"""A first script of many lessons about DistributedDataParallel: one step of two layers on random
numbers, its devices by rank modulo their number, under the launchers that the lessons name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from instep.check.checker import check_script
from instep.check.rules import RULES
from instep.check.script import Script

pytestmark = pytest.mark.launch

STAND_IN = Path(__file__).parents[1] / "scripts" / "suites" / "cuda_stand_in"
SCRIPT = """\
import json
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 5)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def one_step():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    print(f"rank {rank} is here")
    device = rank % torch.cuda.device_count()
    model = DDP(TwoLayers().to(device), device_ids=[device])
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    before = [p.sum().item() for p in model.parameters()]
    optimizer.zero_grad()
    torch.manual_seed(rank)
    inputs = torch.randn(3, 10)
    labels = torch.randn(3, WIDTH).to(device)
    outputs = model(inputs)
    loss = loss_fn(outputs, labels)
    loss.backward()
    optimizer.step()
    after = [p.sum().item() for p in model.parameters()]
    with open(f"rank{rank}.json", "w") as file:
        json.dump([dist.get_world_size(), loss.item(), before, after], file)


if __name__ == "__main__":
    one_step()
"""
LAUNCHERS = {
    "torch.distributed.launch": ("torch.distributed.launch", "--nproc_per_node", "2"),
    "torchrun": ("torch.distributed.run", "--nproc-per-node", "2"),
}


def launched(
    folder: Path, launcher: str, width: int, gpus: int
) -> subprocess.CompletedProcess[str]:
    """Two ranks of it, with CPUs in the place of GPUs; "instep run" or a launcher of PyTorch's."""
    (folder / "demo.py").write_text(SCRIPT.replace("WIDTH", str(width)))
    words = ["instep", "run", "-n", "2", "demo.py"]
    if launcher != "instep run":
        name, *options = LAUNCHERS[launcher]
        words = [name, "--standalone", *options, "-m", "instep", "demo.py"]
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(STAND_IN), "SUITE_GPUS": str(gpus), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("launcher", "gpus"),
    [
        pytest.param("torch.distributed.launch", 2, marks=pytest.mark.nightly),
        pytest.param("torchrun", 1, marks=pytest.mark.nightly),
        ("instep run", 2),
    ],
)
def test_two_ranks_take_one_step_together(tmp_path: Path, launcher: str, gpus: int) -> None:
    done = launched(tmp_path, launcher, 5, gpus)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank (\d) is here", done.stdout)) == ["0", "1"]
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    (world, loss, before, after), other = told
    assert world == 2
    assert loss != other[1]  # each has rows of its own
    assert [before, after] == other[2:]  # and both one model
    assert all(old != new for old, new in zip(before, after, strict=True))


@pytest.mark.nightly
def test_labels_of_another_width_than_the_outputs_end_it(tmp_path: Path) -> None:
    """As in the lesson itself: 10 numbers to a row, where the model gives 5."""
    done = launched(tmp_path, "torchrun", 10, 2)
    assert done.returncode != 0
    assert "The size of tensor a (5) must match the size of tensor b (10)" in done.stderr


def test_labels_of_another_width_than_the_outputs_are_found_by_the_check() -> None:
    (finding,) = check_script(Script("demo.py", SCRIPT.replace("WIDTH", "10")), RULES.values())
    assert (finding.code, finding.line) == ("INS406", 32)
    assert finding.message == "rows of 5 numbers are compared with rows of 10"
    assert not check_script(Script("demo.py", SCRIPT.replace("WIDTH", "5")), RULES.values())
