"""The command `instep`: read the command line, hand it to whoever does the work."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from instep.errors import CommandLineError, LaunchError, VerificationError
from instep.launch import program

COMMANDS = {
    "run": "instep.launch.command",
    "verify": "instep.verify.command",
    "check": "instep.check.command",
    "env": "instep.env.command",
    "slurm": "instep.slurm.command",
}
"""Where each command lives. Only the one that is asked for is imported: starting a job waits for
nothing that it does not need."""

WITH_PROGRAM = ("run", "verify", "slurm")
"""Commands at whose end the user's program stands, with arguments of its own."""

WITH_VALUE = (
    *("-n", "--output", "--steps", "--json", "--plot"),
    *("--nodes", "--gpus-per-node", "--tasks-per-node", "--cpus-per-task", "--time", "--signal"),
    *("--name", "--set"),
)
"""Their options that take the next word as their value."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise CommandLineError(f"{message}. See {self.prog} --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2 when it cannot be done as asked.

    `script.py args…` or `-m module args…` instead of a command, perhaps after `--plain`, is run in
    this process, as a rank of whoever started it (`mpirun -n 2 python -m instep script.py`); what
    it raises escapes.
    """
    words = sys.argv[1:] if argv is None else argv
    plain = words[:1] == ["--plain"]
    words = words[plain:]
    name = words[0] if words else ""
    if (len(words) > 1 and name == "-m") or (name not in COMMANDS and os.path.isfile(name)):
        if not sys.flags.safe_path:
            del sys.path[0]  # this command's own folder
        program.run(words, plain=plain)
        return 0
    try:
        ours, theirs = _split(words) if name in WITH_PROGRAM else (words, ())
        asked = _parser(name).parse_args(ours)
        code: int = asked.command(asked, tuple(theirs))
        return code
    except (LaunchError, VerificationError) as error:
        print(f"instep: {error}", file=sys.stderr)
        return 2


def _split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Our words, and the user's program: `script.py args…` or `-m module args…`.

    Not argparse's work: its REMAINDER loses a `--` among the program's arguments.
    """
    at = 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("-m", "--"):
        at += 2 if argv[at] in WITH_VALUE else 1
    program = argv[at:]
    return argv[:at], program[1:] if program[:1] == ["--"] else program


def _parser(name: str) -> argparse.ArgumentParser:
    """A parser for the command of this name; for all of them where there is none."""
    parser = _Parser("instep", description="Write for one process, run on many.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    for known, home in COMMANDS.items():
        if name not in COMMANDS or name == known:
            import_module(home).add_command(commands)
    return parser
