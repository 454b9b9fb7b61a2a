"""Python values between ranks, pickled."""

from __future__ import annotations

from typing import TypeVar

from instep.distributed.communication.groups import Group
from instep.distributed.communication.transport import place_of, transport

T = TypeVar("T")


def broadcast_object(value: T, root: int = 0, *, group: Group | None = None) -> T:
    """Root's value on every rank (of `group`).

    Raises ValueError for a root that does not exist, NotAMemberError.
    """
    return transport(group).broadcast_object(value, place_of(root, "root", group))


def all_gather_object(value: T, *, group: Group | None = None) -> list[T]:
    """Every rank's value, in the order of ranks, on every rank (of `group`).

    Raises NotAMemberError.
    """
    return transport(group).all_gather_object(value)


def gather_object(value: T, root: int = 0, *, group: Group | None = None) -> list[T] | None:
    """Every rank's value at `root`, in the order of ranks; None elsewhere.

    Raises ValueError for a root that does not exist, NotAMemberError.
    """
    way, place = transport(group), place_of(root, "root", group)
    values = way.all_gather_object(value)
    return values if way.rank == place else None
