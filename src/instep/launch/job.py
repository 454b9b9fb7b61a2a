"""Job: what `instep run` was asked to do, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from instep.errors import CommandLineError
from instep.launch.hosts import ONE_HOST, Hosts
from instep.meeting.cards import Card


@dataclass(frozen=True)
class Job:
    """One program on several ranks. Raises CommandLineError for what cannot run."""

    size: int
    """How many ranks on this host; more than there are cores is allowed."""
    command: tuple[str, ...]
    """As the interpreter would take it: `script.py args…` or `-m package.module args…`."""
    output: str = "prefix"
    """`prefix`, `rank0`, or the folder for one file per rank and stream."""
    plain: bool = False
    """Whether the program runs as it is, with nothing of it divided."""
    variables: Callable[[int], Mapping[str, str]] = lambda rank: {}
    """What each rank finds in its environment besides its place."""
    hosts: Hosts = ONE_HOST
    """Where else it runs."""
    card: Card | None = None
    """What the other hosts are shown; unless given, that of the command."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise CommandLineError.number_of_ranks(str(self.size))
        if not self.command or self.command == ("-m",):
            raise CommandLineError.nothing_to_run()
        if self.command[0] != "-m":
            _check_script(self.command[0])


def _check_script(path: str) -> None:
    if os.path.isdir(path):
        raise CommandLineError.script(path, "it is a directory")
    if not os.path.exists(path):
        raise CommandLineError.script(path, "there is no such file")
    if not os.access(path, os.R_OK):
        raise CommandLineError.script(path, "it may not be read")
