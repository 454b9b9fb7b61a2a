"""What a process says of itself when it meets the others, and whether all of that is one job."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace

from instep.distributed.errors import MixedJobError
from instep.process.exit_status import format_ranks
from instep.process.procfs import boot_id, namespace
from instep.version import __version__

_ONES_OWN = re.compile(r"--?(\w+[-_])?(rank|gpu|device)(=.*)?")
"""Arguments by which old launchers tell each rank its place: `--local_rank=1`, `--rank 1`."""


@dataclass(frozen=True)
class JobFingerprint:
    """One process of a job, or one host's supervisor."""

    host: str
    """The host's name."""
    network: str
    """What tells its network from every other: processes of one share the loopback interface."""
    instep: str
    """The version of instep there."""
    script: str
    """The file's name and the beginning of its SHA-256, since folders differ between hosts."""
    arguments: tuple[str, ...]
    """What the script was started with, less what only tells a rank its place."""

    @classmethod
    def of_this_process(cls) -> JobFingerprint:
        """The card of the program that runs as `__main__`, or that was announced."""
        if _announced:
            return cls.of_command(_announced)
        path = getattr(sys.modules.get("__main__"), "__file__", None)
        return cls.of_command([path or "", *sys.argv[1:]])

    @classmethod
    def of_command(cls, command: Sequence[str]) -> JobFingerprint:
        """The card of a program to be: `script.py args…` or `-m module args…`."""
        program, *arguments = command[1:] if command[0] == "-m" else command
        return cls(
            socket.gethostname(), _network(), __version__, _script(program), _common(arguments)
        )

    def to_json(self) -> dict[str, object]:
        """As it travels."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, object]) -> JobFingerprint:
        """As it arrives. Raises TypeError where it has other fields, or another kind of value."""
        card = cls(**told)  # type: ignore[arg-type]
        card = replace(card, arguments=tuple(card.arguments))
        if not all(isinstance(each, str) for each in (*astuple(card)[:-1], *card.arguments)):
            raise TypeError("a card holds text")
        return card


_announced: list[str] = []


def announce(command: Sequence[str]) -> None:
    """This process is about to run `command`, whatever its own command line says."""
    _announced[:] = command


def check_same_job(fingerprints: Mapping[int, JobFingerprint], members: str) -> None:
    """Raise MixedJobError unless these are of one job; `members` is "rank" or "host"."""
    for field, problem, advice in _MUST_AGREE:
        holders: dict[str, list[int]] = {}
        for member, fingerprint in sorted(fingerprints.items()):
            holders.setdefault(str(_shown(getattr(fingerprint, field))), []).append(member)
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


def _shown(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else " ".join(value) or "none"


def _network() -> str:
    return f"{boot_id()} {namespace('net')}"


def _script(program: str) -> str:
    if not os.path.isfile(program):
        return program
    with open(program, "rb") as file:
        return f"{os.path.basename(program)} ({hashlib.sha256(file.read()).hexdigest()[:8]})"


def _common(arguments: Sequence[str]) -> tuple[str, ...]:
    common: list[str] = []
    left_out = False
    for word in arguments:
        own = _ONES_OWN.fullmatch(word)
        value = left_out and not word.startswith("-")
        if not own and not value:
            common.append(word)
        left_out = own is not None and own[3] is None
    return tuple(common)
