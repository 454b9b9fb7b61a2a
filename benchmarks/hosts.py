"""all_reduce over several hosts: through the shared memory of each, against Gloo alone.

    python benchmarks/hosts.py [--ranks 2,2 --rate 10gbit] [--blocks 9] [--json FILE]

The hosts are network namespaces of this machine, joined by cables (root and iproute2 are needed);
`--ranks` is the number of ranks of each, `--rate` how fast its cable is, by default as fast as the
processor. Without either, all of `SHAPES` are measured. In each block of a size all contenders run,
in shuffled order, in the same processes; what counts is the ratio inside a block.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import instep
from instep.distributed.communication.transport import get_transport
from machine import machine, ratios, shown

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import networks

REPEATS = {1: 100, 1 << 10: 100, 1 << 16: 20, 1 << 20: 10, 1 << 24: 2}
SHAPES = [
    ((2, 2), None),
    ((2, 2), "1gbit"),
    ((2, 2), "10gbit"),
    ((2, 1), "1gbit"),
    ((2, 2, 2), "1gbit"),
    ((2, 2, 1, 1), "1gbit"),
]
Blocks = dict[str, list[dict[str, float]]]


def measure(blocks: int) -> Blocks:
    """Per size, the seconds of each contender in each block; the same order on all ranks."""
    torch.set_num_threads(1)
    instep.init()
    gloo = dist.new_group(backend="gloo")
    contenders: dict[str, Callable[[torch.Tensor], object]] = {
        "gloo": lambda values: dist.all_reduce(values, group=gloo),
        "instep": dist.all_reduce,
        "instep, bf16": lambda values: get_transport().sum_rounded(values, torch.bfloat16).wait(),
    }
    order = random.Random(0)
    plan = [numel for numel in REPEATS for _ in range(blocks + 1)]
    order.shuffle(plan)
    results: Blocks = {str(numel): [] for numel in REPEATS}
    for numel in plan:
        values = torch.zeros(numel)
        block = {}
        for name in order.sample(list(contenders), len(contenders)):
            block[name] = seconds_of_one(contenders[name], values, REPEATS[numel])
        results[str(numel)].append({name: block[name] for name in contenders})
    return {numel: measured[1:] for numel, measured in results.items()}  # the first warms up


def seconds_of_one(
    call: Callable[[torch.Tensor], object], values: torch.Tensor, repeats: int
) -> float:
    """The mean time of calls that follow each other, as the layers of a model issue them.

    Not with a barrier between them: Gloo's threads still work on the barrier while the call runs.
    """
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call(values)
    return (time.perf_counter() - start) / repeats


def run(ranks: tuple[int, ...], rate: str | None, blocks: int) -> Blocks:
    """Start this file on hosts with so many ranks each; what rank 0 measured."""
    made = networks.TwoHosts(rate) if len(ranks) == 2 else networks.Hosts(len(ranks), rate)
    with tempfile.TemporaryDirectory() as folder, made as hosts:
        result = Path(folder, "result")
        there = ["--nnodes", len(ranks), "--master", f"{hosts.addresses[0]}:29471"]
        command = [sys.executable, "-m", "instep", "run", "--plain", *there]
        this = [__file__, "--blocks", blocks, "--result", result]
        started = [
            subprocess.Popen(hosts.on(host, *command, "-n", count, "--node-rank", host, *this))
            for host, count in enumerate(ranks)
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit("a host failed")
        measured: Blocks = json.loads(result.read_text())
    return measured


def summary(blocks: list[dict[str, float]], shortest: float | None) -> dict[str, Any]:
    """Median microseconds of each contender, and quartiles of the ratios inside a block.

    `shortest`: the seconds that the cable needs for a tensor of this size, if it has a rate.
    """
    columns = {name: [block[name] for block in blocks] for name in blocks[0]}
    row = {
        "microseconds": {name: statistics.median(c) * 1e6 for name, c in columns.items()},
        "gloo / instep": ratios(columns["gloo"], columns["instep"]),
        "bf16 / instep": ratios(columns["instep, bf16"], columns["instep"]),
    }
    if shortest is not None:
        row["instep / cable"] = ratios(columns["instep"], [shortest] * len(blocks))
    return row


def seconds_of_cable(hosts: int, numel: int, rate: str | None) -> float | None:
    """How long the sum of so many float32 takes at least: each host sends 2 (H - 1) / H of them.

    R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in
    MPICH, 2005. TCP's and IP's headers are 52 of 1,500 bytes, Ethernet's 14 more. The shaper of the
    cable lets 1 MB pass at once, so that 4 MB may take a little less.
    """
    if rate is None:
        return None
    bits_per_second = float(rate.removesuffix("gbit")) * 1e9
    return 2 * (hosts - 1) / hosts * numel * 32 * (1514 / 1448) / bits_per_second


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", help="of each host: 2,2")
    parser.add_argument("--rate", help="of each cable: 10gbit")
    parser.add_argument("--blocks", type=int, default=9, help="blocks per size")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # this process is a rank
    asked = parser.parse_args()
    if asked.result:
        measured = measure(asked.blocks)
        if instep.rank == 0:
            asked.result.write_text(json.dumps(measured))
        return
    shapes = SHAPES
    if asked.ranks or asked.rate:
        shapes = [(tuple(map(int, (asked.ranks or "2,2").split(","))), asked.rate)]
    told = []
    for ranks, rate in shapes:
        blocks = run(ranks, rate, asked.blocks)
        sizes = {
            numel: summary(rows, seconds_of_cable(len(ranks), int(numel), rate))
            for numel, rows in blocks.items()
        }
        told.append({"ranks": ranks, "rate": rate, "sizes": sizes, "blocks": blocks})
        print(f"hosts of {ranks} ranks, {rate or 'no rate'}   (us; median (quartiles))")
        for numel, row in sizes.items():
            times = " ".join(f"{time:10.0f}" for time in row["microseconds"].values())
            ratio = "   ".join(f"{name} {shown(row[name])}" for name in list(row)[1:])
            print(f"{numel:>10} {times}   {ratio}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine(), "shapes": told}, indent=1))


if __name__ == "__main__":
    main()
