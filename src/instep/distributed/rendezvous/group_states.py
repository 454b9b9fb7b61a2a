"""The key and the store of each default process group, by which its ranks know each other."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from instep.distributed.errors import AuthenticationError
from instep.distributed.identity import torch_devices
from instep.distributed.identity.authentication import derive_key, make_secret, read_secret
from instep.distributed.rendezvous.verified_store import VerifiedStore
from instep.process.exit_status import format_ranks
from instep.process.torch_private.distributed import default_store


@dataclass(frozen=True)
class GroupState:
    """The key and the store of a default process group."""

    key: bytes
    store: VerifiedStore
    """For instep's own values."""
    one_host: bool
    """Whether all ranks share one loopback interface, as far as is known."""
    timeout: timedelta | None
    """The limit of its collectives, where instep has made it."""


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()
"""By default process group."""


def find() -> GroupState | None:
    """The state of the default process group; None if it has none yet, or if there is no group."""
    group = dist.group.WORLD
    return None if group is None else _states.get(group)


def add(
    key: bytes | None, one_host: bool, store_of_torch: dist.Store, timeout: timedelta | None
) -> None:
    """Keep the state of the default process group, which instep has just made. Collective where
    there is no key: rank 0 draws one."""
    _add(key or _broadcast_key(), one_host, store_of_torch, timeout)


def add_of_script(one_host: bool) -> GroupState:
    """Make and keep the state of the default process group, which the script has made. Collective.

    Raises AuthenticationError where not all of its ranks were given the same secret.
    """
    return _add(_agreed_key(read_secret()), one_host, None, None)


def _add(
    key: bytes, one_host: bool, store_of_torch: dist.Store | None, timeout: timedelta | None
) -> GroupState:
    assert dist.group.WORLD is not None
    below = default_store()
    # Whoever has the store can use it after the group was destroyed, as threads that write do.
    store = VerifiedStore(below, derive_key(key, "store"), referenced=store_of_torch)
    state = _states[dist.group.WORLD] = GroupState(key, store, one_host, timeout)
    return state


def _agreed_key(secret: bytes | None) -> bytes:
    """Derived from the secret that all ranks were given, or drawn where none was given."""
    mine = bytes(32) if secret is None else derive_key(secret, "which")
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(torch_devices.control_device())
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(received, sent)
    unlike = [rank for rank, each in enumerate(received) if not torch.equal(each, received[0])]
    if unlike:
        raise AuthenticationError(
            f"{format_ranks(unlike)} has another INSTEP_SECRET (or ~/.instep/secret), or none, "
            f"than {format_ranks({*range(len(received))} - {*unlike})}. "
            "Give all ranks the same one, or none."
        )
    return _broadcast_key() if secret is None else derive_key(secret, "group")


def _broadcast_key() -> bytes:
    """Rank 0 draws it and broadcasts it, not through the store. Collective."""
    drawn = torch.frombuffer(bytearray(make_secret()), dtype=torch.uint8)
    key = drawn.to(torch_devices.control_device())
    dist.broadcast(key, 0)
    return key.cpu().numpy().tobytes()
