"""Plain `python` with all cores against unedited `instep run` with one rank for each core.

    python benchmarks/same_cores.py --json same_cores.json [--only mlp gnn]

The script is benchmarks/scripts/same_cores.py. Both ways run in turns, each in new processes; a
ratio is of the median step of a run to that of the plain run beside it. The first steps, in which
instep compares and measures, are not timed. Rows of the file stay.

Measured beside them, the shares alone: as many plain processes at once as there are ranks, each
with one thread and its share of the batch, which do not communicate. Each makes the whole step of
the optimizer, which instep's ranks may share: instep can be faster.
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

from machine import machine, quartiles, ratios, shown

SCRIPT = Path(__file__).parent / "scripts" / "same_cores.py"
MODELS = (
    *("mlp", "small_cnn", "cnn", "transformer", "lstm", "gnn", "unet", "resnet18", "dcgan", "ppo"),
)
UNDIVIDED = ("gnn", "ppo")
"""Those that the script does not make for a share of the batch."""
OPTIMIZERS = ("sgd", "adam")
SECONDS = 2.0
"""Of the timed steps of one run, about."""
MOST_STEPS, FEWEST_STEPS = 200, 8
FIRST_STEPS, FIRST_SECONDS = 80, 1.5
"""Steps that are not timed, and as many as take so long: by then instep has measured what to
divide, and whether rank 0 is to go on alone."""


def run(way: list[str], *arguments: object) -> tuple[float, bool]:
    """The median step of one run in milliseconds, and whether rank 0 went on alone."""
    command = [sys.executable, *way, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1]), "INS717" in done.stderr


def milliseconds_of_shares(model: str, optimizer: str, steps: int, ranks: int) -> float:
    """The median step of processes that run at once, each with its share of the batch."""
    arguments = (model, optimizer, 10, steps, ranks)
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(ranks)
    ]
    printed = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        sys.exit(f"{' '.join(command)} failed: see above")
    return statistics.median(float(each.split()[-1]) for each in printed)


def compare(model: str, optimizer: str, ranks: int, rounds: int) -> dict[str, Any]:
    """The median steps of both ways, and what instep and the shares take over plain Python."""
    ways = {"plain": [], "instep": ["-m", "instep", "run", "-n", str(ranks)]}
    found: dict[str, list[float]] = {name: [] for name in ways}
    shares: list[float] = []
    alone = 0
    per_step, _ = run([], model, optimizer, 10, FEWEST_STEPS)
    steps = min(MOST_STEPS, max(FEWEST_STEPS, round(SECONDS * 1000 / per_step)))
    first = FIRST_STEPS + round(FIRST_SECONDS * 1000 / per_step)
    for _ in range(rounds):
        for name, way in ways.items():
            step, is_alone = run(way, model, optimizer, first, steps)
            found[name].append(step)
            alone += is_alone
        if model not in UNDIVIDED:
            shares.append(milliseconds_of_shares(model, optimizer, steps, ranks))
    return {
        "first": first,
        "steps": steps,
        "alone": f"{alone} of {rounds}",
        "shares_over_plain": ratios(shares, found["plain"]) if shares else None,
        "plain_ms": statistics.median(found["plain"]),
        "instep_ms": statistics.median(found["instep"]),
        "instep_over_plain": ratios(found["instep"], found["plain"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--ranks", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    file = Path(args.json) if args.json else None
    models: dict[str, Any] = {}
    if file is not None and file.exists():
        models = json.loads(file.read_text())["models"]
    for model in args.only:
        for optimizer in OPTIMIZERS:
            row = compare(model, optimizer, args.ranks, args.rounds)
            models.setdefault(model, {})[optimizer] = row
            print(model, optimizer, shown(row["instep_over_plain"]), row, flush=True)
            result = {
                "machine": machine(),
                "ranks": args.ranks,
                "all": quartiles(
                    [r["instep_over_plain"]["median"] for m in models.values() for r in m.values()]
                ),
                "models": {name: models[name] for name in MODELS if name in models},
            }
            if file is not None:
                file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
