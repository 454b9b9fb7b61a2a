"""The check at a store that all ranks have joined, and are of one job.

Every rank sets its fingerprint; rank 0 reads all of them and sets the result, and for each rank a
proof that the result is of this job. The messages are 6 for each rank, of a size that does not grow
with their number.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import Any

import torch.distributed as dist

from instep.distributed.errors import AuthenticationError, RendezvousError, rendezvous_error
from instep.distributed.identity import authentication
from instep.distributed.identity.local_ranks import LocalRanks
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import job_fingerprint
from instep.distributed.rendezvous.arrival_wait import ArrivalWait
from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.distributed.rendezvous.verified_store import VerifiedStore
from instep.errors import LaunchError

BY_THE_SCRIPT = "the arguments of instep.init"
"""The source of a world that the script itself was told, most likely by its own arguments."""
_GRACE = 10.0
"""Seconds that the others wait longer than rank 0, which names the missing ranks."""
_LINGER = 1.0
"""Seconds for which a rank keeps the store that rank 0 should have kept."""
_AT_ONCE = 256
"""Ranks whose values are read, or written, in one message."""
_RESULT, _ENDED = "instep/join", "instep/ended"


@dataclass(frozen=True)
class JoinResult:
    """All ranks have joined, and are of one job."""

    one_host: bool
    """Whether they share one loopback interface."""
    key: bytes | None
    """Signs their messages from now on; None where they have no secret in common."""


def check_join(
    store: dist.Store,
    world: World,
    timeout: timedelta,
    local_ranks: LocalRanks | None = None,
    secret: bytes | None = None,
    on_all_joined: Callable[[], None] = lambda: None,
) -> JoinResult:
    """Return when all ranks have joined and are of one job.

    With a `secret` every rank draws a number, and the key is derived from the secret and a digest
    of all numbers: messages of an earlier job with the same secret are not valid in this one.
    Rank 0 calls `on_all_joined` before it sets the result: a rank that has read it may be at its
    next rendezvous.

    Raises, the same on all ranks, MixedJobError, or RendezvousError where some did not join
    within `timeout`, or will not, as one of the `local_ranks` on any host has ended. Raises
    AuthenticationError for a value that was not written with the `secret`.
    """
    seconds = timeout.total_seconds()
    store = _signed(store, secret)
    fingerprint = JobFingerprint.of_this_process()
    if world.source == BY_THE_SCRIPT:
        fingerprint = replace(fingerprint, arguments=())
    number = os.urandom(16).hex()
    store.set(_key(world.rank), json.dumps([fingerprint.to_json(), number]))
    if world.rank != 0:
        wait = ArrivalWait(world.size, seconds, prints=False, grace=_GRACE)
        one_host, digest = _wait_for_result(store, world, wait, local_ranks)
        if _read(store, _proof_key(world.rank)) != [digest, number]:  # repeated, of an earlier job
            raise AuthenticationError.not_of_this_job(_RESULT)
    else:
        try:
            wait = ArrivalWait(world.size, seconds, local_ranks)
            one_host, numbers = _check_all(store, world, wait)
            digest = blake2b("".join(numbers).encode(), digest_size=16).hexdigest()
            for first in range(0, world.size, _AT_ONCE):
                some = range(first, min(first + _AT_ONCE, world.size))
                proofs = [json.dumps([digest, numbers[rank]]) for rank in some]
                _set_all(store, [_proof_key(rank) for rank in some], proofs)
            on_all_joined()
        except LaunchError as error:
            _set_error(store, error)
            raise
        store.set(_RESULT, json.dumps([one_host, digest]))
    return JoinResult(one_host, secret and authentication.derive_key(secret, "job", digest))


def has_joined(store: dist.Store, rank: int) -> bool:
    """Whether a process has set that rank's fingerprint."""
    return store.check([_key(rank)])


def report_instead_of_rank_0(store: dist.Store, error: LaunchError, secret: bytes | None) -> None:
    """Set an error as the result: rank 0 has ended, which ranks on other hosts cannot see."""
    _set_error(_signed(store, secret), error)
    time.sleep(_LINGER)


def raise_reported_error(store: dist.Store) -> None:
    """Raise the error that a rank set in place of rank 0, if there is one."""
    if store.check([_RESULT]):
        _raise_if_error(_read(store, _RESULT))


def _set_error(store: dist.Store, error: LaunchError) -> None:
    store.set(_RESULT, json.dumps([type(error).__name__, str(error)]))


def _raise_if_error(result: Any) -> None:
    name, *text = result if isinstance(result, list) else [None]
    if isinstance(name, str):
        raise rendezvous_error(name, str(*text[:1]))


def _signed(store: dist.Store, secret: bytes | None) -> dist.Store:
    if secret is None:
        return store
    return VerifiedStore(store, authentication.derive_key(secret, "join"))


def _check_all(store: dist.Store, world: World, wait: ArrivalWait) -> tuple[bool, list[str]]:
    """Whether all share one loopback interface, and the numbers that they have drawn."""

    def arrived() -> Mapping[int, str]:
        joined = [rank for rank in range(world.size) if has_joined(store, rank)]
        return {rank: _read_fingerprint(store, rank)[0].host for rank in joined}

    def attempt(ranks: range) -> list[tuple[JobFingerprint, str]] | None:
        keys = [_key(rank) for rank in ranks]
        if store.check(keys):
            texts = zip(keys, store.multi_get(keys), strict=True)
            return [_parse_fingerprint(key, text) for key, text in texts]
        if store.check([_ENDED]):
            ended, host = _read(store, _ENDED)
            raise RendezvousError.ended(ended, world.size, host)
        return None

    joined: list[tuple[JobFingerprint, str]] = []
    while (first := len(joined)) < world.size:
        some = range(first, min(first + _AT_ONCE, world.size))
        joined += wait.until(partial(attempt, some), arrived)
    fingerprints = {rank: fingerprint for rank, (fingerprint, _) in enumerate(joined)}
    job_fingerprint.check_same_job(fingerprints, "rank")
    one_host = len({fingerprint.network for fingerprint in fingerprints.values()}) == 1
    return one_host, [number for _, number in joined]


def _wait_for_result(
    store: dist.Store, world: World, wait: ArrivalWait, local_ranks: LocalRanks | None
) -> tuple[bool, str]:
    """As `_check_all`, with a digest of the numbers.

    Rank 0 raises for all; a rank that sees that one of its host has ended reports it.
    """

    def attempt() -> Any:
        if store.check([_RESULT]):
            return _read(store, _RESULT)
        if ended := local_ranks.ended() if local_ranks else ():
            if 0 in ended:
                raise RendezvousError.ended(ended, world.size, socket.gethostname())
            store.set(_ENDED, json.dumps([sorted(ended), socket.gethostname()]))
        return None

    try:
        result = wait.until(attempt)
        _raise_if_error(result)
        one_host, digest = result
    except dist.DistNetworkError:  # rank 0, which keeps the store, has ended
        raise RendezvousError.ended([0], world.size, "its host") from None
    except (TypeError, ValueError):
        raise AuthenticationError.not_of_this_job(_RESULT) from None
    return bool(one_host), str(digest)


def _read_fingerprint(store: dist.Store, rank: int) -> tuple[JobFingerprint, str]:
    """The fingerprint of that rank, and the number that it has drawn."""
    return _parse_fingerprint(_key(rank), store.get(_key(rank)))


def _parse_fingerprint(key: str, text: bytes) -> tuple[JobFingerprint, str]:
    try:
        fingerprint, number = _parse(text)
        return JobFingerprint.from_json(fingerprint), str(number)
    except (TypeError, ValueError):
        raise AuthenticationError.not_of_this_job(key) from None


def _read(store: dist.Store, key: str) -> Any:
    """A JSON value. Raises ValueError for anything else."""
    return _parse(store.get(key))


def _parse(text: bytes) -> Any:
    if text.startswith(authentication.MAGIC):
        raise AuthenticationError.secret_missing()
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError from None


def _set_all(store: Any, keys: list[str], values: list[str]) -> None:
    """In one message. torch's stubs do not know of it."""
    store.multi_set(keys, values)


def _key(rank: int) -> str:
    return f"instep/fingerprint{rank}"


def _proof_key(rank: int) -> str:
    return f"instep/join{rank}"
