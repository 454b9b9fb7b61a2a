"""`instep verify` on the command line: read and check what is asked."""

from __future__ import annotations

import argparse
import importlib.util
import os
from typing import Any

from instep.errors import CommandLineError
from instep.launch.job import Job
from instep.launch.signals import exit_on_signal
from instep.process import settings

DESCRIPTION = """\
Prove that a script gives the same numbers on several ranks as in one process.

Runs it at each N, compares every run with one process on the whole batch (instep run -n 1), and
says SAME, SAME WITHIN ITS OWN NOISE or DIFFERENT; where runs part, at which step, in which tensor
and what the likely cause is. The script gets no input and its output is kept back.

The exit code is 0 for the first two verdicts, 1 for DIFFERENT, 2 when the script cannot be judged.
"""

WITH_VALUE = ("-n", "--steps", "--json", "--plot")
"""Options that take the next word as their value."""


def add_command(commands: Any) -> None:
    """Add it to the subparsers of `instep`."""
    parser = commands.add_parser(
        "verify",
        help="prove that a script gives the same numbers on several ranks",
        description=DESCRIPTION,
        usage="instep verify -n 1,2,3 [--steps K] [--json FILE] [--plot FILE.png] "
        "(script.py | -m module) [args ...]",
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=run)
    parser.add_argument(
        "-n",
        required=True,
        type=_difference_cells,
        metavar="N,N",
        help="the numbers of ranks; 1 is always run too, as what the others are compared with",
    )
    parser.add_argument(
        "--steps", type=_steps, metavar="K", help="end the script after K optimizer steps"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report there as JSON")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the loss curves there")


def run(asked: argparse.Namespace, program: tuple[str, ...]) -> int:
    """Do it and return the exit code. Raises CommandLineError, VerificationError."""
    settings.check_variables()
    job = Job(max(asked.n), program)
    for path in (asked.json, asked.plot):
        _check_writable(path)
    if asked.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandLineError(
            "--plot needs matplotlib. Install it with: pip install 'instep[plot]'"
        )
    # Not on top: it brings torch, and `instep run` starts without.
    from instep.verify.verification import run_and_report

    with exit_on_signal():
        return run_and_report(job.command, asked.n, asked.steps, asked.json, asked.plot)


def _difference_cells(value: str) -> list[int]:
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
