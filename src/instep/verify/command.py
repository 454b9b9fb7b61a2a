"""`instep verify` on the command line."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
from typing import Any

from instep.distributed.identity import launchers
from instep.errors import CommandLineError
from instep.launch.default_ranks import check_program
from instep.launch.job import Job
from instep.launch.signals import exit_on_signal
from instep.process import settings

DESCRIPTION = """\
Verify that a script gives the same numbers on several ranks as in one process.

The script runs with each number of ranks, and every run is compared with one process on the whole
batch (instep run -n 1). The verdict is SAME, SAME WITHIN ITS OWN NOISE or DIFFERENT. If runs
diverge, the report names the first step, the tensor and the likely cause. The script gets no
input, and its output is not shown. After each run the files that it has changed are put back, and
those that it has made are removed.

The exit code is 0 for the first two verdicts, 1 for DIFFERENT, and 2 if no verdict is possible.
"""

BITWISE = """\
run with instep run --bitwise V and compare bytes at every step: IDENTICAL, or the first step and
value whose bits differ"""

OVERWRITE = """\
do not put files back: each run writes over the script's files, and finds those of the run before"""


def add_command(commands: Any) -> None:
    """Add it to the subparsers of `instep`."""
    parser = commands.add_parser(
        "verify",
        help="verify that a script gives the same numbers on several ranks",
        description=DESCRIPTION,
        usage="instep verify -n 1,2,3 [--steps K] [--bitwise V] [--overwrite] [--json FILE] "
        "[--plot FILE.png] (script.py | -m module) [args ...]",
    )
    parser.add_argument(
        "-n",
        type=_rank_counts,
        metavar="N,N",
        help="numbers of ranks; the others are compared with 1, which always runs too",
    )
    parser.add_argument(
        "--steps", type=_steps, metavar="K", help="stop the script after K optimizer steps"
    )
    parser.add_argument("--bitwise", type=int, metavar="V", help=BITWISE)
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON to this file")
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE)
    parser.add_argument("--plot", metavar="FILE.png", help="plot the loss curves to this file")


def run(asked: argparse.Namespace, program: tuple[str, ...]) -> int:
    """Verify the script and return the exit code. Raises CommandLineError, VerificationError."""
    settings.check_variables()
    if asked.n is None:
        check_program(program, "verify")
        line = shlex.join(program) or "train.py"
        raise CommandLineError(f"say at which numbers of ranks: instep verify -n 1,2 {line}")
    if (tasks := launchers.detect_tasks().size) > 1:
        raise CommandLineError(
            f"instep verify starts all ranks itself, and {tasks} tasks run it at once. Start it "
            "once, without mpirun or srun."
        )
    job = Job(max(asked.n), program)
    for path in (asked.json, asked.plot):
        _check_writable(path)
    if asked.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandLineError("--plot needs matplotlib. Install it with: pip install matplotlib")
    if asked.bitwise is not None and (asked.json is not None or asked.plot is not None):
        raise CommandLineError("--bitwise prints its report; leave --json and --plot out.")
    # Not at the top: they import torch, and `instep run` must start without.
    from instep.verify.bit_comparison import run_and_report_bits
    from instep.verify.runs import InstepRunStarter
    from instep.verify.verification import run_and_report

    variables = {} if asked.bitwise is None else {settings.BITWISE.name: str(asked.bitwise)}
    start = InstepRunStarter(variables, overwrite=asked.overwrite)
    with exit_on_signal():
        if asked.bitwise is not None:
            return run_and_report_bits(job.command, asked.n, asked.bitwise, start, asked.steps)
        return run_and_report(job.command, asked.n, start, asked.steps, asked.json, asked.plot)


def _rank_counts(value: str) -> list[int]:
    try:
        sizes = [int(part) for part in value.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise CommandLineError(f"-n takes numbers of ranks such as 1,2,3, not {value!r}.")
    return sizes


def _steps(value: str) -> int:
    try:
        steps = int(value)
    except ValueError:
        steps = 0
    if steps < 1:
        raise CommandLineError(f"--steps takes a whole number from 1 up, not {value!r}.")
    return steps


def _check_writable(path: str | None) -> None:
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise CommandLineError(
            f"cannot write {path}: its folder may not be written, or it is a folder."
        )
