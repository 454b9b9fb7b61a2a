"""How long two ranks take to start, meet and end, beside two bare processes that do the same.

    python benchmarks/startup.py --json startup.json

The ways take turns in shuffled rounds; the ratio to the bare processes of the same round counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from machine import machine, quartiles, ratios, shown

TORCH_HELLO = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
INSTEP_HELLO = """
import torch
import instep

instep.barrier()
"""
RUN = [sys.executable, "-m", "instep", "run", "-n", "2"]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
]
Way = Callable[[], None]


def bare(script: Path) -> Way:
    """Two processes that are told who they are, and nothing around them."""

    def way() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        ranks = [
            subprocess.Popen([sys.executable, script], env=environ() | told | {"RANK": str(rank)})
            for rank in range(2)
        ]
        assert [rank.wait() for rank in ranks] == [0, 0]

    return way


def launched(command: list[str], script: Path) -> Way:
    """By a launcher."""

    def way() -> None:
        subprocess.run([*command, str(script)], env=environ(), check=True)

    return way


def environ() -> dict[str, str]:
    """The same for all: one thread each, loopback only, nothing compiled anew."""
    told = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONDONTWRITEBYTECODE": ""}
    return os.environ | told


def measure(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Seconds by way, one figure for each round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    shuffler = random.Random(0)
    for turn in range(rounds + 1):
        for name in shuffler.sample(list(ways), len(ways)):
            start = perf_counter()
            ways[name]()
            if turn:  # the first warms the file cache
                times[name].append(perf_counter() - start)
    return times


def summary(times: dict[str, list[float]], base: str) -> dict[str, Any]:
    """Quartiles of the seconds, and of the ratios within each round."""
    return {
        name: {"seconds": quartiles(taken), "over_bare": ratios(taken, times[base])}
        for name, taken in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torchs, ours = Path(folder, "torch_hello.py"), Path(folder, "instep_hello.py")
        torchs.write_text(TORCH_HELLO)
        ours.write_text(INSTEP_HELLO)
        ways = {
            "bare processes": bare(torchs),
            "instep run": launched(RUN, torchs),
            "instep run, instep.barrier()": launched(RUN, ours),
            "torchrun": launched(TORCHRUN, torchs),
        }
        rows = summary(measure(ways, args.rounds), "bare processes")
    for name, row in rows.items():
        print(f"{name:29} {row['seconds']['median']:6.2f} s  {shown(row['over_bare'])} x bare")
    if args.json:
        result = {"machine": machine(), "rounds": args.rounds, "rows": rows}
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
