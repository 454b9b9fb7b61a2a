"""The fingerprint of a process's job: two processes with unlike ones are not of one job."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace

from instep.distributed.errors import MixedJobError
from instep.process.exit_status import format_ranks, group_ranks
from instep.process.procfs import boot_id, namespace
from instep.version import __version__

_RANK_ARGUMENT = re.compile(r"--?(\w+[-_])?(rank|gpu|device)(=.*)?")
"""Arguments by which old launchers tell each rank its number: `--local_rank=1`, `--rank 1`."""


@dataclass(frozen=True)
class JobFingerprint:
    """One process of a job, or one host's supervisor."""

    host: str
    """The host's name."""
    network: str
    """Equal for processes that share a loopback interface."""
    instep: str
    """The version of instep there."""
    script: str
    """The file's name and the beginning of its SHA-256, since folders differ between hosts."""
    arguments: tuple[str, ...]
    """The script's arguments, without those that tell a rank its number."""

    @classmethod
    def of_this_process(cls) -> JobFingerprint:
        """The fingerprint of the program that runs as `__main__`, or that was announced."""
        if _announced:
            return cls.of_command(_announced)
        path = getattr(sys.modules.get("__main__"), "__file__", None)
        return cls.of_command([path or "", *sys.argv[1:]])

    @classmethod
    def of_command(cls, command: Sequence[str]) -> JobFingerprint:
        """The fingerprint of a program to be started: `script.py args…` or `-m module args…`."""
        program, *arguments = command[1:] if command[0] == "-m" else command
        network = f"{boot_id()} {namespace('net')}"
        return cls(socket.gethostname(), network, __version__, _script(program), _common(arguments))

    def to_json(self) -> dict[str, object]:
        """For sending."""
        return asdict(self)

    @classmethod
    def from_json(cls, received: Mapping[str, object]) -> JobFingerprint:
        """As received. Raises TypeError for other fields, or values of another type."""
        fingerprint = cls(**received)  # type: ignore[arg-type]
        fingerprint = replace(fingerprint, arguments=tuple(fingerprint.arguments))
        texts = (*astuple(fingerprint)[:-1], *fingerprint.arguments)
        if not all(isinstance(each, str) for each in texts):
            raise TypeError("a fingerprint holds text")
        return fingerprint


_announced: list[str] = []


def announce(command: Sequence[str]) -> None:
    """This process is about to run `command`, whatever its own command line says."""
    _announced[:] = command


def is_announced() -> bool:
    """Whether this process was started by instep, which runs the script."""
    return bool(_announced)


def check_same_job(fingerprints: Mapping[int, JobFingerprint], members: str) -> None:
    """Raise MixedJobError unless these are of one job; `members` is "rank" or "host"."""
    for field, problem, advice in _MUST_AGREE:
        holders = group_ranks(
            {member: _show(getattr(each, field)) for member, each in fingerprints.items()}
        )
        if len(holders) > 1:
            sides = "; ".join(
                f"{value} on {format_ranks(held, members)}" for value, held in holders.items()
            )
            raise MixedJobError(f"{problem.format(members)}: {sides}. {advice}")


_MUST_AGREE = (
    (
        "instep",
        "two versions of instep in one job",
        "Install the same one everywhere, and start every rank with the same Python.",
    ),
    (
        "script",
        "the {}s run different scripts",
        "Every rank must run the same program; bring the copies up to date.",
    ),
    (
        "arguments",
        "the {}s were started with different arguments",
        "Start all with the same ones; what depends on the rank belongs into the script "
        "(instep.rank).",
    ),
)
"""Fields of a fingerprint, the problem if they differ, and what to do about it."""


def _show(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else " ".join(value) or "none"


def _script(program: str) -> str:
    if not os.path.isfile(program):
        return program
    with open(program, "rb") as file:
        return f"{os.path.basename(program)} ({hashlib.sha256(file.read()).hexdigest()[:8]})"


def _common(arguments: Sequence[str]) -> tuple[str, ...]:
    """The arguments that all ranks have in common."""
    common: list[str] = []
    skipped_name = False
    for word in arguments:
        match = _RANK_ARGUMENT.fullmatch(word)
        is_value = skipped_name and not word.startswith("-")
        if not match and not is_value:
            common.append(word)
        skipped_name = match is not None and match[3] is None
    return tuple(common)
