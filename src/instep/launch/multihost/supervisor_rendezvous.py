"""The members of a job meet before anything starts: one listens, the others come to it.

Members are the supervisors of several hosts, or ranks that a launcher started with
`python -m instep`. The first one tells whoever connects a number of its own. Each sends one line,
who it is and its card; the first member looks through the cards and answers each with one line,
what all shall know, or why the job cannot be. Where they have a secret in common, each line bears a
mark over itself and the other's number, so that nobody else can say it, or say it again.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from instep.distributed.errors import AuthenticationError, MixedJobError, RendezvousError
from instep.distributed.identity import endpoints
from instep.distributed.identity.authentication import derived, given_secret, new_secret
from instep.distributed.rendezvous import interfaces, job_fingerprint, listening, port_file
from instep.distributed.rendezvous.arrival_wait import Vigil
from instep.distributed.rendezvous.job_fingerprint import Card
from instep.errors import LaunchError
from instep.launch.multihost.clients import PATIENCE, REFUSED, Call, Callers, read, said

_ANSWER = 2.0
"""Seconds within which an address of another host answers."""
_LONGEST_ANSWER = 1 << 24
"""Bytes."""
_KINDS = {
    kind.__name__: kind
    for kind in (LaunchError, MixedJobError, RendezvousError, AuthenticationError)
}


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
    secret: bytes
    """What only the members know: made of the secret that they had in common and a number of this
    job; where they had none, told by the first member."""


def meet(
    place: endpoints.Place,
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
    calls: dict[int, Call] = {}
    secret: bytes | None = None
    with ExitStack() as failed:
        failed.callback(_close, calls)
        try:
            with _door(place) as (door, secret):
                vigil = Vigil(mine.count, seconds, members=members)
                callers = Callers(door, secret)
                failed.callback(callers.close)
                came = _receive(callers, _job(place), mine, calls, vigil, members)
                callers.close()
            facts = decide([came[number] for number in range(mine.count)])
        except (MixedJobError, RendezvousError, AuthenticationError) as error:
            _tell(calls, {"error": [type(error).__name__, str(error)]}, secret)
            raise
        drawn = new_secret().hex()
        _tell(calls, {"facts": facts, "drawn": drawn}, secret)
        failed.pop_all()
    lines = {number: call.line for number, call in calls.items()}
    return Assembly(facts, lines, _of_job(secret, drawn))


def _of_job(secret: bytes | None, drawn: str) -> bytes:
    return bytes.fromhex(drawn) if secret is None else derived(secret, "assembly", drawn)


# ------------------------------------------------------------------------------ the first member


def _job(place: endpoints.Place) -> str:
    """What tells those who belong here from others that come to the same port."""
    return place.job if isinstance(place, endpoints.Address) else place.path


@contextmanager
def _door(place: endpoints.Place) -> Iterator[tuple[socket.socket, bytes | None]]:
    """Where it listens, and the secret of those who may come."""
    given = given_secret()
    match place:
        case endpoints.Address(host, port):
            with listening.listen(host, port, one_host=False) as door:
                yield door, given
        case endpoints.PrivateFile(path):
            with _noted(path, [port_file.HOST]) as (door, noted):
                yield door, given or noted
        case endpoints.SharedFile(path):
            with _noted(path, interfaces.outer_addresses()) as (door, noted):
                yield door, given or noted


@contextmanager
def _noted(path: str, hosts: Sequence[str]) -> Iterator[tuple[socket.socket, bytes]]:
    with (
        listening.listen(listening.only(hosts)) as door,
        port_file.put_up(path, door.getsockname()[1], hosts) as secret,
    ):
        yield door, secret


def _receive(
    callers: Callers,
    job: str,
    mine: Member,
    calls: dict[int, Call],
    vigil: Vigil,
    members: str,
) -> dict[int, Member]:
    """Everybody, by number; `calls` are filled with the connections."""
    came = {mine.number: mine}

    def arrived() -> Mapping[int, str]:
        return {number: member.card.host for number, member in sorted(came.items())}

    while len(came) < mine.count:
        call = vigil.until(callers.next, arrived)
        member = _member(call.told, job)
        if member is None:
            call.line.close()
            continue
        held = came.get(member.number)
        calls[member.number if held is None else -1] = call
        if held is not None:
            raise RendezvousError(
                f"{members} {member.number} has come twice, from {held.card.host} and from "
                f"{member.card.host}. Each {members} needs a number of its own, from 0 up."
            )
        if member.count != mine.count or not 0 < member.number < mine.count:
            raise RendezvousError(
                f"{members} 0 expects {mine.count} {members}s, but {member.card.host} came as "
                f"{members} {member.number} of {member.count}. Start all of them with the same "
                "number."
            )
        came[member.number] = member
    job_fingerprint.check({number: member.card for number, member in came.items()}, members)
    return came


def _member(told: Facts, job: str) -> Member | None:
    """Who says so; None for who belongs to another job, or to none."""
    if told.get("job") != job:
        return None
    try:
        card = Card.from_json(told["card"])
        member = Member(told["number"], told["count"], card, told["ranks"], told["master"])
    except (KeyError, TypeError):
        return None
    numbers = (member.number, member.count, member.ranks)
    sound = all(type(number) is int for number in numbers) and isinstance(member.master, str)
    return member if sound else None


def _close(calls: Mapping[int, Call]) -> None:
    for call in calls.values():
        call.line.close()


def _tell(calls: Mapping[int, Call], answer: Facts, secret: bytes | None) -> None:
    for call in calls.values():
        call.line.settimeout(PATIENCE)
        with suppress(OSError):  # one that is gone is missed later
            call.line.sendall(said(answer, secret, str(call.told.get("drawn"))))
        call.line.settimeout(None)


# ----------------------------------------------------------------------------------- the others


def _join(place: endpoints.Place, mine: Member, seconds: float, members: str) -> Assembly:
    vigil = Vigil(mine.count, seconds, members=members, speaks=mine.number == 1)
    line, master, secret = vigil.until(partial(_find, place))
    drawn = new_secret().hex()
    me = {
        "job": _job(place),
        "number": mine.number,
        "count": mine.count,
        "card": mine.card.to_json(),
        "ranks": mine.ranks,
        "master": master,
        "drawn": drawn,
    }
    end = monotonic() + seconds + PATIENCE
    try:
        theirs = read(line, end, _LONGEST_ANSWER, None, "")["drawn"]
        line.sendall(said(me, secret, str(theirs)))
        answer = read(line, end, _LONGEST_ANSWER, secret, drawn)
        if answer == REFUSED:
            raise AuthenticationError.secret_missing()
        error, facts = answer.get("error"), answer.get("facts")
        if error is None:
            job = _of_job(secret, answer["drawn"])
        else:
            kind, sentence = map(str, error)
    except (OSError, ValueError, TypeError, KeyError):
        line.close()
        raise RendezvousError.absent([0], mine.count, seconds, members=members) from None
    except AuthenticationError:
        line.close()
        raise
    if error is not None:
        line.close()
        raise _KINDS.get(kind, LaunchError)(sentence)
    line.settimeout(None)
    return Assembly(facts or {}, {0: line}, job)


def _find(place: endpoints.Place) -> tuple[socket.socket, str, bytes | None] | None:
    """A connection to the first member, the name by which it was found, and the secret of those
    who come there, if it is there."""
    if isinstance(place, endpoints.Address):
        listening.resolve(place.host, place.port)
        host, port, noted = place.host, place.port, None
    else:
        note = port_file.read(place.path)
        if note is None:
            return None
        host, port, noted = note
    with suppress(OSError):
        line = socket.create_connection((host, port), _ANSWER)
        return line, host, given_secret() or noted
    return None
