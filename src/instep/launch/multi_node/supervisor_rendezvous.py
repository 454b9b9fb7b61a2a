"""The rendezvous before ranks start: the first participant listens, the others connect to it.

Participants are the supervisors of several hosts, or ranks that a launcher started with
`python -m instep`. The first one sends a nonce to each client. Each client sends one line: its
number and its job's fingerprint. The first participant compares the fingerprints and answers each
with one line: the values that all need, or the error. If they share a secret, each line is signed
together with the receiver's nonce, so that no stranger can write or replay it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from instep.distributed import interfaces
from instep.distributed.errors import (
    AuthenticationError,
    MixedJobError,
    RendezvousError,
    rendezvous_error,
)
from instep.distributed.identity import endpoints
from instep.distributed.identity.authentication import derive_key, make_secret, read_secret
from instep.distributed.rendezvous import job_fingerprint, listening, port_file
from instep.distributed.rendezvous.arrival_wait import ArrivalWait
from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.launch.multi_node.clients import (
    MESSAGE_TIMEOUT,
    REFUSED,
    ClientListener,
    JoinRequest,
    encode_message,
    read_message,
)

_CONNECT_TIMEOUT = 2.0
"""Seconds within which another host's address must accept a connection."""
_MAX_ANSWER = 1 << 24
"""Bytes."""


@dataclass(frozen=True)
class Participant:
    """One participant of the rendezvous."""

    number: int
    """Its number, from 0."""
    count: int
    """The number of participants that it expects."""
    fingerprint: JobFingerprint
    ranks: int
    """The number of its ranks."""
    master: str = ""
    """The address at which it reached the first participant."""


Values = dict[str, Any]
"""What the first participant sends to all: a JSON object."""


@dataclass(frozen=True)
class RendezvousResult:
    """The result of a rendezvous, on each participant."""

    values: Values
    connections: Mapping[int, socket.socket]
    """Connections by number: the first participant has one to each, the others one to it."""
    secret: bytes
    """The job's secret: derived from the secret that they share and a nonce, or, if they share
    none, chosen by the first participant."""


def join_rendezvous(
    endpoint: endpoints.Endpoint,
    mine: Participant,
    decide: Callable[[Sequence[Participant]], Values],
    seconds: float,
    noun: str = "rank",
) -> RendezvousResult:
    """Wait for all participants. On the first one `decide` returns the values for all.

    Raises the same LaunchError on every participant that came: RendezvousError, MixedJobError,
    PortInUseError. `noun` names a participant in messages: rank or host.
    """
    if mine.number != 0:
        return _join_as_client(endpoint, mine, seconds, noun)
    requests: dict[int, JoinRequest] = {}
    secret: bytes | None = None
    with ExitStack() as failed:
        failed.callback(_close, requests)
        try:
            with _listen(endpoint) as (listener, secret):
                arrival_wait = ArrivalWait(mine.count, seconds, members=noun)
                clients = ClientListener(listener, secret, mine.count)
                failed.callback(clients.close)
                joined = _receive(clients, _job_name(endpoint), mine, requests, arrival_wait, noun)
                clients.close()
            values = decide([joined[number] for number in range(mine.count)])
        except (MixedJobError, RendezvousError, AuthenticationError) as error:
            _answer_all(requests, {"error": [type(error).__name__, str(error)]}, secret)
            raise
        nonce = make_secret().hex()
        _answer_all(requests, {"values": values, "nonce": nonce}, secret)
        failed.pop_all()
    connections = {number: request.connection for number, request in requests.items()}
    return RendezvousResult(values, connections, _job_secret(secret, nonce))


def _job_secret(secret: bytes | None, nonce: str) -> bytes:
    return bytes.fromhex(nonce) if secret is None else derive_key(secret, "assembly", nonce)


# ------------------------------------------------------------------------- the first participant


def _job_name(endpoint: endpoints.Endpoint) -> str:
    """A name that tells this job's clients from others that connect to the same port."""
    return endpoint.job if isinstance(endpoint, endpoints.Address) else endpoint.path


@contextmanager
def _listen(endpoint: endpoints.Endpoint) -> Iterator[tuple[socket.socket, bytes | None]]:
    """The listening socket, and the secret of the clients."""
    given = read_secret()
    if isinstance(endpoint, endpoints.Address):
        with listening.listen(endpoint.host, endpoint.port, one_host=False) as listener:
            yield listener, given
        return
    is_private = isinstance(endpoint, endpoints.PrivateFile)
    hosts = [port_file.LOOPBACK_HOST] if is_private else interfaces.routable_addresses()
    with (
        listening.listen(listening.listen_address(hosts)) as listener,
        port_file.publish(endpoint.path, listener.getsockname()[1], hosts) as noted,
    ):
        yield listener, given or noted


def _receive(
    clients: ClientListener,
    job: str,
    mine: Participant,
    requests: dict[int, JoinRequest],
    arrival_wait: ArrivalWait,
    noun: str,
) -> dict[int, Participant]:
    """All participants by number; fills `requests` with their connections."""
    joined = {mine.number: mine}

    def arrived() -> Mapping[int, str]:
        return {
            number: participant.fingerprint.host for number, participant in sorted(joined.items())
        }

    while len(joined) < mine.count:
        request = arrival_wait.until(clients.next_request, arrived)
        participant = _parse_participant(request.message, job)
        if participant is None:
            request.connection.close()
            continue
        held = joined.get(participant.number)
        requests[participant.number if held is None else -1] = request
        if held is not None:
            raise RendezvousError(
                f"{noun} {participant.number} has come twice, from {held.fingerprint.host} and "
                f"from {participant.fingerprint.host}. Each {noun} needs its own number, from 0 up."
            )
        if participant.count != mine.count or not 0 < participant.number < mine.count:
            raise RendezvousError(
                f"{noun} 0 expects {mine.count} {noun}s, but {participant.fingerprint.host} came "
                f"as {noun} {participant.number} of {participant.count}. Start all of them with "
                "the same number."
            )
        joined[participant.number] = participant
    job_fingerprint.check_same_job(
        {number: participant.fingerprint for number, participant in joined.items()}, noun
    )
    return joined


def _parse_participant(message: Values, job: str) -> Participant | None:
    """The participant that sent this message; None if it is not of this job."""
    if message.get("job") != job:
        return None
    try:
        fingerprint = JobFingerprint.from_json(message["fingerprint"])
        participant = Participant(
            message["number"], message["count"], fingerprint, message["ranks"], message["master"]
        )
    except (KeyError, TypeError):
        return None
    numbers = (participant.number, participant.count, participant.ranks)
    sound = all(type(number) is int for number in numbers) and isinstance(participant.master, str)
    return participant if sound else None


def _close(requests: Mapping[int, JoinRequest]) -> None:
    for request in requests.values():
        request.connection.close()


def _answer_all(requests: Mapping[int, JoinRequest], answer: Values, secret: bytes | None) -> None:
    for request in requests.values():
        request.connection.settimeout(MESSAGE_TIMEOUT)
        with suppress(OSError):  # a client that is gone is reported later
            request.connection.sendall(
                encode_message(answer, secret, str(request.message.get("nonce")))
            )
        request.connection.settimeout(None)


# ----------------------------------------------------------------------------------- the others


def _join_as_client(
    endpoint: endpoints.Endpoint, mine: Participant, seconds: float, noun: str
) -> RendezvousResult:
    arrival_wait = ArrivalWait(mine.count, seconds, members=noun, prints=mine.number == 1)
    connection, master, secret = arrival_wait.until(partial(_connect, endpoint))
    nonce = make_secret().hex()
    message = {
        "job": _job_name(endpoint),
        "number": mine.number,
        "count": mine.count,
        "fingerprint": mine.fingerprint.to_json(),
        "ranks": mine.ranks,
        "master": master,
        "nonce": nonce,
    }
    end = monotonic() + seconds + MESSAGE_TIMEOUT
    with ExitStack() as failed:
        failed.callback(connection.close)
        try:
            theirs = read_message(connection, end, _MAX_ANSWER, None, "")["nonce"]
            connection.sendall(encode_message(message, secret, str(theirs)))
            answer = read_message(connection, end, _MAX_ANSWER, secret, nonce)
            if answer == REFUSED:
                raise AuthenticationError.secret_missing()
            if (error := answer.get("error")) is not None:
                name, text = map(str, error)
                raise rendezvous_error(name, text)
            job = _job_secret(secret, answer["nonce"])
        except (OSError, ValueError, TypeError, KeyError):
            raise RendezvousError.absent([0], mine.count, seconds, members=noun) from None
        failed.pop_all()
    connection.settimeout(None)
    return RendezvousResult(answer.get("values") or {}, {0: connection}, job)


def _connect(endpoint: endpoints.Endpoint) -> tuple[socket.socket, str, bytes | None] | None:
    """A connection to the first participant, its address, and the secret; None if it is not there
    yet."""
    if isinstance(endpoint, endpoints.Address):
        listening.resolve(endpoint.host, endpoint.port)
        host, port, noted = endpoint.host, endpoint.port, None
    else:
        note = port_file.read(endpoint.path)
        if note is None:
            return None
        host, port, noted = note
    with suppress(OSError):
        connection = socket.create_connection((host, port), _CONNECT_TIMEOUT)
        return connection, host, read_secret() or noted
    return None
