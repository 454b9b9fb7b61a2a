"""Groups of ranks: `instep.group(ranks)`, which every collective takes as `group=`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch.distributed as dist

from instep.distributed.communication.errors import NotAMemberError
from instep.distributed.rendezvous import bootstrap
from instep.process import settings
from instep.process.exit_status import format_ranks


@dataclass(frozen=True)
class Group:
    """Some ranks of the world, for the argument `group=` of the collectives.

    Attributes:
        ranks: the members' ranks in the world, ascending: the order of every collective's results.
        handle: torch's process group; None on ranks that are no members, and in groups of one.

    `instep.group` makes it. `rank in group` tells whether a rank of the world is a member.
    """

    ranks: tuple[int, ...]
    handle: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    def group_rank(self, rank: int) -> int:
        """The index of `rank` among the members. Raises ValueError if it is no member."""
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in the group of {format_ranks(self.ranks)}.")
        return self.ranks.index(rank)

    def own_group_rank(self) -> int:
        """The index of this rank among the members. Raises NotAMemberError if it is no member."""
        rank = bootstrap.current().rank
        if rank not in self.ranks:
            raise NotAMemberError(rank, self.ranks)
        return self.ranks.index(rank)


def group(ranks: Iterable[int]) -> Group:
    """A group of ranks. Make it once and keep it: each call costs connections.

    Args:
        ranks: ranks of the world, in any order; their results come in ascending order.

    Returns:
        A value that every collective takes as `group=`. Only members may use it; a call by another
        rank raises NotAMemberError. Roots and peers stay ranks of the world.

    Collective: every rank of the world calls it with the same ranks, members or not.
    Raises ValueError for no rank, a rank twice, or one that does not exist.
    """
    members = tuple(sorted(ranks))
    world = bootstrap.init()
    if not members or len(set(members)) < len(members):
        raise ValueError(f"a group holds each of its ranks once, and at least one; got {members}.")
    if members[0] < 0 or members[-1] >= world.size:
        raise ValueError(
            f"the group of {format_ranks(members)} does not exist: "
            f"the ranks are 0 to {world.size - 1}."
        )
    if len(members) == 1:
        return Group(members)
    timeout = bootstrap.default_timeout() or settings.timeout()
    handle = dist.new_group(list(members), timeout=timeout)
    return Group(members, handle if isinstance(handle, dist.ProcessGroup) else None)


def destroy_group(group: Group) -> None:
    """Close the connections of a group, which can no longer be used. Not collective."""
    if group.handle is not None:
        dist.destroy_process_group(group.handle)
