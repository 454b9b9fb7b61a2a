"""What it costs to watch a training: steps with everything on over steps with everything off.

    python benchmarks/watching.py --json watching.json

On: watchers beside the ranks, reports of stalls, comparisons of parameters, the look for gradients
that are not finite. Off: none of them. The flight record has no switch. Runs of step.py alternate;
each gives the time of a step over one without communication, in the same processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import machine

OFF = {
    "INSTEP_WATCH": "off",
    "INSTEP_STALL_SECONDS": "0",
    "INSTEP_DRIFT_STEPS": "0",
    "INSTEP_NAN": "off",
}
STEP = Path(__file__).with_name("step.py")


def time_step(model: str, environ: dict[str, str], folder: Path) -> float:
    """A step of instep over one without communication, in one run of step.py."""
    file = folder / "step.json"
    words = ["--models", model, "--strategies", "none", "instep", "--blocks", "21"]
    subprocess.run(
        [sys.executable, STEP, *words, "--json", file],
        env={**os.environ, **environ},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    ratio: float = json.loads(file.read_text())["models"][model]["instep"]["over_none"]["median"]
    return ratio


def main() -> None:
    """Alternate runs, print the medians and their quotient, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--runs", type=int, default=6, help="of each kind (6)")
    asked = parser.parse_args()
    found: dict[str, list[float]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(asked.runs):
            for kind in random.sample(["on", "off"], 2):
                environ = OFF if kind == "off" else {}
                found[kind].append(time_step(asked.model, environ, Path(folder)))
    medians = {kind: statistics.median(ratios) for kind, ratios in found.items()}
    told = {
        "machine": machine(),
        "model": asked.model,
        "step over none": found,
        "medians": medians,
        "on over off": medians["on"] / medians["off"],
    }
    print(json.dumps(told, indent=2))
    if asked.json:
        asked.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
