"""Collectives of Python values, which are pickled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeVar

from instep.distributed.communication.exchanges import transport_of_call
from instep.distributed.communication.groups import Group
from instep.distributed.communication.transport import get_transport, group_rank
from instep.distributed.errors import DisagreementError
from instep.process.exit_status import group_ranks

T = TypeVar("T")


def broadcast_object(value: T, root: int = 0, *, group: Group | None = None) -> T:
    """Root's value on every rank (of `group`).

    Args:
        value: what pickles; used on `root` only.
        root: the rank whose value it is; a rank of the job also where there is a `group`.
        group: the ranks that take part; None: all.

    Collective. Raises ValueError for a root that does not exist, NotAMemberError.
    """
    return transport_of_call(group).broadcast_object(value, group_rank(root, "root", group))


def all_gather_object(value: T, *, group: Group | None = None) -> list[T]:
    """Every rank's value, in the order of ranks, on every rank (of `group`).

    Args:
        value: what pickles.
        group: the ranks that take part; None: all.

    Collective. Raises NotAMemberError.
    """
    return transport_of_call(group).all_gather_object(value)


def gather_object(value: T, root: int = 0, *, group: Group | None = None) -> list[T] | None:
    """Every rank's value at `root`, in the order of ranks; None elsewhere.

    Args:
        value: what pickles.
        root: the rank that gets the values; a rank of the job also where there is a `group`.
        group: the ranks that take part; None: all.

    Collective. Raises ValueError for a root that does not exist, NotAMemberError.
    """
    transport, root_rank = transport_of_call(group), group_rank(root, "root", group)
    values = transport.all_gather_object(value)
    return values if transport.rank == root_rank else None


def check_same_on_all_ranks(values: Sequence[tuple[str, object]], advice: str) -> None:
    """Raise DisagreementError on all ranks unless each named value has the same text on all.

    The error shows the first value that differs. Collective.
    """
    gathered = get_transport().all_gather_object([(name, str(value)) for name, value in values])
    for entries in zip_longest(*gathered, fillvalue=("nothing", "nothing")):
        if len(set(entries)) > 1:
            names = dict.fromkeys(name for name, _ in entries if name != "nothing")
            seen = group_ranks([f"{name} {value}" for name, value in entries])
            raise DisagreementError(" or ".join(names), seen, advice)
