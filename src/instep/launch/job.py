"""The options of one job on this host, checked before anything starts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.errors import CommandLineError
from instep.launch.multi_node.hosts import ONE_NODE, NodeConfig


@dataclass(frozen=True)
class Job:
    """One program on several ranks. Raises CommandLineError if it cannot run."""

    size: int
    """The number of ranks on this host; it may exceed the number of cores."""
    command: tuple[str, ...]
    """As the interpreter would take it: `script.py args…` or `-m package.module args…`."""
    output: str = "prefix"
    """`prefix`, `rank0`, or the folder for one file per rank and stream."""
    plain: bool = False
    """Whether the program runs as it is, and nothing of it is divided."""
    variables: Callable[[int], Mapping[str, str]] = lambda rank: {}
    """Additional environment variables of each rank, by its number."""
    hosts: NodeConfig = ONE_NODE
    """The other hosts of the job."""
    restarts: int = 0
    """How often the job has been started again after a failure."""
    fingerprint: JobFingerprint | None = None
    """What the other hosts are shown; unless given, that of the command."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise CommandLineError(
                f"-n takes the number of ranks, a whole number from 1 up, not '{self.size}'."
            )
        if not self.command or self.command == ("-m",):
            raise CommandLineError("nothing to run: name a script.py, or -m and a module.")
        if self.command[0] != "-m":
            check_script(self.command[0])


def check_script(path: str) -> None:
    """Raise CommandLineError unless this is a file that may be a Python script."""
    if os.path.isdir(path):
        raise _cannot_run(path, "it is a directory")
    if not os.path.exists(path):
        raise _cannot_run(path, "there is no such file", _advise(path))
    if not os.path.isfile(path):  # each rank reads it
        raise _cannot_run(path, "it is no ordinary file")
    if path.endswith(".ipynb"):
        advice = "Call instep.spawn in it, or make a script: jupyter nbconvert --to script."
        raise _cannot_run(path, "it is a notebook", advice)
    if not os.access(path, os.R_OK):
        raise _cannot_run(path, "it may not be read")


def _cannot_run(path: str, why: str, advice: str = "Name a Python script.") -> CommandLineError:
    return CommandLineError(f"cannot run {path}: {why}. {advice}")


def _advise(path: str) -> str:
    """Advice for a program that is not a file."""
    if re.fullmatch(r"python[\d.]*", os.path.basename(path)):
        return f"Leave {path} out: the script's name comes first."
    module = os.path.join(*path.split("."))
    if "." in path and (os.path.isfile(f"{module}.py") or os.path.isdir(module)):
        return f"If the module is meant, write -m {path}."
    return "Name a Python script."
