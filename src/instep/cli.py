"""The command `instep`: find the subcommand and run it."""

from __future__ import annotations

import argparse
import errno
import functools
import os
import resource
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import pairwise
from types import TracebackType
from typing import Any, NoReturn

from instep.errors import CommandLineError, LaunchError, VerificationError
from instep.launch.worker import local_rank_argument
from instep.process import print_line
from instep.process.exit_status import system_exit_code
from instep.process.failures.tracebacks import trim_traceback
from instep.version import __version__

COMMANDS = {
    "run": "instep.launch.command",
    "verify": "instep.verify.command",
    "check": "instep.check.command",
    "horovodrun": "instep.launch.horovodrun",
    "env": "instep.launch.env.command",
    "slurm": "instep.launch.slurm",
    "k8s": "instep.launch.kubernetes.command",
    "timeline": "instep.launch.timeline.command",
    "where": "instep.launch.where.command",
    "completion": "instep.completion",
}
"""The module of each command. It defines `add_command`, which adds a parser to the subparsers of
`instep`, and `run(arguments, program) -> exit code`. Only the module of the command in question is
imported, so that a job starts fast; completion, the last, reads the parsers of all."""

WITH_PROGRAM = ("run", "verify", "horovodrun", "slurm", "k8s")
"""Commands that end with the user's program and its arguments."""

_DESCRIPTION = """\
Write for one process, run on many, get the same numbers. train.py stands for your own script:

    instep check train.py                     read it for mistakes that show on several processes
    instep run -n 4 train.py                  run it on four processes
    instep verify -n 1,2 --steps 20 train.py  compare its numbers with those of one process

`instep COMMAND --help` describes a command.
"""
_SCRIPT = "SCRIPT"
"""The metavar of options whose value is itself a Python script."""
_SIMILAR = 0.75
"""From this ratio of difflib's on, an option is probably a misspelt one of ours."""


class _Parser(argparse.ArgumentParser):
    """Raises CommandLineError, which is printed in one line, instead of printing the usage."""

    commands: Any = None
    """The subparsers of `instep`, which have the parser of each command that was added."""

    def parse_known_args(self, *given: Any, **named: Any) -> tuple[Any, list[str]]:
        """As argparse does, but an unknown option is an error that names the nearest known one."""
        asked, unknown = super().parse_known_args(*given, **named)
        if unknown and unknown[0].startswith("-"):
            raise _unknown_option(
                unknown[0].partition("=")[0], self._option_string_actions, self.prog
            )
        return asked, unknown

    def error(self, message: str) -> NoReturn:
        raise CommandLineError(f"{message}. See {self.prog} --help.")


class _CommandParser(_Parser):
    """The parser of one command: its help keeps its lines, and options have to be written out."""

    def __init__(self, **given: Any) -> None:
        given.setdefault("formatter_class", argparse.RawTextHelpFormatter)
        super().__init__(**{"allow_abbrev": False, **given})


def _unknown_option(word: str, known: Iterable[str], command: str) -> CommandLineError:
    from instep.launch.default_ranks import RANKS, find_in_other_launchers
    from instep.launch.job import FILE_FOR_ALL

    near = get_close_matches(word, [*known], n=1, cutoff=_SIMILAR)
    name = command.rpartition(" ")[2]
    if name == "run" and (advice := find_in_other_launchers(word)):
        hint = f". {advice}"
    elif name == "env" and word in RANKS:
        hint = ". It is started as a script is: instep run -n 2 -m instep env."
    elif near:
        hint = f"; did you mean {near[0]}?"
    elif name in WITH_PROGRAM and word in ("-c", "-"):
        hint = f". {FILE_FOR_ALL}"
    elif name in WITH_PROGRAM:
        hint = ". Options of the script come after its name."
    else:
        hint = "."
    return CommandLineError(f"there is no option {word}{hint} See {command} --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2 if the command line is wrong.

    `script.py args…` or `-m module args…` in place of a command, optionally after `--plain`, runs
    in this process as a rank of the launcher that started it (`mpirun -n 2 python -m instep
    script.py`). The script's exceptions escape.
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
        return _run_command(name, words)
    except (LaunchError, VerificationError) as error:
        return _refuse(error)
    except KeyboardInterrupt:  # while it waited for other hosts
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `instep check train.py | head` has read enough
        if name in ("run", "horovodrun"):
            raise  # it may be another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return _refuse(f"{limit} open files are too few for this process: raise ulimit -n.")


def _run_command(name: str, words: Sequence[str]) -> int:
    """Run the command of this name. Raises CommandLineError, and what it raises."""
    if name not in COMMANDS:
        _check_first_word(name, words)
    parser = _parser(name)
    ours, theirs = _split(words, parser) if name in WITH_PROGRAM else (words, ())
    if name in COMMANDS:
        _check_values(ours, parser, has_program=bool(theirs) or name not in WITH_PROGRAM)
    asked = parser.parse_args(ours)
    code: int = import_module(COMMANDS[name]).run(asked, tuple(theirs))
    sys.stdout.flush()
    return code


def _check_first_word(word: str, words: Sequence[str]) -> None:
    """Raise CommandLineError, with the right line, unless this is an option of instep's own."""
    from instep.launch.default_ranks import RANKS
    from instep.launch.job import is_module, is_python

    if word.partition("=")[0] in RANKS:
        raise CommandLineError(f"run is missing: {shlex.join(['instep', 'run', *words])}")
    if word.startswith("-"):
        own = ("--help", "--version")
        if word != "-h" and not any(name.startswith(word) for name in own):
            raise _unknown_option(word, own, "instep")
        return
    if is_python(word) and len(words) > 1:
        line = shlex.join(["instep", "run", "-n", "2", *words[1:]])
        raise CommandLineError(f"leave {word} out: {line}")
    wrong = f"{word} is no command of instep's, and there is no such script."
    if is_module(word):
        line = shlex.join(["instep", "run", "-n", "2", "-m", *words])
        raise CommandLineError(f"{wrong} If the module is meant: {line}")
    known = [*COMMANDS, "--version", *(name for name in os.listdir() if name.endswith(".py"))]
    near = get_close_matches(word, known)
    hint = f"Did you mean {near[0]}?" if near else "See instep --help."
    raise CommandLineError(f"{wrong} {hint}")


def _open_missing_streams() -> None:
    """Open /dev/null for each standard stream that is missing (`2>&-`). Otherwise the next file to
    be opened would get its number, and messages for the user would be written into that file."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(fd, fd == number)
            setattr(sys, name, open(fd, "r" if number == 0 else "w"))  # noqa: SIM115


def _run_here(words: Sequence[str], plain: bool) -> int:
    from instep.launch.job import check_script
    from instep.launch.worker import (  # the supervisor does not need them
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
        del sys.path[0]  # the folder of this command itself
    begun: list[bool] = []
    sys.excepthook = functools.partial(_print_trimmed, sys.excepthook)
    try:
        program.run_program(words, plain=plain, begin=lambda: begun.append(True))
    except LaunchError as error:
        if begun:
            raise  # the script's own: it may have called `instep.init`
        return _refuse(error)
    except SystemExit as leaving:  # no sys.excepthook hears of it
        if system_exit_code(leaving):
            program.failing(f"SystemExit: {leaving.code}")
        raise
    return 0


def _print_trimmed(
    hook: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    frames: TracebackType | None,
) -> None:
    """For sys.excepthook: the script's traceback, without the frames that have run the script."""
    trim_traceback(error)
    hook(kind, error, error.__traceback__)


def _refuse(error: Exception | str) -> int:
    print_line(error)
    return 2


def _split(argv: Sequence[str], parser: _Parser) -> tuple[Sequence[str], Sequence[str]]:
    """Split into our own arguments and the user's program: `script.py args…` or `-m module args…`.

    argparse.REMAINDER would lose a `--` among the program's arguments.
    """
    values = {
        option: 1 if action.nargs is None else action.nargs
        for action in parser.commands.choices[argv[0]]._actions
        for option in action.option_strings
    }
    at = 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("-m", "--"):
        at += 1 + values.get(argv[at], 0)
    program = argv[at:]
    return argv[:at], program[1:] if program[:1] == ["--"] else program


def _check_values(argv: Sequence[str], parser: _Parser, *, has_program: bool) -> None:
    """Raise CommandLineError if an option has an empty value, or the script's name as its value.

    Else a script could be lost: some options write to the file that they name.
    """
    from instep.launch.job import is_python

    options = {
        option: action
        for action in parser.commands.choices[argv[0]]._actions
        for option in action.option_strings
        if action.nargs != 0 and action.metavar != _SCRIPT
    }
    for option, word in [*pairwise(argv), *(each.split("=", 1) for each in argv if "=" in each)]:
        if option in options and not word:
            raise CommandLineError(f"the value of {option} is empty. Is a shell variable not set?")
        is_program = is_python(word) or (
            word.endswith(".py") and (os.path.isfile(word) or not has_program)
        )
        if option in options and is_program:
            action = options[option]
            value = action.metavar or "|".join(map(str, action.choices or ()))
            raise CommandLineError(
                f"{option} is without its value, and {word} stands in its place. Write "
                f"{option} {value} {word}"
            )


def _parser(name: str) -> _Parser:
    """A parser for the command of this name, or for all commands if there is none of this name."""
    parser = _Parser(
        "instep",
        usage="instep COMMAND ...",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"instep {__version__}")
    parser.commands = parser.add_subparsers(
        prog="instep",
        metavar="COMMAND",
        title="commands",
        required=True,
        parser_class=_CommandParser,
    )
    for known, home in COMMANDS.items():
        if name not in COMMANDS or name in (known, "completion"):
            import_module(home).add_command(parser.commands)
    return parser
