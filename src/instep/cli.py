"""The command `instep`: read the command line, hand it to whoever does the work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from instep.errors import CommandLineError, LaunchError, VerificationError
from instep.launch import supervisor
from instep.launch.job import Job
from instep.verify.command import add_command

RUN = """\
Run a script on N processes of this host, as `python script.py` would on one.

Each rank finds its place in the usual variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...).
When a rank fails, the others are stopped and its traceback is printed, once and last; the exit
code is that of the rank that failed first. Everything after the script's name belongs to the
script. `-m module` runs a module, as `python -m module` would.
"""
OUTPUT = """\
what becomes of the other ranks' output; rank 0 has this terminal.
prefix (the default): each line, with the rank before it, like "[1] loss 0.5".
rank0: nothing, except the traceback of the rank that failed.
DIR: files rank0.out, rank0.err, rank1.out, ... in this directory, for every rank, rank 0 too"""


WITH_VALUE = ("-n", "--output", "--steps", "--json", "--plot")
"""Our options that take the next word as their value."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise CommandLineError(f"{message}. See {self.prog} --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2 when it cannot be done as asked."""
    try:
        ours, program = _split(sys.argv[1:] if argv is None else argv)
        asked = _parser().parse_args(ours)
        code: int = asked.command(asked, tuple(program))
        return code
    except (LaunchError, VerificationError) as error:
        print(f"instep: {error}", file=sys.stderr)
        return 2


def _run(asked: argparse.Namespace, program: tuple[str, ...]) -> int:
    return supervisor.run(Job(asked.n, program, asked.output))


def _split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Our words, and the user's program: `script.py args…` or `-m module args…`.

    Not argparse's work: its REMAINDER loses a `--` among the program's arguments.
    """
    at = 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("-m", "--"):
        at += 2 if argv[at] in WITH_VALUE else 1
    program = argv[at:]
    return argv[:at], program[1:] if program[:1] == ["--"] else program


def _number_of_ranks(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise CommandLineError.number_of_ranks(value) from None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("instep", description="Write for one process, run on many.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    run = commands.add_parser(
        "run",
        help="run a script on several processes of this host",
        description=RUN,
        usage="instep run -n N [--output prefix|rank0|DIR] (script.py | -m module) [args ...]",
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    run.set_defaults(command=_run)
    run.add_argument("-n", required=True, type=_number_of_ranks, metavar="N", help="how many ranks")
    run.add_argument("--output", default="prefix", metavar="prefix|rank0|DIR", help=OUTPUT)
    add_command(commands)
    return parser
