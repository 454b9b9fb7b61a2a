"""The main job: examples/digits.py on 1, 2 and 3 processes, and the difference of their results.

Writes demo/curves.png and demo/result.json.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZES = (1, 2, 3)
SCRIPT = Path(__file__).with_name("digits.py")
FOLDER = Path("demo")


def train(n: int) -> dict[str, Any]:
    """Run the script on n processes; return its history and parameters."""
    save = FOLDER / f"n{n}"
    command = [
        sys.executable,
        "-m",
        "instep",
        "run",
        "-n",
        str(n),
        str(SCRIPT),
        "--save",
        str(save),
    ]
    print(f"$ instep run -n {n} examples/digits.py", flush=True)
    subprocess.run(command, check=True)
    history: dict[str, Any] = json.loads(save.with_suffix(".json").read_text())
    state = torch.load(save.with_suffix(".pt"))
    parameters = torch.cat([tensor.double().reshape(-1) for tensor in state.values()])
    return history | {"n": n, "parameters": parameters}


def summary(run: dict[str, Any], oracle: dict[str, Any]) -> dict[str, Any]:
    """Compare a run with the run on one process."""
    theirs, ours = run["parameters"], oracle["parameters"]
    pairs = zip(run["losses"], oracle["losses"], strict=True)
    return {
        "n": run["n"],
        "test_accuracy": run["test_accuracy"],
        "final_loss": run["losses"][-1],
        "loss_difference": max(abs(a - b) for a, b in pairs),
        "relative_difference": ((theirs - ours).norm() / ours.norm()).item(),
        "samples_per_rank": run["samples_per_rank"],
        "seconds": run["seconds"],
    }


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Plot the loss curves over each other, and below them their differences."""
    figure, (curves, apart) = plt.subplots(
        2, 1, figsize=(7.2, 5.4), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    for run, width in zip(runs, (7, 4, 1.5), strict=True):
        label = f"{run['n']} process{'es' * (run['n'] > 1)}"
        curves.semilogy(run["losses"], linewidth=width, alpha=0.8, label=label)
    curves.set_ylabel("loss of the whole batch")
    curves.set_title("examples/digits.py: the same numbers on 1, 2 and 3 processes")
    curves.legend()
    for run, colour in zip(runs[1:], ("C1", "C2"), strict=True):
        pairs = zip(run["losses"], runs[0]["losses"], strict=True)
        apart.semilogy(
            [max(abs(a - b), 1e-12) for a, b in pairs], ".", color=colour, markersize=3,
            label=f"{run['n']} processes",
        )  # fmt: skip
    apart.set_ylim(1e-12, 1)
    apart.set_ylabel("difference to 1")
    apart.set_xlabel("step")
    apart.legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    runs = [train(n) for n in SIZES]
    rows = [summary(run, runs[0]) for run in runs]
    (FOLDER / "result.json").write_text(json.dumps({"runs": rows}, indent=2) + "\n")
    draw(runs, FOLDER / "curves.png")
    print("\n n  test accuracy  final loss  loss difference  relative difference  samples per rank")
    for row in rows:
        print(
            f"{row['n']:2}  {row['test_accuracy']:13.4f}  {row['final_loss']:10.6f}"
            f"  {row['loss_difference']:15.1e}  {row['relative_difference']:19.1e}"
            f"  {row['samples_per_rank']}"
        )
    print(f"\nwrote {FOLDER / 'curves.png'} and {FOLDER / 'result.json'}")


if __name__ == "__main__":
    main()
