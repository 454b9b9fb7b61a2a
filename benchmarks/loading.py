"""The time of one epoch of loading in an unedited script, on N ranks over one rank's.

python benchmarks/loading.py --json loading.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter, sleep

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import instep
from instep.unedited.data.loaders import iterate
from machine import machine, quartiles, ratios

BATCH_SIZE = 32


class Costly(Dataset[tuple[Tensor, int]]):
    """Pictures that take `seconds` each: waiting (a disk, a network) or computing (a codec)."""

    def __init__(self, samples: int, seconds: float, computing: bool, edge: int) -> None:
        self.samples, self.seconds, self.computing, self.edge = samples, seconds, computing, edge

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        begun = perf_counter()
        while self.computing and perf_counter() - begun < self.seconds:
            pass
        if not self.computing:
            sleep(self.seconds)
        return torch.full((3, self.edge, self.edge), float(index)), index


def rank_main(rank: int, ranks: int, workers: int, data: Costly, plain: bool, folder: str) -> None:
    """Load two epochs; rank 0 writes how long the second took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if ranks > 1:
        instep.init(f"file://{folder}/store", rank=rank, world_size=ranks)
    more = {"num_workers": workers, "persistent_workers": True} if workers else {}
    loader = DataLoader(data, BATCH_SIZE, shuffle=True, **more)  # type: ignore[arg-type]
    for epoch in range(2):
        instep.barrier()
        begun = perf_counter()
        for _ in loader if plain else iterate(DataLoader.__iter__, loader):
            pass
        instep.barrier()
        if epoch == 1 and rank == 0:  # the first is a warm-up
            Path(folder, "seconds").write_text(str(perf_counter() - begun))


def seconds(ranks: int, workers: int, data: Costly, plain: bool) -> float:
    """One epoch on fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (ranks, workers, data, plain, folder), nprocs=ranks)
        return float(Path(folder, "seconds").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--samples", type=int, default=320)
    parser.add_argument("--ms", type=float, default=10.0, help="what a sample costs")
    parser.add_argument("--computing", action="store_true", help="it costs a core, not a wait")
    parser.add_argument("--edge", type=int, default=224, help="of a picture, in pixels")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    data = Costly(args.samples, args.ms / 1000, args.computing, args.edge)
    runs = {"plain": (1, True), "one rank": (1, False), "instep": (args.ranks, False)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, (ranks, plain) in runs.items():
            times[name].append(seconds(ranks, args.workers, data, plain))
    options = {name: value for name, value in vars(args).items() if name != "json"}
    result: dict[str, object] = {
        "machine": machine(),
        **options,
        "seconds": {name: quartiles(taken) for name, taken in times.items()},
        "instep_over_one_rank": ratios(times["instep"], times["one rank"]),
    }
    print(json.dumps(result, indent=2))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
