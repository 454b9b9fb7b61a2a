"""all_reduce over several hosts: through the shared memory of each, against Gloo alone.

    python benchmarks/hosts.py [--hosts 2] [--ranks 2] [--rate 10gbit] [--blocks 15] [--json FILE]

The hosts are network namespaces of this machine, joined by cables (root and iproute2 are needed);
`--rate` is how fast the cable is, by default as fast as the processor. In each block of a size both
contenders run, in shuffled order, in the same processes; what counts is the ratio inside a block.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import instep
from collectives import seconds
from machine import machine, ratios, shown

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import networks

SIZES = (1, 1 << 10, 1 << 16, 1 << 20, 1 << 24)
REPEATS = {1: 100, 1 << 10: 100, 1 << 16: 20, 1 << 20: 10, 1 << 24: 2}


def measure(blocks: int) -> dict[str, list[dict[str, float]]]:
    """Per size, the seconds of each contender in each block; the same order on all ranks."""
    torch.set_num_threads(1)
    instep.init()
    groups = {"gloo": dist.new_group(backend="gloo"), "instep": dist.group.WORLD}
    order = random.Random(0)
    plan = [numel for numel in SIZES for _ in range(blocks + 1)]
    order.shuffle(plan)
    results: dict[str, list[dict[str, float]]] = {str(numel): [] for numel in SIZES}
    for numel in plan:
        values = torch.zeros(numel)
        block = {}
        for name in order.sample(list(groups), len(groups)):
            work = lambda group=groups[name]: dist.all_reduce(values, group=group)  # noqa: B023, E731
            block[name] = seconds((work, lambda: values.fill_(1.0)), REPEATS[numel])  # noqa: B023
        results[str(numel)].append(block)
    return {numel: measured[1:] for numel, measured in results.items()}  # the first warms up


def run(count: int, ranks: int, rate: str | None, blocks: int) -> dict[str, list[dict[str, float]]]:
    """Start this file on `count` hosts; what rank 0 measured."""
    made = networks.TwoHosts(rate) if count == 2 else networks.Hosts(count, rate)
    with tempfile.TemporaryDirectory() as folder, made as hosts:
        result = Path(folder, "result")
        this = [__file__, "--blocks", str(blocks), "--result", str(result)]
        there = [
            "--nnodes",
            str(count),
            "--master",
            f"{hosts.addresses[0]}:29471",
            "-n",
            str(ranks),
        ]
        command = [sys.executable, "-m", "instep", "run", "--plain", *there]
        started = [
            subprocess.Popen(hosts.on(host, *command, "--node-rank", host, *this))
            for host in range(count)
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit("a host failed")
        measured: dict[str, list[dict[str, float]]] = json.loads(result.read_text())
    return measured


def summary(blocks: list[dict[str, float]]) -> dict[str, Any]:
    """Median microseconds of each contender, and quartiles of the ratio inside a block."""
    columns = {name: [block[name] for block in blocks] for name in ("gloo", "instep")}
    return {
        "microseconds": {name: statistics.median(c) * 1e6 for name, c in columns.items()},
        "gloo / instep": ratios(columns["gloo"], columns["instep"]),
    }


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--rate", help="of the cable, as tc writes it: 10gbit")
    parser.add_argument("--blocks", type=int, default=15, help="blocks per size")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # this process is a rank
    asked = parser.parse_args()
    if asked.result:
        measured = measure(asked.blocks)
        if instep.rank == 0:
            asked.result.write_text(json.dumps(measured))
        return
    blocks = run(asked.hosts, asked.ranks, asked.rate, asked.blocks)
    sizes = {numel: summary(rows) for numel, rows in blocks.items()}
    print(f"{'floats':>10} {'gloo':>10} {'instep':>10}   gloo / instep   (us; median (quartiles))")
    for numel, row in sizes.items():
        times = [f"{row['microseconds'][name]:10.1f}" for name in ("gloo", "instep")]
        print(f"{numel:>10} {' '.join(times)}   {shown(row['gloo / instep'])}")
    if asked.json:
        told = {
            "hosts": asked.hosts,
            "ranks": asked.hosts * asked.ranks,
            "rate": asked.rate,
            "machine": machine(),
        }
        asked.json.write_text(json.dumps(told | {"sizes": sizes, "blocks": blocks}, indent=1))


if __name__ == "__main__":
    main()
