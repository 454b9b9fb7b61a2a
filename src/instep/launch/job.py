"""The options of one job on this host, checked before anything starts."""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import SupportsIndex
from zipimport import ZipImportError, zipimporter

from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.errors import CommandLineError
from instep.launch.multi_node.hosts import ONE_NODE, NodeConfig
from instep.process import procfs, settings

_BYTES_PER_RANK = 128 << 20
"""Memory of its own, once PyTorch is imported: 145 MiB with PyTorch 2.13 on a CPU."""
_NAME_A_SCRIPT = "Name a Python script."
FILE_FOR_ALL = "Each rank reads the program from a file: write it into one."
_LAUNCHERS = ("accelerate", "deepspeed", "horovodrun", "mpiexec", "mpirun", "srun", "torchrun")
_STDIN = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")


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
        check_size(self.size)
        check_command(self.command)
        check_memory(self.size)


def check_size(size: int, option: str = "-n") -> None:
    """Raise CommandLineError unless this, which was given for `option`, is a number of ranks."""
    if not isinstance(size, SupportsIndex) or size < 1:
        raise wrong_size(size, option)


def check_memory(size: int) -> None:
    """Raise CommandLineError if so many ranks do not fit into this host's memory."""
    memory = procfs.memory_size()
    if size * _BYTES_PER_RANK <= memory or str(settings.RANK_LIMIT) == "none":
        return
    raise CommandLineError(
        f"{size} ranks do not fit into the {memory / 2**30:.0f} GiB of memory here: each takes "
        f"{_BYTES_PER_RANK >> 20} MiB or more once it has imported PyTorch, so that "
        f"{memory // _BYTES_PER_RANK} would be the most. Set {settings.RANK_LIMIT.name}=none to "
        "start them nevertheless."
    )


def wrong_size(given: object, option: str = "-n") -> CommandLineError:
    """Something else was given as the number of ranks."""
    return CommandLineError(
        f"{option} takes the number of ranks, a whole number from 1 up, not {str(given)!r}."
    )


def check_command(command: Sequence[str]) -> None:
    """Raise CommandLineError unless it names a script, or a module, that may be run."""
    if not command or [*command] == ["-m"]:
        raise CommandLineError("nothing to run: name a script.py, or -m and a module.")
    if command[0] != "-m":
        check_script(command[0])
    elif os.path.isfile(script := command[1]) and script.endswith(".py"):
        raise CommandLineError(
            f"-m takes a module, and {script} is a script. Leave -m out, or write "
            f"-m {script.removesuffix('.py').replace(os.sep, '.')}."
        )


def check_script(path: str) -> None:
    """Raise CommandLineError unless this is a file that may be a Python script."""
    if os.path.abspath(path) in _STDIN:
        raise _cannot_run(path, "only one rank can read it", FILE_FOR_ALL)
    if os.path.isdir(path):
        inside = os.path.join(path, "__main__.py")
        advice = f"Name {inside}." if os.path.isfile(inside) else _NAME_A_SCRIPT
        raise _cannot_run(path, "it is a directory", advice)
    if not os.path.exists(path):
        raise _cannot_run(path, "there is no such file", _advise(path))
    if not os.path.isfile(path):  # each rank reads it
        raise _cannot_run(path, "it is no ordinary file")
    if path.endswith(".ipynb"):
        advice = "Call instep.spawn in it, or make a script: jupyter nbconvert --to script."
        raise _cannot_run(path, "it is a notebook", advice)
    if not os.access(path, os.R_OK):
        raise _cannot_run(path, "it may not be read")
    if _is_archive(path):
        raise _cannot_run(path, "it is a zip archive", "Unpack it, and name its __main__.py.")


def _is_archive(path: str) -> bool:
    """Whether the interpreter would run the `__main__` of a zip file."""
    try:
        zipimporter(path)
    except ZipImportError:
        return False
    return True


def _cannot_run(path: str, why: str, advice: str = _NAME_A_SCRIPT) -> CommandLineError:
    return CommandLineError(f"cannot run {path}: {why}. {advice}")


def _advise(path: str) -> str:
    """Advice for a program that is not a file."""
    if is_python(path):
        return f"Leave {path} out: the script's name comes first."
    if os.path.basename(path) in _LAUNCHERS:
        return f"Leave {path} out: instep run starts the ranks itself."
    if is_module(path):
        return f"If the module is meant, write -m {path}."
    if os.path.isfile(path.partition(" ")[0]):
        return f"Leave the quotes out: {path}"
    if path.isdecimal():
        return f"If a number of ranks is meant, write -n {path} before the script's name."
    folder, name = os.path.split(path)
    files = os.listdir(folder or ".") if os.path.isdir(folder or ".") else ()
    near = get_close_matches(name, [file for file in files if file.endswith(".py")], n=1)
    return f"Did you mean {os.path.join(folder, near[0])}?" if near else _NAME_A_SCRIPT


def is_python(word: str) -> bool:
    """Whether this is the name of a Python interpreter."""
    return re.fullmatch(r"python[\d.]*", os.path.basename(word)) is not None


def is_module(word: str) -> bool:
    """Whether this is the dotted name of a module below the working directory."""
    path = os.path.join(*word.split("."))
    return "." in word and (os.path.isfile(f"{path}.py") or os.path.isdir(path))


def parse_count(value: str) -> int:
    """A number of hosts, ranks or devices, as argparse's `type`. Raises ArgumentTypeError."""
    if not value.isdecimal() or int(value) == 0:
        raise ArgumentTypeError(f"takes a whole number from 1 up, not {value!r}")
    return int(value)
