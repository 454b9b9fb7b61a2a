"""Registration of the backend "instep" in torch.distributed, and creation of its groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

from torch.distributed import Backend, PrefixStore, ProcessGroup, ProcessGroupGloo, Store
from torch.distributed.distributed_c10d import GroupName

from instep.distributed.shm import torch_calls
from instep.distributed.shm.across_hosts import ProcessGroupAcrossHosts
from instep.distributed.shm.backend import InstepProcessGroup
from instep.distributed.shm.joining import CannotShareMemory, join
from instep.distributed.shm.over_gloo import NAME, ProcessGroupOverGloo
from instep.process import print_line, settings
from instep.process.torch_private.distributed import has_backend, set_sequence_number


class _GroupOptions(Protocol):
    """c10d::DistributedBackendOptions: a group that torch wants to create."""

    store: Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]


def register() -> None:
    """Make the backend known to torch.distributed, for CPU tensors. May be called twice."""
    if not has_backend(NAME.upper()):
        Backend.register_backend(NAME, create_group, extended_api=True, devices=["cpu"])
    torch_calls.install()


def create_group(options: _GroupOptions, _: object = None) -> ProcessGroup:
    """Create a group. Collective."""
    rank, size, store = options.group_rank, options.group_size, options.store
    gloo = ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, options.timeout)
    gloo.options.global_ranks_in_group = options.global_ranks_in_group
    gloo.options.group_name = GroupName(options.group_id)
    set_sequence_number(gloo)
    ranks = options.global_ranks_in_group or range(size)
    if str(settings.BACKEND) == "gloo":
        return ProcessGroupOverGloo(store, gloo, options.group_id)
    try:
        exchange, sizes = join(
            PrefixStore("shm/", store), rank, ranks, lambda: gloo.options._timeout
        )
    except CannotShareMemory as reason:
        if rank == 0 and not options.global_ranks_in_group and str(reason):
            print_line(f"no shared memory, Gloo instead: {reason} [INS715]")
        return ProcessGroupOverGloo(store, gloo, options.group_id)
    if len(sizes) == 1:
        return InstepProcessGroup(store, gloo, options.group_id, exchange)
    return ProcessGroupAcrossHosts(store, gloo, options.group_id, exchange, sizes)
