"""The roll call at a store: every rank hands in its card, rank 0 says whether they are one job."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from instep.distributed.errors import AuthenticationError, MixedJobError, RendezvousError
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
"""Seconds that the others wait longer than rank 0, which is to say who is missing."""
_LINGERS = 1.0
"""Seconds for which a rank keeps the store that rank 0 should have kept."""
_VERDICT, _ENDED = "instep/verdict", "instep/ended"
_KINDS = {
    kind.__name__: kind
    for kind in (LaunchError, MixedJobError, RendezvousError, AuthenticationError)
}


@dataclass(frozen=True)
class JoinResult:
    """All ranks have come, and are of one job."""

    one_host: bool
    """Whether they share one loopback interface."""
    key: bytes | None
    """What marks all that they say from now on; None where they have no secret in common."""


def check_join(
    store: dist.Store,
    world: World,
    timeout: timedelta,
    siblings: LocalRanks | None = None,
    secret: bytes | None = None,
    all_have_come: Callable[[], None] = lambda: None,
) -> JoinResult:
    """Return when all ranks have come and are of one job.

    With a `secret` every rank draws a number, and the key comes of the secret and all numbers: so
    what was said in an earlier job with the same secret says nothing in this one. Rank 0 calls
    `all_have_come` before it says so: who has heard it may be at the next meeting.

    Raises, the same on all ranks, MixedJobError, or RendezvousError where some did not come
    within `timeout`, or will not, as one of the `siblings` on any host has ended. Raises
    AuthenticationError for what was not written with the `secret`.
    """
    seconds = timeout.total_seconds()
    store = _of_job(store, secret)
    card = JobFingerprint.of_this_process()
    if world.source == BY_THE_SCRIPT:
        card = replace(card, arguments=())
    mine = os.urandom(16).hex()
    store.set(_key(world.rank), json.dumps([card.to_json(), mine]))
    if world.rank != 0:
        vigil = ArrivalWait(world.size, seconds, speaks=False, grace=_GRACE)
        one_host, numbers = _hear(store, world, vigil, siblings)
        if mine != numbers[world.rank]:  # an earlier job's verdict, repeated
            raise AuthenticationError.not_of_this_job(_VERDICT)
    else:
        try:
            one_host, numbers = _judge(store, world, ArrivalWait(world.size, seconds, siblings))
            all_have_come()
        except LaunchError as error:
            store.set(_VERDICT, json.dumps([type(error).__name__, str(error)]))
            raise
        store.set(_VERDICT, json.dumps([one_host, numbers]))
    return JoinResult(one_host, secret and authentication.derive_key(secret, "job", *numbers))


def has_arrived(store: dist.Store, rank: int) -> bool:
    """Whether somebody has handed in that rank's card."""
    return store.check([_key(rank)])


def stand_in_for_rank_0(store: dist.Store, error: LaunchError, secret: bytes | None) -> None:
    """Rank 0 has ended, and who waits for it on other hosts cannot see that: tell them."""
    _of_job(store, secret).set(_VERDICT, json.dumps([type(error).__name__, str(error)]))
    time.sleep(_LINGERS)


def raise_error_of_stand_in(store: dist.Store) -> None:
    """Raise what a rank that stands in for rank 0 has said, if there is one."""
    if store.check([_VERDICT]):
        _raise_told(_read(store, _VERDICT))


def _raise_told(verdict: Any) -> None:
    kind, *text = verdict if isinstance(verdict, list) else [None]
    if isinstance(kind, str):
        raise _KINDS.get(kind, LaunchError)(*map(str, text[:1]))


def _of_job(store: dist.Store, secret: bytes | None) -> dist.Store:
    if secret is None:
        return store
    return VerifiedStore(store, authentication.derive_key(secret, "roll call"))


def _judge(store: dist.Store, world: World, vigil: ArrivalWait) -> tuple[bool, list[str]]:
    """Whether all share one loopback interface, and the numbers that they have drawn."""

    def came() -> Mapping[int, str]:
        there = [rank for rank in range(world.size) if has_arrived(store, rank)]
        return {rank: _card(store, rank)[0].host for rank in there}

    def comes(rank: int) -> tuple[JobFingerprint, str] | None:
        if has_arrived(store, rank):
            return _card(store, rank)
        if store.check([_ENDED]):
            ended, host = _read(store, _ENDED)
            raise RendezvousError.ended(ended, world.size, host)
        return None

    all_ = {rank: vigil.until(partial(comes, rank), came) for rank in range(world.size)}
    job_fingerprint.check_same_job({rank: card for rank, (card, _) in all_.items()}, "rank")
    one_host = len({card.network for card, _ in all_.values()}) == 1
    return one_host, [number for _, number in all_.values()]


def _hear(
    store: dist.Store, world: World, vigil: ArrivalWait, siblings: LocalRanks | None
) -> tuple[bool, list[str]]:
    """Rank 0 raises for all; so who sees that one of this host has ended tells it."""

    def verdict() -> Any:
        if store.check([_VERDICT]):
            return _read(store, _VERDICT)
        if ended := siblings.ended() if siblings else ():
            if 0 in ended:
                raise RendezvousError.ended(ended, world.size, socket.gethostname())
            store.set(_ENDED, json.dumps([sorted(ended), socket.gethostname()]))
        return None

    try:
        told = vigil.until(verdict)
        _raise_told(told)
        first, second = told
    except dist.DistNetworkError:  # rank 0, who keeps the store, has gone
        raise RendezvousError.ended([0], world.size, "its host") from None
    except (TypeError, ValueError):
        raise AuthenticationError.not_of_this_job(_VERDICT) from None
    if not isinstance(second, list) or len(second) != world.size:
        raise AuthenticationError.not_of_this_job(_VERDICT)
    return bool(first), [str(number) for number in second]


def _card(store: dist.Store, rank: int) -> tuple[JobFingerprint, str]:
    """Of that rank, and the number that it has drawn."""
    try:
        card, number = _read(store, _key(rank))
        return JobFingerprint.from_json(card), str(number)
    except (TypeError, ValueError):
        raise AuthenticationError.not_of_this_job(_key(rank)) from None


def _read(store: dist.Store, key: str) -> Any:
    """As JSON has it. Raises ValueError for what is none."""
    text = store.get(key)
    if text.startswith(authentication.MAGIC):
        raise AuthenticationError.secret_missing()
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError from None


def _key(rank: int) -> str:
    return f"instep/card{rank}"
