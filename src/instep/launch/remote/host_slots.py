"""The hosts of a job as users write them, `a:4,b:4`, and which of them is this one."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from instep.errors import CommandLineError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def count_slots(entries: Sequence[tuple[str, str]], default: int = 1) -> dict[str, int]:
    """The slots of each host, in the order of the first mention; `default` without a number.

    Raises CommandLineError for numbers that are none.
    """
    slots: Counter[str] = Counter()
    for host, count in entries:
        if not host or host.startswith("-"):
            raise CommandLineError(f"{host!r} is no host. Write hosts as a:4,b:4.")
        if count and (not count.isdecimal() or int(count) < 1):
            raise CommandLineError(
                f"the number of slots of {host} is a whole number, not {count!r}."
            )
        slots[host] += int(count or default)
    return dict(slots)


def parse_hosts(text: str, default: int = 1) -> dict[str, int]:
    """`a:4,b:4`. Raises CommandLineError."""
    return count_slots([entry.partition(":")[::2] for entry in text.split(",")], default)


def read_hosts(path: str) -> dict[str, int]:
    """A file with lines such as `a slots=4`; `#` begins a comment. Raises CommandLineError."""
    try:
        lines = [line.partition("#")[0].split() for line in Path(path).read_text().splitlines()]
    except OSError as error:
        raise CommandLineError(
            f"cannot read the hosts in {path}: {error.strerror or error}."
        ) from None
    return count_slots(
        [(line[0], "".join(line[1:]).removeprefix("slots=")) for line in lines if line]
    )


def take_slots(slots: dict[str, int], size: int) -> dict[str, int]:
    """The ranks of each host if there are `size` in all, the first hosts' slots first.

    Raises CommandLineError if there are too few slots.
    """
    if size > sum(slots.values()):
        raise CommandLineError(
            f"{size} ranks, but the hosts have {sum(slots.values())} slots. Give them more, or "
            "start fewer."
        )
    taken: dict[str, int] = {}
    for host, count in slots.items():
        if ranks := min(count, size - sum(taken.values())):
            taken[host] = ranks
    return taken


def is_this_host(host: str) -> bool:
    """Whether a name or an address is of this host: only then it can be bound here."""
    if host in (*LOOPBACK_NAMES, socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: as of `a..b`
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def address_towards(host: str) -> str:
    """The address of this host from which another one is reached. Nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 22, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            name: str = probe.getsockname()[0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", error)
        raise CommandLineError(f"the host {host} is not known here: {why}.") from None
    return name
