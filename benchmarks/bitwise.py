"""Whether trainings have the same bits at any number of ranks with --bitwise, and what it costs.

    python benchmarks/bitwise.py --json bitwise.json
    python benchmarks/bitwise.py --json bitwise.json --only digits gru --measure bits

The second writes its figures into the file of the first, after each training.

Bits: each training of scripts/small_trainings.py on 1, 2, 4 and 8 ranks with 8 virtual shards; it
prints the sha256 of all parameters, buffers and optimizer states. Cost: the median step on 2 ranks
of one thread with --bitwise over one without, and on 1 rank over plain Python, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import machine, ratios, shown

SCRIPT = Path(__file__).parent / "scripts" / "small_trainings.py"
SIZES = (1, 2, 4, 8)
SHARDS = 8
TRAININGS = (
    *("digits", "small resnet18", "transformer", "mlp", "dcgan", "gru", "accumulation"),
    *("bfloat16", "few rows"),
)
TIMED = ("resnet18", "transformer", "mlp")
ALL = tuple(dict.fromkeys((*TRAININGS, *TIMED)))


def train(name: str, steps: int, options: Sequence[str] | None) -> tuple[float, str]:
    """The median seconds of a step, and the digest; options None: plain Python."""
    launcher = [] if options is None else ["-m", "instep", "run", *options]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), name, str(steps)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "INSTEP_SEED": "0", "INSTEP_DIVIDE": "always"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds, digest = done.stdout.split()
    return float(seconds), digest


def bits(name: str, steps: int) -> dict[str, str]:
    """The digest at each number of ranks."""
    fixed = ["--bitwise", str(SHARDS)]
    return {str(n): train(name, steps, ["-n", str(n), *fixed])[1] for n in SIZES}


def cost(name: str, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """Quartiles of the ratios of a step with --bitwise."""
    fixed = ["--bitwise", str(SHARDS)]
    blocks = [
        [
            train(name, steps, options)[0]
            for options in (["-n", "2"], ["-n", "2", *fixed], None, ["-n", "1", *fixed])
        ]
        for _ in range(rounds)
    ]
    two, two_fixed, plain, one_fixed = zip(*blocks, strict=True)
    return {"2 ranks": ratios(two_fixed, two), "1 rank over plain": ratios(one_fixed, plain)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=500, help="of each training whose bits count")
    parser.add_argument("--timed-steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=ALL, choices=ALL)
    parser.add_argument("--measure", nargs="*", default=("bits", "cost"), choices=("bits", "cost"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    result: dict[str, Any] = {"bits": {}, "cost": {}}
    if asked.json and asked.json.exists():
        result = json.loads(asked.json.read_text())
    result["machine"] = machine()

    def write() -> None:
        if asked.json:
            asked.json.write_text(json.dumps(result, indent=1))

    asked_for = [name for name in TRAININGS if name in asked.only]
    for name in asked_for if "bits" in asked.measure else ():
        digests = bits(name, asked.steps)
        same = len(set(digests.values())) == 1
        result["bits"][name] = {"steps": asked.steps, "identical": same, "sha256": digests}
        print(name, asked.steps, "steps:", "identical" if same else "DIFFERENT", digests["1"])
        write()
    for name in set(TIMED) & set(asked.only) if "cost" in asked.measure else ():
        result["cost"][name] = cost(name, asked.timed_steps, asked.rounds)
        print(name, *(f"{key} {shown(value)}" for key, value in result["cost"][name].items()))
        write()


if __name__ == "__main__":
    main()
