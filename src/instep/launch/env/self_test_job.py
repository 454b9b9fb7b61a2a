"""`instep env --selftest` without a launcher: the jobs that it starts."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time

from instep.distributed.identity import accelerators, launchers
from instep.launch.env.failing_rank import MESSAGE
from instep.process import settings

_SECONDS = 120


def must_start() -> bool:
    """Whether no launcher has started this process."""
    return launchers.JOB not in os.environ and launchers.detect().size == 1


def start(as_json: bool) -> int:
    """Run the tests on a rank for each accelerator of this host, or on two; returns the exit code.

    Prints the report, and what came of a job in which a rank fails.
    """
    ranks = _number_of_ranks()
    words = ["env", "--selftest", *(["--json"] if as_json else [])]
    first = _run(ranks, "instep", *words)
    verdict, seconds = _let_a_rank_fail(max(ranks, 2)) if first.returncode == 0 else ("", 0.0)
    if as_json and first.returncode == 0:
        report = json.loads(first.stdout) | {"failure": {"verdict": verdict, "seconds": seconds}}
        print(json.dumps(report, indent=2))
    else:
        print(first.stdout, end="")
        print(first.stderr, end="", file=sys.stderr)
        if first.returncode == 0:
            where = "" if ranks > 1 else " (on the CPU)"
            print(f"failure of a rank{where}: {verdict} ({seconds:.1f} s)")
        if ranks == 1:
            print("There is one device, so no ranks were compared. On the CPU: INSTEP_DEVICE=cpu.")
    return first.returncode or int(verdict != "ok")


def _number_of_ranks() -> int:
    if str(settings.DEVICE) == "cpu":
        return 2
    found = accelerators.find_on_host()
    return 2 if found is None else len(found[1])


def _let_a_rank_fail(ranks: int) -> tuple[str, float]:
    """The verdict, and how long the job took from its start."""
    begun = time.perf_counter()
    one_device = _number_of_ranks() < 2
    ran = _run(
        ranks, "instep.launch.env.failing_rank", **({"INSTEP_DEVICE": "cpu"} if one_device else {})
    )
    seconds = time.perf_counter() - begun
    if ran.returncode == 0:
        return "THE JOB ENDED AS IF NOTHING HAD FAILED", seconds
    if f"rank {ranks - 1}" not in ran.stderr or MESSAGE not in ran.stderr:
        return f"THE RANK WAS NOT NAMED: {ran.stderr.strip()[-300:]}", seconds
    return "ok", seconds


def _run(ranks: int, *module: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "instep", "run", "-n", str(ranks), "-m", *module]
    try:
        return subprocess.run(
            command, env={**os.environ, **environ}, capture_output=True, text=True, check=False,
            timeout=_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        told = [part.decode() for part in (error.stdout, error.stderr) if isinstance(part, bytes)]
        late = f"It had not ended after {_SECONDS} seconds, and was killed: {shlex.join(command)}"
        return subprocess.CompletedProcess(command, 1, "", "\n".join([*told, late, ""]))
