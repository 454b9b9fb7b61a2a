"""Start and end two ranks under mpirun, again and again on a loaded machine: do all runs end?

    python benchmarks/mpirun_ends.py --runs 200 --at-once 4

Half of the runs are of a script that ends at once, the other half of one whose last collective is
that of batch statistics (Jittor's own test where SUITES names the folder that holds its sources);
each under mpirun of Open MPI and of MPICH. Several run at once, so that the ranks have no core of
their own. 1 if a run fails, or has not ended after --limit seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

SCRIPTS = {
    "ends at once": "",
    "batch norm": """
import torch, instep.jittor as jt
whole = torch.randn(30, 3, 10, 10, generator=torch.Generator().manual_seed(0))
model = instep.replicate(torch.nn.BatchNorm2d(3))
model(whole.chunk(jt.world_size)[jt.rank]).sum().backward()
torch.testing.assert_close(model.running_mean, 0.1 * whole.mean((0, 2, 3)))
""",
}
LAUNCHERS = {
    "Open MPI": ("mpirun.openmpi", "--oversubscribe", "--bind-to", "none", "-n", "2"),
    "MPICH": ("mpirun.mpich", "-n", "2"),
}
WORKER = Path(__file__).parents[1] / "scripts" / "suites" / "worker.py"
JITTORS = "jittor/python/jittor/test/test_mpi_batchnorm.py"
AS_ROOT = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")


def run(script: str, launcher: str, folder: Path, limit: float) -> tuple[str, float]:
    """One run: "ends", or what happened in its place; and its seconds."""
    began = monotonic()
    words: list[object] = ["-m", "instep", folder / f"{script.replace(' ', '_')}.py"]
    suites = os.environ.get("SUITES", "")
    outcomes = Path(tempfile.mkdtemp(dir=folder))
    done = outcomes / "done"
    if suites and script == "batch norm":
        done.write_text("[]")
        words = [WORKER, Path(suites, JITTORS), outcomes / "of"]
    with subprocess.Popen(
        [*LAUNCHERS[launcher], sys.executable, *words],
        env={
            **os.environ,
            **AS_ROOT,
            "OMP_NUM_THREADS": "1",
            "SUITE_COMPAT": "jittor",
            "SUITE_DONE": str(done),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit)
            outcome = "ends" if process.returncode == 0 else f"status {process.returncode}: {said}"
            if done.exists() and not all(map(has_passed, outcomes.glob("of.*.json"))):
                outcome = f"a test fails: {said}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            outcome = f"does not end: {said}"
    return outcome, monotonic() - began


def has_passed(file: Path) -> bool:
    """Whether one of the tests in a file of outcomes has passed, and none has failed."""
    lines = [json.loads(line).get("outcome") for line in file.read_text().splitlines()]
    return "pass" in lines and "fail" not in lines


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one run")
    parser.add_argument("--json", type=Path, help="a file for the counts")
    asked = parser.parse_args()
    kinds = list(itertools.product(SCRIPTS, LAUNCHERS))
    counts = {kind: {"runs": 0, "ended": 0, "longest_s": 0.0} for kind in kinds}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(asked.at_once) as pool:
        for script, text in SCRIPTS.items():
            file = Path(name, f"{script.replace(' ', '_')}.py")
            file.write_text(text and f"import instep{text}")
        turns = list(itertools.islice(itertools.cycle(kinds), asked.runs))
        runs = [pool.submit(run, *kind, Path(name), asked.limit) for kind in turns]
        for kind, each in zip(turns, runs, strict=True):
            outcome, seconds = each.result()
            count = counts[kind]
            count["runs"] += 1
            count["ended"] += outcome == "ends"
            count["longest_s"] = max(count["longest_s"], round(seconds, 1))
            if outcome != "ends":
                print(*kind, outcome, sep=", ", flush=True)
    rows = [{"script": s, "launcher": m, **counts[s, m]} for s, m in kinds]
    for row in rows:
        print(*(f"{key} {value}" for key, value in row.items()), sep=", ")
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    return any(row["ended"] < row["runs"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
