"""One copy of parameters and Adam's state for all ranks of a host, and one for each rank.

    python benchmarks/host_copy.py --json host_copy.json

The script is benchmarks/scripts/host_copy.py, unedited. Both ways run in turns, each in new
processes. The memory is that of rank 0 times the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from machine import machine, ratios, shown

SCRIPT = Path(__file__).parent / "scripts" / "host_copy.py"
WAYS = ("off", "on")
"""Values of INSTEP_HOST_COPY."""


def train(ranks: int, way: str, steps: int) -> tuple[float, float]:
    """The milliseconds of a step, and the MiB of all ranks."""
    command = [sys.executable, "-m", "instep", "run", "-n", str(ranks), str(SCRIPT), str(steps)]
    environ = {**os.environ, "INSTEP_HOST_COPY": way}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    milliseconds, mib = map(float, done.stdout.split()[-2:])
    return milliseconds, mib * ranks


def compare(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Medians of both ways, and the ratios of those with one copy to the others."""
    found = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            found[way].append(train(ranks, way, args.steps))
    result: dict[str, Any] = {}
    for way in WAYS:
        for name, values in zip(("ms", "mib"), zip(*found[way], strict=True), strict=True):
            result[f"{way}_{name}"] = statistics.median(values)
    for k, name in enumerate(("step", "memory")):
        result[name] = ratios(*([each[k] for each in found[way]] for way in reversed(WAYS)))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for ranks in args.ranks:
        rows[str(ranks)] = row = compare(ranks, args)
        print(ranks, "ranks: step", shown(row["step"]), "memory", shown(row["memory"]), row)
    if args.json:
        result = {"machine": machine(), "ranks": rows}
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
