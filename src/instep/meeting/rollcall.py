"""The roll call at a store: every rank hands in its card, rank 0 says whether they are one job."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from instep.errors import LaunchError, MixedJobError, RendezvousError
from instep.identity.siblings import Siblings
from instep.identity.world import World
from instep.meeting import cards
from instep.meeting.cards import Card
from instep.meeting.vigil import Vigil

BY_THE_SCRIPT = "the arguments of instep.init"
"""The source of a world that the script itself was told, most likely by its own arguments."""
_GRACE = 10.0
"""Seconds that the others wait longer than rank 0, which is to say who is missing."""
_LINGERS = 1.0
"""Seconds for which a rank keeps the store that rank 0 should have kept."""
_VERDICT, _ENDED = "instep/verdict", "instep/ended"
_KINDS = {kind.__name__: kind for kind in (LaunchError, MixedJobError, RendezvousError)}


def call(
    store: dist.Store, world: World, timeout: timedelta, siblings: Siblings | None = None
) -> bool:
    """Return when all ranks have come and are of one job: whether they share one loopback.

    Raises, the same on all ranks, MixedJobError, or RendezvousError where some did not come
    within `timeout`, or will not, as one of the `siblings` on any host has ended.
    """
    seconds = timeout.total_seconds()
    card = Card.of_this_process()
    if world.source == BY_THE_SCRIPT:
        card = replace(card, arguments=())
    store.set(_key(world.rank), json.dumps(card.to_json()))
    if world.rank != 0:
        return _hear(store, world, Vigil(world.size, seconds, speaks=False, grace=_GRACE), siblings)
    try:
        one_host = _judge(store, world, Vigil(world.size, seconds, siblings))
    except LaunchError as error:
        store.set(_VERDICT, json.dumps([type(error).__name__, str(error)]))
        raise
    store.set(_VERDICT, json.dumps(one_host))
    return one_host


def stand_in(store: dist.Store, error: LaunchError) -> None:
    """Rank 0 has ended, and who waits for it on other hosts cannot see that: tell them."""
    store.set(_VERDICT, json.dumps([type(error).__name__, str(error)]))
    time.sleep(_LINGERS)


def _judge(store: dist.Store, world: World, vigil: Vigil) -> bool:
    def came() -> Mapping[int, str]:
        there = [rank for rank in range(world.size) if store.check([_key(rank)])]
        return {rank: _card(store, rank).host for rank in there}

    def comes(rank: int) -> Card | None:
        if store.check([_key(rank)]):
            return _card(store, rank)
        if store.check([_ENDED]):
            ended, host = json.loads(store.get(_ENDED))
            raise RendezvousError.ended(ended, world.size, host)
        return None

    all_ = {rank: vigil.until(partial(comes, rank), came) for rank in range(world.size)}
    cards.check(all_, "rank")
    return len({card.network for card in all_.values()}) == 1


def _hear(store: dist.Store, world: World, vigil: Vigil, siblings: Siblings | None) -> bool:
    """Rank 0 raises for all; so who sees that one of this host has ended tells it."""

    def verdict() -> str | None:
        if store.check([_VERDICT]):
            return str(store.get(_VERDICT), "utf-8")
        if ended := siblings.ended() if siblings else ():
            if 0 in ended:
                raise RendezvousError.ended(ended, world.size, socket.gethostname())
            store.set(_ENDED, json.dumps([sorted(ended), socket.gethostname()]))
        return None

    try:
        said: bool | list[str] = json.loads(vigil.until(verdict))
    except dist.DistNetworkError:  # rank 0, who keeps the store, has gone
        raise RendezvousError.ended([0], world.size, "its host") from None
    if isinstance(said, list):
        kind, sentence = said
        raise _KINDS[kind](sentence)
    return said


def _card(store: dist.Store, rank: int) -> Card:
    return Card.from_json(json.loads(store.get(_key(rank))))


def _key(rank: int) -> str:
    return f"instep/card{rank}"
