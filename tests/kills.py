"""Kill the processes of a training at random, and compare what comes of it with an undisturbed run.

    python tests/kills.py --kills 300 --json kills.json

The file is written after each training. If it exists, the command goes on from it until there are
as many kills in all; `--minutes` limits the time of one such piece.

The training is a small one of digits with noise and dropout, and saves an `instep.Checkpoint`
every few steps. SIGKILL comes to a rank, to rank 0 while it writes a checkpoint, to the supervisor
(the command is then given again), or to a whole host, which is a network and process namespace.
The final parameters have to be those of the undisturbed run, bit for bit, each sample of each
epoch has to be in one step, and no checkpoint may ever be unreadable.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import networks
from launching import LAUNCHER_VARIABLES
from machine import machine

TARGETS = ("rank", "writer", "supervisor", "host")
RANKS = 2
EPOCHS = 3
EVERY = 5
"""Steps between two checkpoints."""
LIMIT = 60.0
"""Seconds without a step after which a job counts as hung."""
SCRIPT = f"""
import importlib.util, json, os, sys
import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import instep

folder = sys.argv[1]


class Digits(Dataset):
    def __init__(self):
        # The file of scikit-learn, which itself takes a second to import.
        [package] = importlib.util.find_spec("sklearn").submodule_search_locations
        digits = numpy.loadtxt(package + "/datasets/data/digits.csv.gz", delimiter=",")
        self.x = torch.tensor(digits[:, :-1] / 16, dtype=torch.float32)
        self.y = torch.tensor(digits[:, -1]).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.rand(64), self.y[index], index


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
model = instep.replicate(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, {EPOCHS})
loader = instep.shard(DataLoader(Digits(), batch_size=64, shuffle=True))
checkpoint = instep.Checkpoint(
    folder + "/saved", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader,
    every={EVERY}, keep=3,
)
log = open(f"{{folder}}/rank{{instep.rank}}.jsonl", "a", buffering=1)
with open(f"{{folder}}/rank{{instep.rank}}.pid", "w") as file:
    file.write(str(os.getpid()))
for epoch in checkpoint.epochs({EPOCHS}):
    for x, y, index in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.write(json.dumps([instep.world_size, checkpoint.steps, epoch, index.tolist()]) + "\\n")
        checkpoint.step()
    scheduler.step()
if instep.rank == 0:
    torch.save(model.state_dict(), folder + "/final.pt")
"""


@dataclass
class Outcome:
    """What came of the kills of one or several trainings."""

    kills: Counter[str] = field(default_factory=Counter)
    trainings: int = 0
    wrong: list[str] = field(default_factory=list)
    """Each thing that is not as in the undisturbed run."""
    seconds_until_step: list[float] = field(default_factory=list)
    """From the death of a rank until the job's next step."""
    drafts_left: int = 0
    """How many kills have left a draft of a checkpoint: the writer was in mid-write."""
    oracle: dict[str, str] = field(default_factory=dict)
    """The fingerprint of the undisturbed training."""

    @property
    def count(self) -> int:
        """How many kills there were."""
        return sum(self.kills.values())

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Outcome:
        """Of the file of an earlier piece."""
        return cls(
            Counter(found["kills"]),
            found["trainings"],
            found["wrong"],
            found["seconds from a rank's death to the next step"]["all"],
            found["kills that left a draft"],
            found["undisturbed"],
        )

    def as_json(self) -> dict[str, object]:
        """For the file."""
        waits = sorted(self.seconds_until_step)
        return {
            "machine": machine(),
            "kills": dict(self.kills),
            "kills that left a draft": self.drafts_left,
            "trainings": self.trainings,
            "wrong": self.wrong,
            "undisturbed": self.oracle,
            "seconds from a rank's death to the next step": {
                "median": round(waits[len(waits) // 2], 2) if waits else None,
                "longest": round(waits[-1], 2) if waits else None,
                "all": [round(wait, 2) for wait in waits],
            },
        }


class Training:
    """One training in a folder, and the processes that run it at the moment."""

    def __init__(self, folder: Path, hosts: networks.TwoHosts | None = None) -> None:
        self.folder = folder
        self.hosts = hosts
        self._script = folder / "train.py"
        self._script.write_text(SCRIPT)
        self._commands: list[subprocess.Popen[bytes]] = []
        self._starts = 0

    def start(self) -> None:
        """Give the command, on both hosts if there are two."""
        self._starts += 1
        words = [sys.executable, "-m", "instep", "run", "--max-restarts", "1000"]
        program = [self._script, self.folder]
        for host in range(1 if self.hosts is None else 2):
            command = [*words, "-n", str(RANKS), *program]
            if self.hosts is not None:
                master = f"{self.hosts.addresses[0]}:{29000 + self._starts % 900}"
                place = ["--nnodes", "2", "--node-rank", str(host), "--master", master]
                command = self.hosts.on(host, *words, "-n", 1, *place, *program)
            with open(self.folder / "output.txt", "ab") as output:
                self._commands.append(
                    subprocess.Popen(
                        [*map(str, command)], env=_environment(), stdout=output, stderr=output
                    )
                )

    def wait(self) -> bool:
        """Wait for the end of the commands; whether all ended well."""
        codes = [command.wait(LIMIT * 2) for command in self._commands]
        self._commands.clear()
        return codes == [0] * len(codes)

    def is_over(self) -> bool:
        """Whether a command has ended by itself."""
        return any(command.poll() is not None for command in self._commands)

    def steps(self) -> int:
        """How many lines rank 0 has logged, over all attempts."""
        try:
            return (self.folder / "rank0.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, by their numbers."""
        found = []
        for rank in range(RANKS):
            with suppress(FileNotFoundError, ValueError, psutil.NoSuchProcess):
                found.append(psutil.Process(int((self.folder / f"rank{rank}.pid").read_text())))
        return found

    def kill_command(self, number: int = -1) -> None:
        """Kill the supervisor of a host, and wait for the end of all of its ranks."""
        left = psutil.Process(self._commands[number].pid).children(recursive=True)
        self._commands[number].send_signal(signal.SIGKILL)
        psutil.wait_procs(left, timeout=LIMIT)
        self.wait_or_kill()

    def wait_or_kill(self) -> None:
        """Wait for the commands, none of which can go on."""
        for command in self._commands:
            try:
                command.wait(20)
            except subprocess.TimeoutExpired:
                command.kill()
                command.wait()
        self._commands.clear()

    def is_writing(self) -> bool:
        """Whether there is a draft of a checkpoint."""
        return any((self.folder / "saved").glob(".step-*.draft"))


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    return {**kept, "OMP_NUM_THREADS": "1"}


def _wait_until(condition: Callable[[], bool], limit: float = LIMIT) -> bool:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.001)
    return False


def disturb(training: Training, target: str, numbers: random.Random, outcome: Outcome) -> bool:
    """Kill one process, or a host, at a moment between two steps; False if the training is over."""
    begin = training.steps()
    goal = begin + numbers.randint(1, 12)
    came = _wait_until(lambda: training.steps() >= goal or training.is_over())
    if not came:
        outcome.wrong.append(f"no step for {LIMIT:.0f} s")
        training.kill_command()
        return False
    ranks = training.ranks()  # first, because it takes longer than a checkpoint is written
    if target == "writer" and not _wait_until(
        lambda: training.is_writing() or training.is_over(), 5.0
    ):
        return True
    time.sleep(numbers.random() * 0.004)
    if training.is_over():
        return False
    if target in ("rank", "writer"):
        if len(ranks) < RANKS:
            return not training.is_over()
        seen = training.steps()
        victim = ranks[0 if target == "writer" else numbers.randrange(RANKS)]
        victim.kill()
        killed = time.monotonic()
        outcome.kills[target] += 1
        psutil.wait_procs([victim], timeout=LIMIT)
        outcome.drafts_left += training.is_writing()
        if _wait_until(lambda: training.steps() > seen + 1 or training.is_over()):
            outcome.seconds_until_step.append(time.monotonic() - killed)
        return not training.is_over()
    training.kill_command(numbers.randrange(2) if training.hosts else 0)
    outcome.kills[target] += 1
    training.start()
    return True


def verify(training: Training, oracle: dict[str, str], outcome: Outcome) -> None:
    """Compare a training that has ended with the undisturbed one."""
    if not training.wait():
        text = (training.folder / "output.txt").read_text(errors="replace")
        outcome.wrong.append(f"the job failed:\n{text[-3000:]}")
        return
    digest = fingerprint(training.folder)
    outcome.wrong += [f"{name} differs" for name in oracle if digest[name] != oracle[name]]
    text = (training.folder / "output.txt").read_text(errors="replace")
    if "is damaged" in text:
        outcome.wrong.append("a checkpoint was damaged")


def fingerprint(folder: Path) -> dict[str, str]:
    """Of the parameters, of the samples of each step, and whether each sample was in one step."""
    import torch

    final = torch.load(folder / "final.pt", weights_only=True)
    parameters = hashlib.sha256(b"".join(v.numpy().tobytes() for v in final.values()))
    steps: dict[tuple[int, int], list[int]] = {}
    for rank in range(RANKS):
        for line in (folder / f"rank{rank}.jsonl").read_text().splitlines():
            try:
                _, step, epoch, indices = json.loads(line)
            except ValueError:  # torn by a kill, and written again
                continue
            steps[step, rank] = [epoch, *indices]  # the last time counts
    seen: dict[int, Counter[int]] = {}
    for epoch, *indices in steps.values():
        seen.setdefault(epoch, Counter()).update(indices)
    once = all(set(count.values()) == {1} for count in seen.values())
    order = hashlib.sha256(json.dumps(sorted(steps.items())).encode())
    return {
        "parameters": parameters.hexdigest(),
        "order of samples": order.hexdigest(),
        "samples": f"{[len(count) for _, count in sorted(seen.items())]} once: {once}",
    }


def run(
    kills: int,
    targets: Sequence[str],
    seed: int,
    per_training: int,
    after_each: Callable[[Outcome], None],
    *,
    so_far: Outcome | None = None,
    seconds: float = float("inf"),
) -> Outcome:
    """Kill so many times, in trainings of `per_training` kills each.

    Goes on from the outcome `so_far`. No training begins after `seconds`.
    """
    outcome = so_far or Outcome()
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        oracle = undisturbed(_new(folder / "oracle"))
        if outcome.oracle not in ({}, oracle):
            raise ValueError("the undisturbed training is not that of the file")
        outcome.oracle = oracle
        while outcome.count < kills and not outcome.wrong and time.monotonic() < end:
            numbers = random.Random(f"{seed} {outcome.trainings}")
            place = _new(folder / f"training{outcome.trainings}")
            if "host" in targets and (targets == ["host"] or numbers.random() < 0.15):
                with networks.TwoHosts() as hosts:
                    training = Training(place, hosts)
                    _disturb_often(training, ["host"], numbers, outcome, per_training)
                    verify(training, oracle, outcome)
            else:
                training = Training(place)
                others = [target for target in targets if target != "host"]
                _disturb_often(training, others, numbers, outcome, per_training)
                verify(training, oracle, outcome)
            outcome.trainings += 1
            after_each(outcome)
    return outcome


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def undisturbed(folder: Path) -> dict[str, str]:
    """The fingerprint of a training that nobody disturbs."""
    training = Training(folder)
    training.start()
    if not training.wait():
        raise RuntimeError((folder / "output.txt").read_text(errors="replace"))
    return fingerprint(folder)


def _disturb_often(
    training: Training, targets: Sequence[str], numbers: random.Random, outcome: Outcome, most: int
) -> None:
    training.start()
    for _ in range(most):
        if not disturb(training, numbers.choice(targets), numbers, outcome):
            return


def main() -> int:
    """Kill, print what came of it, and write the file; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--per-training", type=int, default=8)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    asked = parser.parse_args()
    targets = [*asked.targets]
    if "host" in targets and (why := networks.missing()):
        print(f"no hosts are killed: {why}")
        targets.remove("host")

    def write(outcome: Outcome) -> None:
        print(f"{outcome.count} kills, {outcome.trainings} trainings", flush=True)
        if asked.json:
            draft = asked.json.with_suffix(".draft")
            draft.write_text(json.dumps(outcome.as_json(), indent=2) + "\n")
            draft.replace(asked.json)

    so_far = None
    if asked.json and asked.json.exists():
        so_far = Outcome.from_json(json.loads(asked.json.read_text()))
    outcome = run(
        asked.kills,
        targets,
        asked.seed,
        asked.per_training,
        write,
        so_far=so_far,
        seconds=60 * asked.minutes,
    )
    print(json.dumps(outcome.as_json(), indent=2))
    return bool(outcome.wrong)


if __name__ == "__main__":
    sys.exit(main())
