"""Frames per second of PPO, unedited on N ranks over plain `python`, each process with one thread.

    .venv-unedited/bin/python benchmarks/ppo.py --json ppo.json

The scripts are those of unedited_cases, with more frames. Both ways run in turns; a ratio is of a
run to the plain one beside it. The time is that of all frames, with the trials of the first calls.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from machine import machine, ratios, shown

CASES = Path(__file__).parent / "unedited_cases"


class Case(NamedTuple):
    """What the loop of a case begins with."""

    begins: str
    count: str
    """The number in it, which is replaced by a larger one."""
    frames: int
    """How many each of these is."""


PPO = {
    "sb3_ppo": Case("model.learn(512)", "512", 1),
    "cleanrl_ppo": Case("for update in range(4)", "4", 256),
}


def frames_per_second(name: str, way: list[str], frames: int) -> float:
    """Of one run."""
    case = PPO[name]
    text = (CASES / f"{name}.py").read_text()
    count = frames // case.frames
    loop = case.begins.replace(case.count, str(count))
    assert text.count(case.begins) == 1
    head, tail = text.split(case.begins)
    text = f"{head}import time\nbegan = time.perf_counter()\n{loop}{tail}"
    text += f"\nprint({count * case.frames} / (time.perf_counter() - began))\n"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, f"{name}.py")
        script.write_text(text)
        done = subprocess.run(
            [sys.executable, *way, str(script)],
            check=True,
            capture_output=True,
            text=True,
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--frames", type=int, default=51200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    ways = {"plain": [], "instep": ["-m", "instep", "run", "-n", str(args.ranks)]}
    scripts: dict[str, Any] = {}
    for name in PPO:
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.rounds):
            for way, command in ways.items():
                found[way].append(frames_per_second(name, command, args.frames))
        row: dict[str, Any] = {way: statistics.median(each) for way, each in found.items()}
        row["instep_over_plain"] = ratios(found["instep"], found["plain"])
        scripts[name] = row
        print(name, shown(row["instep_over_plain"]), row, flush=True)
    if args.json:
        result = {
            "machine": machine(),
            "ranks": args.ranks,
            "frames": args.frames,
            "scripts": scripts,
        }
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
