"""The next world of an elastic job: which slots, and which rank each of them has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from instep.distributed.identity.world import World, world_variables
from instep.launch.elastic.hosts import Slot


def plan_slots(
    free: Sequence[Slot], ranks: Mapping[Slot, int | None], most: int | None
) -> list[Slot]:
    """The slots of the next world in the order of their ranks, at most `most`.

    Args:
        free: the slots that may have a rank.
        ranks: the slots whose processes live, and their ranks in the last world.
        most: the largest size of a world; None for all slots.

    Processes of the last world come first, in their order: rank 0's state is that of all.
    """
    survivors = [slot for slot in free if ranks.get(slot) is not None]
    survivors.sort(key=lambda slot: ranks[slot] or 0)
    started = [slot for slot in free if slot in ranks and slot not in survivors]
    new = [slot for slot in free if slot not in ranks]
    return [*survivors, *started, *new][:most]


def rank_variables(rank: int, size: int, host: str) -> dict[str, str]:
    """The numbers of a rank, in PyTorch's variables and Horovod's. All hosts are this one."""
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    return world_variables(world) | worker_variables(rank, size) | {"HOROVOD_HOSTNAME": host}


def worker_variables(rank: int, size: int) -> dict[str, str]:
    """The variables in which Horovod's workers read their rank."""
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    numbers |= {"CROSS_RANK": 0, "CROSS_SIZE": 1}
    return {f"HOROVOD_{name}": str(value) for name, value in numbers.items()}
