"""The members of a job meet before anything starts: one listens, the others come to it.

Members are the supervisors of several hosts, or ranks that a launcher started with
`python -m instep`. Each sends one line, who it is and its card; the first member looks through the
cards and answers each with one line, what all shall know, or why the job cannot be.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from instep.errors import LaunchError, MixedJobError, RendezvousError
from instep.identity import places
from instep.meeting import cards, interfaces, listening, notice
from instep.meeting.cards import Card
from instep.meeting.vigil import Vigil

_MOMENT = 0.2
"""Seconds that the first member listens until it looks at the time."""
_ANSWER = 2.0
"""Seconds within which an address of another host answers."""
_STRANGER = 2.0
"""Seconds within which whoever has connected says who it is."""
_KINDS = {kind.__name__: kind for kind in (LaunchError, MixedJobError, RendezvousError)}


@dataclass(frozen=True)
class Member:
    """One of those who meet."""

    number: int
    """Its place, from 0."""
    count: int
    """How many it expects in all."""
    card: Card
    ranks: int
    """How many ranks it stands for."""
    master: str = ""
    """The address at which it has found the first member."""


Facts = dict[str, Any]
"""What the first member tells all: as JSON has it."""


@dataclass(frozen=True)
class Assembly:
    """All have met."""

    facts: Facts
    lines: Mapping[int, socket.socket]
    """To whom this member has a connection: the first one to all, the others to the first."""


def meet(
    place: places.Place,
    mine: Member,
    decide: Callable[[Sequence[Member]], Facts],
    seconds: float,
    members: str = "rank",
) -> Assembly:
    """Return when all have come; `decide`, on the first member, says what all shall know.

    Raises the same LaunchError on every member that came: RendezvousError, MixedJobError,
    PortInUseError.
    """
    if mine.number != 0:
        return _join(place, mine, seconds, members)
    lines: dict[int, socket.socket] = {}
    with ExitStack() as failed:
        failed.callback(_close, lines)
        try:
            with _door(place) as door:
                vigil = Vigil(mine.count, seconds, members=members)
                came = _receive(door, _job(place), mine, lines, vigil, members)
            facts = decide([came[number] for number in range(mine.count)])
        except (MixedJobError, RendezvousError) as error:
            _tell(lines, {"error": [type(error).__name__, str(error)]})
            raise
        _tell(lines, {"facts": facts})
        failed.pop_all()
    return Assembly(facts, lines)


# ------------------------------------------------------------------------------ the first member


def _job(place: places.Place) -> str:
    """What tells those who belong here from others that come to the same port."""
    return place.job if isinstance(place, places.Address) else place.path


@contextmanager
def _door(place: places.Place) -> Iterator[socket.socket]:
    match place:
        case places.Address(host, port):
            with listening.listen(host, port, one_host=False) as door:
                yield door
        case places.PrivateFile(path):
            with _noted(path, [notice.HOST]) as door:
                yield door
        case places.SharedFile(path):
            with _noted(path, interfaces.outer_addresses()) as door:
                yield door


@contextmanager
def _noted(path: str, hosts: Sequence[str]) -> Iterator[socket.socket]:
    with (
        listening.listen(listening.only(hosts)) as door,
        notice.put_up(path, door.getsockname()[1], hosts),
    ):
        yield door


def _receive(
    door: socket.socket,
    job: str,
    mine: Member,
    lines: dict[int, socket.socket],
    vigil: Vigil,
    members: str,
) -> dict[int, Member]:
    """Everybody, by number; `lines` are filled with the connections."""
    came = {mine.number: mine}

    def arrived() -> Mapping[int, str]:
        return {number: member.card.host for number, member in sorted(came.items())}

    while len(came) < mine.count:
        line = vigil.until(lambda: _knock_at(door), arrived)
        told = _hear_stranger(line)
        if told is None or told.get("job") != job:
            line.close()
            continue
        member = _member(told)
        held = came.get(member.number)
        lines[member.number if held is None else -1] = line
        if held is not None:
            raise RendezvousError.twice(members, member.number, [held.card.host, member.card.host])
        if member.count != mine.count or not 0 < member.number < mine.count:
            raise RendezvousError.counted_differently(
                members, mine.count, member.card.host, member.number, member.count
            )
        came[member.number] = member
    cards.check({number: member.card for number, member in came.items()}, members)
    return came


def _knock_at(door: socket.socket) -> socket.socket | None:
    """Whoever comes within a moment."""
    door.settimeout(_MOMENT)
    try:
        return door.accept()[0]
    except TimeoutError:
        return None


def _hear_stranger(line: socket.socket) -> Facts | None:
    line.settimeout(_STRANGER)
    with suppress(OSError, ValueError):
        told = json.loads(_read_line(line))
        return told if isinstance(told, dict) else None
    return None


def _member(told: Facts) -> Member:
    return Member(
        told["number"],
        told["count"],
        Card.from_json(told["card"]),
        told["ranks"],
        told["master"],
    )


def _close(lines: Mapping[int, socket.socket]) -> None:
    for line in lines.values():
        line.close()


def _tell(lines: Mapping[int, socket.socket], answer: Facts) -> None:
    for line in lines.values():
        with suppress(OSError):  # one that is gone is missed later
            line.sendall(json.dumps(answer).encode() + b"\n")


# ----------------------------------------------------------------------------------- the others


def _join(place: places.Place, mine: Member, seconds: float, members: str) -> Assembly:
    vigil = Vigil(mine.count, seconds, members=members, speaks=mine.number == 1)
    line, master = vigil.until(partial(_find, place))
    said = {
        "job": _job(place),
        "number": mine.number,
        "count": mine.count,
        "card": mine.card.to_json(),
        "ranks": mine.ranks,
        "master": master,
    }
    try:
        line.settimeout(seconds + _STRANGER)
        line.sendall(json.dumps(said).encode() + b"\n")
        answer = json.loads(_read_line(line))
    except (OSError, ValueError):
        line.close()
        raise RendezvousError.absent([0], mine.count, seconds, members=members) from None
    if "error" in answer:
        line.close()
        kind, sentence = answer["error"]
        raise _KINDS[kind](sentence)
    line.settimeout(None)
    return Assembly(answer["facts"], {0: line})


def _find(place: places.Place) -> tuple[socket.socket, str] | None:
    """A connection to the first member, and the name by which it was found, if it is there."""
    if isinstance(place, places.Address):
        found: tuple[str, int] | None = (place.host, place.port)
        listening.resolve(place.host, place.port)
    else:
        found = notice.read(place.path)
    if found is not None:
        with suppress(OSError):
            return socket.create_connection(found, _ANSWER), found[0]
    return None


def _read_line(line: socket.socket) -> bytes:
    """Up to the end of the line, and not a byte more. Raises OSError when nothing comes."""
    read = b""
    while not read.endswith(b"\n"):
        byte = line.recv(1)
        if not byte:
            raise ConnectionResetError
        read += byte
    return read
