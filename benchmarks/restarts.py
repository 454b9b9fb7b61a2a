"""How long a job takes after the death of a rank until it trains again.

    python benchmarks/restarts.py --json restarts.json

`instep run -n 2 --max-restarts` trains a small network and saves it every 5 steps. Rank 1 is killed
either early, before the job has standby processes, or later. The time counts from the signal until
rank 0 has done the next two steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from instep.launch.restarts.standbys import DELAY
from machine import machine, quartiles, shown

SCRIPT = """
import os, sys, time
import torch
from torch import nn
import instep

folder = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
model = instep.replicate(model)
optimizer = torch.optim.Adam(model.parameters())
checkpoint = instep.Checkpoint(f"{folder}/saved", model=model, optimizer=optimizer, every=5, keep=2)
log = open(f"{folder}/rank{instep.rank}", "a", buffering=1)
for epoch in checkpoint.epochs(1_000_000):
    for step in range(100):
        loss = nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.write(f"{os.getpid()}\\n")
        checkpoint.step()
        time.sleep(0.02)
"""
RUN = [sys.executable, "-m", "instep", "run", "-n", "2", "--max-restarts", "1000"]
LIMIT = 120.0
"""Seconds after which a job counts as hung."""


class Job:
    """A training of two ranks, and what it has written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "train.py").write_text(SCRIPT)
        with open(folder / "output", "wb") as output:
            self._command = subprocess.Popen(
                [*RUN, str(folder / "train.py"), str(folder)],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
            )

    def processes(self, rank: int) -> list[int]:
        """The process of a rank in each of its steps."""
        file = self._folder / f"rank{rank}"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def wait_for_steps(self, count: int) -> None:
        """Wait until both ranks have done so many more steps."""
        goal = len(self.processes(0)) + count
        self._wait(lambda: len(self.processes(0)) >= goal and bool(self.processes(1)))

    def kill_rank(self) -> float:
        """Kill rank 1, and return the seconds until the job trains again."""
        pid = self.processes(1)[-1]
        os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        self._wait(lambda: self.processes(1)[-1] != pid)
        self.wait_for_steps(2)
        return time.monotonic() - begin

    def end(self) -> None:
        """Terminate it, and wait for its end."""
        self._command.send_signal(signal.SIGTERM)
        self._command.wait(LIMIT)

    def _wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            if time.monotonic() > end or self._command.poll() is not None:
                raise RuntimeError((self._folder / "output").read_text())
            time.sleep(0.005)


def measure(rounds: int, age: float) -> dict[str, list[float]]:
    """Seconds for each kill: early, and when an attempt is `age` seconds old."""
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            job = Job(Path(folder))
            job.wait_for_steps(10)
            seconds["without"].append(job.kill_rank())
            time.sleep(age)
            seconds["with"].append(job.kill_rank())
            job.end()
        print(number, *(f"{name} {values[-1]:.2f} s" for name, values in seconds.items()))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--age", type=float, default=DELAY + 15.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    seconds = measure(asked.rounds, asked.age)
    rows = {
        name: {"seconds": quartiles(values), "all": [round(value, 2) for value in values]}
        for name, values in seconds.items()
    }
    for name, row in rows.items():
        print(f"{name} standby processes: {shown(row['seconds'])} s, longest {max(row['all'])} s")
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
