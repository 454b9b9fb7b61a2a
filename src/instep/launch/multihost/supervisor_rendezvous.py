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
from instep.distributed.identity.authentication import derive_key, make_secret, read_secret
from instep.distributed.rendezvous import interfaces, job_fingerprint, listening, port_file
from instep.distributed.rendezvous.arrival_wait import ArrivalWait
from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.errors import LaunchError
from instep.launch.multihost.clients import (
    PATIENCE,
    REFUSED,
    ClientListener,
    JoinRequest,
    encode_message,
    read,
)

_ANSWER = 2.0
"""Seconds within which an address of another host answers."""
_LONGEST_ANSWER = 1 << 24
"""Bytes."""
_KINDS = {
    kind.__name__: kind
    for kind in (LaunchError, MixedJobError, RendezvousError, AuthenticationError)
}


@dataclass(frozen=True)
class Participant:
    """One of those who meet."""

    number: int
    """Its place, from 0."""
    count: int
    """How many it expects in all."""
    card: JobFingerprint
    ranks: int
    """How many ranks it stands for."""
    master: str = ""
    """The address at which it has found the first member."""


Facts = dict[str, Any]
"""What the first member tells all: as JSON has it."""


@dataclass(frozen=True)
class RendezvousResult:
    """All have met."""

    facts: Facts
    lines: Mapping[int, socket.socket]
    """To whom this member has a connection: the first one to all, the others to the first."""
    secret: bytes
    """What only the members know: made of the secret that they had in common and a number of this
    job; where they had none, told by the first member."""


def join_rendezvous(
    place: endpoints.Endpoint,
    mine: Participant,
    decide: Callable[[Sequence[Participant]], Facts],
    seconds: float,
    noun: str = "rank",
) -> RendezvousResult:
    """Return when all have come; `decide`, on the first member, says what all shall know.

    Raises the same LaunchError on every member that came: RendezvousError, MixedJobError,
    PortInUseError.
    """
    if mine.number != 0:
        return _join_as_client(place, mine, seconds, noun)
    requests: dict[int, JoinRequest] = {}
    secret: bytes | None = None
    with ExitStack() as failed:
        failed.callback(_close, requests)
        try:
            with _listen(place) as (listener, secret):
                vigil = ArrivalWait(mine.count, seconds, members=noun)
                clients = ClientListener(listener, secret)
                failed.callback(clients.close)
                joined = _receive(clients, _job(place), mine, requests, vigil, noun)
                clients.close()
            facts = decide([joined[number] for number in range(mine.count)])
        except (MixedJobError, RendezvousError, AuthenticationError) as error:
            _answer_all(requests, {"error": [type(error).__name__, str(error)]}, secret)
            raise
        drawn = make_secret().hex()
        _answer_all(requests, {"facts": facts, "drawn": drawn}, secret)
        failed.pop_all()
    lines = {number: request.line for number, request in requests.items()}
    return RendezvousResult(facts, lines, _job_secret(secret, drawn))


def _job_secret(secret: bytes | None, drawn: str) -> bytes:
    return bytes.fromhex(drawn) if secret is None else derive_key(secret, "assembly", drawn)


# ------------------------------------------------------------------------------ the first member


def _job(place: endpoints.Endpoint) -> str:
    """What tells those who belong here from others that come to the same port."""
    return place.job if isinstance(place, endpoints.Address) else place.path


@contextmanager
def _listen(place: endpoints.Endpoint) -> Iterator[tuple[socket.socket, bytes | None]]:
    """Where it listens, and the secret of those who may come."""
    given = read_secret()
    match place:
        case endpoints.Address(host, port):
            with listening.listen(host, port, one_host=False) as listener:
                yield listener, given
        case endpoints.PrivateFile(path):
            with _listen_with_port_file(path, [port_file.LOOPBACK_HOST]) as (listener, noted):
                yield listener, given or noted
        case endpoints.SharedFile(path):
            with _listen_with_port_file(path, interfaces.routable_addresses()) as (listener, noted):
                yield listener, given or noted


@contextmanager
def _listen_with_port_file(
    path: str, hosts: Sequence[str]
) -> Iterator[tuple[socket.socket, bytes]]:
    with (
        listening.listen(listening.listen_address(hosts)) as listener,
        port_file.publish(path, listener.getsockname()[1], hosts) as secret,
    ):
        yield listener, secret


def _receive(
    clients: ClientListener,
    job: str,
    mine: Participant,
    requests: dict[int, JoinRequest],
    vigil: ArrivalWait,
    noun: str,
) -> dict[int, Participant]:
    """Everybody, by number; `calls` are filled with the connections."""
    joined = {mine.number: mine}

    def arrived() -> Mapping[int, str]:
        return {number: participant.card.host for number, participant in sorted(joined.items())}

    while len(joined) < mine.count:
        request = vigil.until(clients.next_request, arrived)
        participant = _parse_participant(request.message, job)
        if participant is None:
            request.line.close()
            continue
        held = joined.get(participant.number)
        requests[participant.number if held is None else -1] = request
        if held is not None:
            raise RendezvousError(
                f"{noun} {participant.number} has come twice, from {held.card.host} and from "
                f"{participant.card.host}. Each {noun} needs a number of its own, from 0 up."
            )
        if participant.count != mine.count or not 0 < participant.number < mine.count:
            raise RendezvousError(
                f"{noun} 0 expects {mine.count} {noun}s, but {participant.card.host} came as "
                f"{noun} {participant.number} of {participant.count}. Start all of them with the "
                "same number."
            )
        joined[participant.number] = participant
    job_fingerprint.check_same_job(
        {number: participant.card for number, participant in joined.items()}, noun
    )
    return joined


def _parse_participant(told: Facts, job: str) -> Participant | None:
    """Who says so; None for who belongs to another job, or to none."""
    if told.get("job") != job:
        return None
    try:
        card = JobFingerprint.from_json(told["card"])
        participant = Participant(
            told["number"], told["count"], card, told["ranks"], told["master"]
        )
    except (KeyError, TypeError):
        return None
    numbers = (participant.number, participant.count, participant.ranks)
    sound = all(type(number) is int for number in numbers) and isinstance(participant.master, str)
    return participant if sound else None


def _close(requests: Mapping[int, JoinRequest]) -> None:
    for request in requests.values():
        request.line.close()


def _answer_all(requests: Mapping[int, JoinRequest], answer: Facts, secret: bytes | None) -> None:
    for request in requests.values():
        request.line.settimeout(PATIENCE)
        with suppress(OSError):  # one that is gone is missed later
            request.line.sendall(encode_message(answer, secret, str(request.message.get("drawn"))))
        request.line.settimeout(None)


# ----------------------------------------------------------------------------------- the others


def _join_as_client(
    place: endpoints.Endpoint, mine: Participant, seconds: float, noun: str
) -> RendezvousResult:
    vigil = ArrivalWait(mine.count, seconds, members=noun, speaks=mine.number == 1)
    line, master, secret = vigil.until(partial(_connect, place))
    drawn = make_secret().hex()
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
        line.sendall(encode_message(me, secret, str(theirs)))
        answer = read(line, end, _LONGEST_ANSWER, secret, drawn)
        if answer == REFUSED:
            raise AuthenticationError.secret_missing()
        error, facts = answer.get("error"), answer.get("facts")
        if error is None:
            job = _job_secret(secret, answer["drawn"])
        else:
            kind, sentence = map(str, error)
    except (OSError, ValueError, TypeError, KeyError):
        line.close()
        raise RendezvousError.absent([0], mine.count, seconds, members=noun) from None
    except AuthenticationError:
        line.close()
        raise
    if error is not None:
        line.close()
        raise _KINDS.get(kind, LaunchError)(sentence)
    line.settimeout(None)
    return RendezvousResult(facts or {}, {0: line}, job)


def _connect(place: endpoints.Endpoint) -> tuple[socket.socket, str, bytes | None] | None:
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
        return line, host, read_secret() or noted
    return None
