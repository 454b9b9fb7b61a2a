"""The command `instep`: read the command line, hand it to whoever does the work."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from instep.errors import CommandLineError, LaunchError, VerificationError
from instep.launch.worker import local_rank_argument
from instep.version import __version__

COMMANDS = {
    "run": "instep.launch.command",
    "verify": "instep.verify.command",
    "check": "instep.check.command",
    "horovodrun": "instep.launch.horovodrun",
    "env": "instep.launch.env.command",
    "slurm": "instep.launch.slurm.command",
}
"""Where each command lives. Only the one that is asked for is imported: starting a job waits for
nothing that it does not need."""

WITH_PROGRAM = ("run", "verify", "horovodrun", "slurm")
"""Commands at whose end the user's program stands, with arguments of its own. Their homes say in
WITH_VALUE which of their options take the next word as their value."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def parse_known_args(self, *given: Any, **named: Any) -> tuple[Any, list[str]]:
        """As argparse does, but an option that does not exist is an error, with the nearest one."""
        asked, unknown = super().parse_known_args(*given, **named)
        if unknown and unknown[0].startswith("-"):
            word = unknown[0].partition("=")[0]
            near = get_close_matches(word, self._option_string_actions, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise CommandLineError(f"there is no option {word}{hint} See {self.prog} --help.")
        return asked, unknown

    def error(self, message: str) -> NoReturn:
        raise CommandLineError(f"{message}. See {self.prog} --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2 when it cannot be done as asked.

    `script.py args…` or `-m module args…` instead of a command, perhaps after `--plain`, is run in
    this process, as a rank of whoever started it (`mpirun -n 2 python -m instep script.py`); what
    it raises escapes.
    """
    _open_missing_streams()
    words = local_rank_argument.without(sys.argv[1:] if argv is None else argv)
    plain = words[:1] == ["--plain"]
    words = words[plain:]
    if words[:1] == ["help"] or not words:
        words = [*words[1:2], "--help"]
    name = words[0] if words else ""
    if (len(words) > 1 and name == "-m") or (name not in COMMANDS and os.path.isfile(name)):
        return _run_here(words, plain)
    try:
        ours, theirs = _split(words) if name in WITH_PROGRAM else (words, ())
        asked = _parser(name).parse_args(ours)
        code: int = asked.command(asked, tuple(theirs))
        return code
    except (LaunchError, VerificationError) as error:
        return _refuse(error)
    except KeyboardInterrupt:  # while it waited for other hosts
        return 128 + signal.SIGINT


def _open_missing_streams() -> None:
    """Where this process was started without stdin, stdout or stderr (`2>&-`), /dev/null is there:
    else the next file that is opened would be it, and what is for the user would go there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(fd, fd == number)
            setattr(sys, name, open(fd, "r" if number == 0 else "w"))  # noqa: SIM115


def _run_here(words: Sequence[str], plain: bool) -> int:
    from instep.launch.job import check_script
    from instep.launch.worker import (  # the supervisor of ranks does without
        external_launcher,
        program,
    )

    try:
        if words[0] != "-m":
            check_script(words[0])
        external_launcher.prepare(words)
    except LaunchError as error:
        return _refuse(error)
    if not sys.flags.safe_path:
        del sys.path[0]  # this command's own folder
    try:
        program.run_program(words, plain=plain)
    except SystemExit as leaving:  # no sys.excepthook hears of it
        if leaving.code:
            program.failing(f"SystemExit: {leaving.code}")
        raise
    return 0


def _refuse(error: Exception) -> int:
    print(f"instep: {error}", file=sys.stderr)
    return 2


def _split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Our words, and the user's program: `script.py args…` or `-m module args…`.

    Not argparse's work: its REMAINDER loses a `--` among the program's arguments.
    """
    with_value = import_module(COMMANDS[argv[0]]).WITH_VALUE
    at = 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("-m", "--"):
        at += 2 if argv[at] in with_value else 1
    program = argv[at:]
    return argv[:at], program[1:] if program[:1] == ["--"] else program


def _parser(name: str) -> argparse.ArgumentParser:
    """A parser for the command of this name; for all of them where there is none."""
    parser = _Parser("instep", description="Write for one process, run on many.")
    parser.add_argument("--version", action="version", version=f"instep {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    for known, home in COMMANDS.items():
        if name not in COMMANDS or name == known:
            import_module(home).add_command(commands)
    return parser
