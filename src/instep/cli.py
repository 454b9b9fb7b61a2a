"""The command `instep`: read the command line, hand it to whoever does the work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from instep.errors import CommandLineError, LaunchError
from instep.launch import supervisor
from instep.launch.job import Job

RUN = """\
Run a script on N processes of this host, as `python script.py` would on one.

Each rank finds its place in the usual variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...).
When a rank fails, the others are stopped and its traceback is printed, once and last; the exit
code is that of the rank that failed first. Everything after the script's name belongs to the
script.
"""
OUTPUT = """\
what becomes of the other ranks' output; rank 0 has this terminal.
prefix (the default): each line, with the rank before it, like "[1] loss 0.5".
rank0: nothing, except the traceback of the rank that failed.
DIR: files rank0.out, rank0.err, rank1.out, ... in this directory, for every rank, rank 0 too"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise CommandLineError(f"{message}. See {self.prog} --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2 when it cannot be done as asked."""
    try:
        asked = _parser().parse_args(argv)
        return supervisor.run(_job(asked))
    except LaunchError as error:
        print(f"instep: {error}", file=sys.stderr)
        return 2


def _job(asked: argparse.Namespace) -> Job:
    script = asked.script[1:] if asked.script[:1] == ["--"] else asked.script
    command = ["-m", *asked.module] if asked.module is not None else script
    return Job(asked.n, tuple(command), asked.output)


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
    run.add_argument("-n", required=True, type=_number_of_ranks, metavar="N", help="how many ranks")
    run.add_argument("--output", default="prefix", metavar="prefix|rank0|DIR", help=OUTPUT)
    run.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="module",
        help="run a module, as `python -m module` would",
    )
    run.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    return parser
