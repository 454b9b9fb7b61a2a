"""The time of one epoch of a compute-bound model on N ranks of one thread, over one rank's.

python benchmarks/epoch.py --json epoch.json

One rank is a process that has met nobody, with plain PyTorch's memory; several keep what they free.
Set MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ to have all alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import torch
import torch.multiprocessing as mp
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import instep
from machine import machine, ratios
from models import resnet18


def rank_main(rank: int, ranks: int, talking: bool, samples: int, folder: str) -> None:
    """Train for one epoch; rank 0 writes how long it took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if ranks > 1:
        instep.init(f"file://{folder}/store", rank=rank, world_size=ranks)
    data = TensorDataset(torch.randn(samples, 3, 64, 64), torch.randint(0, 1000, (samples,)))
    model = instep.replicate(resnet18()) if talking else resnet18()
    loader = instep.shard(DataLoader(data, batch_size=32, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for epoch in range(2):
        instep.barrier()
        start = perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        instep.barrier()
        if epoch == 1 and rank == 0:  # the first is a warm-up
            Path(folder, "seconds").write_text(str(perf_counter() - start))


def seconds(ranks: int, talking: bool, samples: int) -> float:
    """One epoch on fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (ranks, talking, samples, folder), nprocs=ranks)
        return float(Path(folder, "seconds").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=432)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    runs = {"one rank": (1, True), "instep": (args.ranks, True), "none": (args.ranks, False)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, (ranks, talking) in runs.items():
            times[name].append(seconds(ranks, talking, args.samples))
    result: dict[str, object] = {
        "machine": machine(),
        "ranks": args.ranks,
        "seconds": {name: statistics.median(taken) for name, taken in times.items()},
    }
    for name in ("instep", "none"):
        result[f"{name}_over_one_rank"] = ratios(times[name], times["one rank"])
    print(json.dumps(result, indent=2))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
