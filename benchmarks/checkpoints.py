"""The share of a training's time that saving takes, at one checkpoint in 50 steps.

    python benchmarks/checkpoints.py --json checkpoints.json

Segments of 50 steps alternate in the same processes: one with `Checkpoint.step()` after each step,
which saves at the first of them, and one without. The write therefore ends within the segment. The
pause is how long the call that saves lasts on the slowest rank: the training waits for the copy
only. The whole share is told twice. `wall` and `cpu` compare the segments, and vary as much as
segments do. `pause_and_write` adds to the pause the processor's time of the thread that writes, and
varies little: on a machine without an idle core, what that thread uses is taken from the steps.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import instep
from instep.training.checkpoint.async_writer import AsyncWriter
from machine import machine, quartiles
from models import workload


class Segment(NamedTuple):
    """Seconds of the slowest rank, and of processors: of all ranks, and of the thread that writes.

    Without a save the pause is 0, and nothing is written.
    """

    wall: float
    cpu: float
    pause: float
    write: float


class Training:
    """SGD with momentum on one rank's batch, and its checkpoint."""

    def __init__(self, model: str, folder: str, steps: int) -> None:
        torch.manual_seed(0)
        load = workload(model)
        self._model, self._inputs, self._targets = load.model, load.inputs, load.targets
        replicated = instep.replicate(load.model)
        self._optimizer = torch.optim.SGD(load.model.parameters(), 0.01, momentum=0.9)
        self._steps = steps
        self._checkpoint = instep.Checkpoint(
            folder, model=replicated, optimizer=self._optimizer, every=steps, keep=2
        )
        self.step()
        for _ in range(steps - 1):  # so that the first step of each segment saves
            self._checkpoint.step()

    def step(self) -> None:
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self._model(self._inputs), self._targets).backward()
        self._optimizer.step()

    def segment(self, *, saves: bool) -> Segment:
        """A segment of steps, all ranks starting together."""
        dist.barrier()
        pause = 0.0
        writes.clear()
        cpu, start = cpu_seconds(), perf_counter()
        for _ in range(self._steps):
            self.step()
            if saves:
                before = perf_counter()
                self._checkpoint.step()
                pause = max(pause, perf_counter() - before)
        wall, cpu = perf_counter() - start, cpu_seconds() - cpu
        if saves:
            self._checkpoint._writer.wait()
        slowest = torch.tensor([wall, pause])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        used = torch.tensor([cpu, sum(writes)])
        dist.all_reduce(used)
        return Segment(slowest[0].item(), used[0].item(), slowest[1].item(), used[1].item())

    def close(self) -> int:
        """How many bytes a checkpoint has. Collective."""
        self._checkpoint.close()
        latest = self._checkpoint.latest()
        assert latest is not None
        return sum(file.stat().st_size for file in latest.iterdir())


writes: list[float] = []
"""Seconds of the processor for each write of this rank."""


def timed_write(write: Callable[..., None], *args: Any) -> None:
    """A write, in its thread."""
    before = thread_time()
    write(*args)
    writes.append(thread_time() - before)


def cpu_seconds() -> float:
    """Of all threads of this process, in the kernel too."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def summary(pairs: list[tuple[Segment, Segment]]) -> dict[str, Any]:
    """Quartiles over pairs of a segment that saves and its neighbour that does not."""
    with_save, without = zip(*pairs, strict=True)
    return {
        "segment_s": statistics.median(each.wall for each in without),
        "pause_ms": quartiles([each.pause * 1e3 for each in with_save]),
        "write_ms": quartiles([each.write * 1e3 for each in with_save]),
        "pause_percent": quartiles([100 * a.pause / b.wall for a, b in pairs]),
        "pause_and_write_percent": quartiles(
            [100 * (a.pause + a.write) / b.wall for a, b in pairs]
        ),
        "wall_percent": quartiles([100 * (a.wall / b.wall - 1) for a, b in pairs]),
        "cpu_percent": quartiles([100 * (a.cpu / b.cpu - 1) for a, b in pairs]),
    }


def rank_main(rank: int, args: argparse.Namespace, temporary: str) -> None:
    """One rank's life."""
    torch.set_num_threads(1)
    instep.init(f"file://{temporary}/store", rank=rank, world_size=args.ranks)
    write = AsyncWriter._write
    AsyncWriter._write = lambda *args: timed_write(write, *args)  # type: ignore[method-assign]
    result: dict[str, Any] = {
        "machine": machine(),
        "ranks": args.ranks,
        "steps": args.steps,
        "models": {},
    }
    for model in args.models:
        training = Training(model, f"{args.folder or temporary}/{model}", args.steps)
        training.segment(saves=True)  # a warm-up
        # Either kind of segment comes first in half of the pairs.
        pairs = []
        for pair in range(args.pairs):
            first = training.segment(saves=bool(pair % 2))
            second = training.segment(saves=not pair % 2)
            pairs.append((first, second) if pair % 2 else (second, first))
        row = result["models"][model] = {"bytes": training.close(), **summary(pairs)}
        if rank == 0:
            show(model, row)
    if rank == 0 and args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


def show(model: str, row: dict[str, Any]) -> None:
    """Lines on the screen."""
    print(f"\n{model}: {row['bytes'] / 1e6:.0f} MB, segments of {row['segment_s']:.1f} s")
    for name, value in row.items():
        if isinstance(value, dict):
            print(f"  {name:24} {{median:7.2f}} ({{q1:.2f}} to {{q3:.2f}})".format(**value))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--folder", help="for the checkpoints; a temporary one if it is not given")
    parser.add_argument("--models", nargs="+", default=["resnet18"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50, help="in each segment")
    parser.add_argument("--pairs", type=int, default=11, help="of segments")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        mp.spawn(rank_main, (args, temporary), nprocs=args.ranks)


if __name__ == "__main__":
    main()
