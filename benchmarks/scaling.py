"""From 1 to 64 ranks on one machine: a step, the memory of a rank, the time until all have met.

    python benchmarks/scaling.py --json scaling.json

Every configuration is started anew in each round, in shuffled order. Ranks have one thread each;
where there are more of them than cores they take turns, and a step takes longer for that alone:
compare the backends at the same number of ranks. Nothing is extrapolated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import instep
from machine import machine

WIDTH, ROWS = 512, 8
BACKENDS = ("shm", "gloo", "none")


def rank_main(rank: int, ranks: int, backend: str, steps: int, folder: str) -> None:
    """One rank: meet, train, and say what it took."""
    torch.set_num_threads(1)
    os.environ["INSTEP_BACKEND"] = "gloo" if backend == "none" else backend
    begun = perf_counter()
    if ranks > 1:
        instep.init(f"file://{folder}/store", rank=rank, world_size=ranks)
    instep.barrier()
    met = perf_counter() - begun
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    if backend != "none":
        instep.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    x, y = torch.randn(ROWS, WIDTH), torch.randint(0, WIDTH, (ROWS,))
    taken = []
    for _ in range(steps):
        instep.barrier()
        start = perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        taken.append(perf_counter() - start)
    facts = torch.tensor([met, statistics.median(taken[1:]), memory_mib()])
    slowest = instep.all_reduce(facts, "max")
    if rank == 0:
        Path(folder, "facts").write_text(json.dumps(slowest.tolist()))
    instep.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def memory_mib() -> float:
    """This process' part of the memory; what it shares counts once, in equal parts."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    pss = next(line for line in lines if line.startswith("Pss:"))
    return int(pss.split()[1]) / 1024


def facts(ranks: int, backend: str, steps: int) -> dict[str, float]:
    """The slowest and the largest rank's figures of one start."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (ranks, backend, steps, folder), nprocs=ranks)
        met, step, memory = json.loads(Path(folder, "facts").read_text())
    return {"meeting_s": met, "step_ms": step * 1e3, "memory_mib": memory}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    wanted = [(n, b) for n, b in product(args.ranks, BACKENDS) if n > 1 or b == "none"]
    runs: dict[tuple[int, str], list[dict[str, float]]] = {which: [] for which in wanted}
    shuffler = random.Random(0)
    for _ in range(args.rounds):
        for ranks, backend in shuffler.sample(wanted, len(wanted)):
            runs[ranks, backend].append(facts(ranks, backend, args.steps))
    rows = [
        {"ranks": ranks, "backend": backend}
        | {key: statistics.median(run[key] for run in taken) for key in taken[0]}
        for (ranks, backend), taken in runs.items()
    ]
    print(f"{'ranks':>5} {'backend':8} {'step, ms':>9} {'memory, MiB':>12} {'meeting, s':>11}")
    for row in rows:
        print(
            "{ranks:>5} {backend:8} {step_ms:9.2f} {memory_mib:12.0f} {meeting_s:11.2f}".format(
                **row
            )
        )
    if args.json:
        result: dict[str, Any] = {"machine": machine(), "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
