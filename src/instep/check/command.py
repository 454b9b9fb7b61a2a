"""`instep check` on the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from instep.check import report
from instep.check.checker import check_files, find_python_files, select_rules
from instep.check.finding import Rule
from instep.check.pages import format_page
from instep.check.rules import RULES
from instep.check.run_warnings import RUN_WARNINGS, RunWarning
from instep.errors import CommandLineError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

CLEAN, FOUND, UNREADABLE = 0, 1, 2


def add_command(subparsers: Subparsers) -> None:
    """Add `check` to the subcommands of `instep`; it sets `command(arguments, ()) -> exit code`."""
    parser = subparsers.add_parser(
        "check",
        help="find mistakes of parallel training in scripts",
        description="Find mistakes that training scripts make on several processes. Nothing is run "
        "or imported. Exit code: 0 no findings, 1 findings, 2 a file could not be read.",
        formatter_class=argparse.HelpFormatter,
        allow_abbrev=True,
    )
    parser.add_argument("scripts", nargs="*", metavar="train.py", help="scripts or folders")
    parser.add_argument(
        "--format", choices=("text", "github"), default="text", help="output format"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write the findings as JSON to this file ('-': print only JSON)",
    )
    parser.add_argument(
        "--select", type=_codes, default=(), metavar="CODES",
        help="only rules whose codes begin with one of these, as in INS101,INS6",
    )  # fmt: skip
    parser.add_argument(
        "--ignore",
        type=_codes,
        default=(),
        metavar="CODES",
        help="leave out rules whose codes begin with one of these",
    )
    parser.add_argument(
        "--explain", metavar="CODE", help="print the page of a rule, or of a warning"
    )
    parser.set_defaults(command=run, parser=parser)


def _codes(given: str) -> tuple[str, ...]:
    codes = tuple(part.strip().upper() for part in given.split(",") if part.strip())
    for code in codes:
        if not any(known.startswith(code) for known in RULES):
            raise argparse.ArgumentTypeError(f"no rule begins with {code!r}")
    return codes


def run(arguments: argparse.Namespace, program: tuple[str, ...] = ()) -> int:
    """Check the scripts, print the findings to stdout and return the exit code."""
    parser: argparse.ArgumentParser = arguments.parser
    if arguments.explain is not None:
        print(_page_of(arguments.explain, parser), end="")
        return CLEAN
    if not arguments.scripts:
        parser.error("no script given: instep check train.py")
    scripts = [*find_python_files(arguments.scripts)]
    if not scripts:
        parser.error(f"there is no Python file in {', '.join(arguments.scripts)}")
    outcome = check_files(scripts, select_rules(arguments.select, arguments.ignore))
    if arguments.json == "-":
        print(report.format_json(outcome))
    else:
        if arguments.json is not None:
            _write(arguments.json, report.format_json(outcome) + "\n")
        shown = (report.format_github if arguments.format == "github" else report.format_text)(
            outcome
        )
        if shown:
            print(shown)
    for file in outcome.unreadable:
        print(f"instep check: {file.path}: {file.reason}", file=sys.stderr)
    if outcome.unreadable:
        return UNREADABLE
    return FOUND if outcome.findings else CLEAN


def _page_of(asked: str, parser: argparse.ArgumentParser) -> str:
    """The page of a rule or a warning, by its code: INS101, 101, or with brackets."""
    known: dict[str, Rule | RunWarning] = {**RULES, **RUN_WARNINGS}
    code = asked.upper().strip("[]")
    found = known.get(code, known.get(f"INS{code}"))
    if found is None:
        parser.error(
            f"there is no rule {asked!r}. Each finding and each warning has its code, as in INS101"
        )
    return format_page(found)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandLineError(f"cannot write {path}: {error.strerror or error}.") from None
