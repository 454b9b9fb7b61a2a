"""Some of the ranks as a value: `instep.group(ranks)`, taken by every collective as `group=`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch.distributed as dist

from instep.distributed.communication.errors import NotAMemberError
from instep.distributed.rendezvous import bootstrap
from instep.process import settings


@dataclass(frozen=True)
class Group:
    """Some ranks of the world; what a collective with `group=` talks among."""

    ranks: tuple[int, ...]
    """The members' ranks in the world, ascending: the order of every collective's results."""
    handle: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    """torch's group, for code of torch; None on ranks that are not members and for one member."""

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    def group_rank(self, rank: int) -> int:
        """Which of the members `rank` is. Raises ValueError for a rank that is none of them."""
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in the group of {_named(self.ranks)}.")
        return self.ranks.index(rank)

    def own_group_rank(self) -> int:
        """Which of the members this rank is. Raises NotAMemberError where it is none of them."""
        rank = bootstrap.current().rank
        if rank not in self.ranks:
            raise NotAMemberError(rank, self.ranks)
        return self.ranks.index(rank)


def group(ranks: Iterable[int]) -> Group:
    """A group of ranks. Make it once and keep it: each call costs connections.

    Args:
        ranks: ranks of the world, in any order; their results come in ascending order.

    Returns:
        A value that every collective takes as `group=`. Only members may talk in it; a call by
        another rank raises NotAMemberError. Roots and peers stay ranks of the world.

    Collective: every rank of the world calls it with the same ranks, members or not.
    Raises ValueError for no rank, a rank twice, or one that does not exist.
    """
    members = tuple(sorted(ranks))
    world = bootstrap.init()
    if not members or len(set(members)) < len(members):
        raise ValueError(f"a group holds each of its ranks once, and at least one; got {members}.")
    if members[0] < 0 or members[-1] >= world.size:
        raise ValueError(
            f"the group of {_named(members)} does not exist: the ranks are 0 to {world.size - 1}."
        )
    if len(members) == 1:
        return Group(members)
    handle = dist.new_group(list(members), timeout=settings.timeout())
    return Group(members, handle if isinstance(handle, dist.ProcessGroup) else None)


def release(group: Group) -> None:
    """Let the connections of a group go; nobody may talk in it any more. Not collective."""
    if group.handle is not None:
        dist.destroy_process_group(group.handle)


def _named(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
