"""all_reduce through shared memory against Gloo, on this machine.

    python benchmarks/collectives.py [--ranks 2] [--blocks 15] [--json FILE]

In each block of a size all contenders run, in shuffled order, in the same processes; what counts is
the ratio inside a block. The table shows medians and quartiles over the blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import instep.shm  # noqa: F401 - makes the backend known
from machine import machine, ratios, shown

SIZES = (1, 1 << 10, 1 << 16, 1 << 20, 1 << 24)
REPEATS = {1: 200, 1 << 10: 200, 1 << 16: 50, 1 << 20: 20, 1 << 24: 3}


Contender = tuple[Callable[[], object], Callable[[], object]]


def contenders(numel: int, gloo: dist.ProcessGroup) -> dict[str, Contender]:
    """What is timed for float32 tensors of `numel` elements, and what is done before, untimed.

    Each rank writes its values anew before each call, as a backward pass would: otherwise a part
    of a resident bucket stays in the cache of the rank that reduced it last.
    """
    tensor, other = torch.ones(numel), torch.empty(numel)
    bucket = dist.group.WORLD.resident(numel)

    def over(group: dist.ProcessGroup | None, values: Tensor) -> Contender:
        return lambda: dist.all_reduce(values, group=group), lambda: values.fill_(1.0)

    return {
        "gloo": over(gloo, torch.zeros(numel)),
        "instep": over(None, torch.zeros(numel)),
        "resident": (bucket.all_reduce, lambda: bucket.tensor.fill_(1.0)),
        "copy": (lambda: other.copy_(tensor), lambda: tensor.fill_(1.0)),
    }


def seconds(contender: Contender, repeats: int) -> float:
    """Median time of one call; the ranks start at once."""
    call, prepare = contender
    times = []
    for _ in range(repeats):
        prepare()
        dist.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(blocks: int) -> dict[str, list[dict[str, float]]]:
    """Per size, the seconds of each contender in each block; the same order on all ranks."""
    order = random.Random(0)
    gloo = dist.new_group(backend="gloo")
    calls = {numel: contenders(numel, gloo) for numel in SIZES}
    plan = [numel for numel in SIZES for _ in range(blocks + 1)]
    order.shuffle(plan)
    results: dict[str, list[dict[str, float]]] = {str(numel): [] for numel in SIZES}
    for numel in plan:
        names = list(calls[numel])
        order.shuffle(names)
        block = {name: seconds(calls[numel][name], REPEATS[numel]) for name in names}
        results[str(numel)].append(block)
    return {numel: blocks_[1:] for numel, blocks_ in results.items()}  # the first warms up


def rank_main(rank: int, ranks: int, store: str, blocks: int, result: str) -> None:
    """One rank; rank 0 writes what it measured."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("instep", init_method=f"file://{store}", rank=rank, world_size=ranks)
    measured = measure(blocks)
    if rank == 0:
        Path(result).write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def summary(blocks: list[dict[str, float]]) -> dict[str, Any]:
    """Median microseconds of each contender, and quartiles of the ratios inside a block."""
    return {
        "microseconds": {
            name: statistics.median(block[name] for block in blocks) * 1e6 for name in blocks[0]
        },
        **{
            f"{a} / {b}": ratios([block[a] for block in blocks], [block[b] for block in blocks])
            for a, b in (("gloo", "instep"), ("resident", "copy"), ("instep", "copy"))
        },
    }


def table(sizes: dict[str, dict[str, Any]]) -> str:
    """The summaries of all sizes, for people."""
    lines = [
        f"{'floats':>10} {'gloo':>9} {'instep':>9} {'resident':>9} {'copy':>9}  "
        f"{'gloo / instep':>22} {'resident / copy':>22}   (microseconds; median [quartiles])"
    ]
    for numel, row in sizes.items():
        times = row["microseconds"]
        found = [shown(row[name]) for name in ("gloo / instep", "resident / copy")]
        lines.append(
            f"{numel:>10} "
            + " ".join(f"{times[n]:9.1f}" for n in ("gloo", "instep", "resident", "copy"))
            + "  "
            + " ".join(f"{ratio:>22}" for ratio in found)
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=15, help="blocks per size")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store, result = f"{folder}/store", f"{folder}/result"
        mp.spawn(
            rank_main, (arguments.ranks, store, arguments.blocks, result), nprocs=arguments.ranks
        )
        blocks = json.loads(Path(result).read_text())
    sizes = {numel: summary(rows) for numel, rows in blocks.items()}
    print(table(sizes))
    if arguments.json:
        facts = {"ranks": arguments.ranks, "machine": machine(), "sizes": sizes, "blocks": blocks}
        arguments.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
