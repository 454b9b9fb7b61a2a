"""The roll call at a store: every rank hands in its card, rank 0 says whether they are one job."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from time import monotonic

import torch.distributed as dist

from instep import cards
from instep.cards import Card
from instep.errors import LaunchError, MixedJobError, RendezvousError
from instep.identity import World

BY_THE_SCRIPT = "the arguments of instep.init"
"""The source of a world that the script itself was told, most likely by its own arguments."""
_GRACE = 10.0
"""Seconds that the others wait longer than rank 0, which is to say who is missing."""
_VERDICT = "instep/verdict"
_KINDS = {kind.__name__: kind for kind in (LaunchError, MixedJobError, RendezvousError)}


def call(store: dist.Store, world: World, timeout: timedelta) -> bool:
    """Return when all ranks have come and are of one job: whether they share one loopback.

    Raises, the same on all ranks, MixedJobError, or RendezvousError where some did not come
    within `timeout`.
    """
    seconds = timeout.total_seconds()
    card = Card.of_this_process()
    if world.source == BY_THE_SCRIPT:
        card = replace(card, arguments=())
    store.set(_key(world.rank), json.dumps(card.to_json()))
    if world.rank != 0:
        return _hear(store, world, seconds)
    try:
        one_host = _judge(store, world, seconds)
    except LaunchError as error:
        store.set(_VERDICT, json.dumps([type(error).__name__, str(error)]))
        raise
    store.set(_VERDICT, json.dumps(one_host))
    return one_host


def _judge(store: dist.Store, world: World, seconds: float) -> bool:
    deadline = monotonic() + seconds
    came: dict[int, Card] = {}
    absent: list[int] = []
    for rank in range(world.size):
        if _comes(store, _key(rank), deadline - monotonic()):
            came[rank] = Card.from_json(json.loads(store.get(_key(rank))))
        else:
            absent.append(rank)
    if absent:
        where = {rank: card.host for rank, card in came.items()}
        raise RendezvousError.absent(absent, world.size, seconds, where)
    cards.check(came, "rank")
    return len({card.network for card in came.values()}) == 1


def _hear(store: dist.Store, world: World, seconds: float) -> bool:
    if not _comes(store, _VERDICT, seconds + _GRACE):
        raise RendezvousError.absent([0], world.size, seconds)
    verdict: bool | list[str] = json.loads(store.get(_VERDICT))
    if isinstance(verdict, list):
        kind, sentence = verdict
        raise _KINDS[kind](sentence)
    return verdict


def _comes(store: dist.Store, key: str, seconds: float) -> bool:
    """Whether somebody sets the key; a look at what is there takes no time."""
    try:
        store.wait([key], timedelta(seconds=max(seconds, 0.001)))
    except dist.DistStoreError:
        return False
    return True


def _key(rank: int) -> str:
    return f"instep/card{rank}"
