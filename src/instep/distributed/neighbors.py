"""What a rank shows to the ranks before and after it, of which none waits for another."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from instep.distributed.rendezvous import bootstrap
from instep.distributed.watchdog import client
from instep.process.process_value import ProcessValue

_resets = ProcessValue(0)


def show(key: str, value: Any) -> list[tuple[int, Any]]:
    """Show a value of JSON under `key`, in place of an earlier one there; returns the neighbors
    that have shown theirs, and what it is. Of two neighbors the one that comes later sees the
    other's. Not collective."""
    if client.has_rank_0_ended():
        return []
    world, store = bootstrap.current(), bootstrap.store()
    begin = f"{key} after {_resets.value} resets, of rank"
    found = []
    with suppress(RuntimeError):  # torch's: rank 0 has ended, and with it the store
        store.set(f"{begin} {world.rank}", json.dumps(value))
        for rank in sorted({(world.rank + step) % world.size for step in (-1, 1)} - {world.rank}):
            theirs = f"{begin} {rank}"
            if store.check([theirs]):
                found.append((rank, json.loads(store.get(theirs))))
    return found


def reset() -> None:
    """Forget what was shown. All ranks must do so."""
    _resets.value += 1
