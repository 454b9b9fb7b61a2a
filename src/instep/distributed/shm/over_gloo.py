"""A process group in Python that leaves everything to Gloo: the ground of the backend.

It defines every method that torch's C++ trampoline (PyProcessGroup) looks up. Where a method is
missing, the trampoline calls the C++ one while it holds the GIL; Gloo's worker, which frees the
last tensor under the lock of its queue, waits for the GIL, the caller waits for the lock, and both
for ever. (torch 2.13: a broadcast_object_list after send and recv, in 2 of 7 runs.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroup, Work
from torch.distributed import ProcessGroupGloo, ReduceOp, Store
from torch.distributed.distributed_c10d import GroupName

from instep.distributed.shm.shared_buckets import Resident
from instep.process.torch_compile import skip_methods

NAME = "instep"


def _by_gloo(method: str) -> Callable[..., Work]:
    """The method of that name, which calls Gloo without the GIL."""

    def call_gloo(self: ProcessGroupOverGloo, *args: Any, **kwargs: Any) -> Work:
        work: Work = getattr(self._plain, method)(*args, **kwargs)
        return work

    call_gloo.__name__ = method
    return call_gloo


@skip_methods
class ProcessGroupOverGloo(ProcessGroup):
    """What `init_process_group("instep")` gives where the ranks cannot share memory."""

    def __init__(self, store: Store, gloo: ProcessGroupGloo, name: str) -> None:
        rank, size = gloo.rank(), gloo.size()
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub knows one of two
        self._plain = ProcessGroup(store, rank, size)
        for group in (self, self._plain):
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._set_group_name(GroupName(name))

    def shares_memory(self) -> bool:
        """Whether the ranks of this group share memory, or all goes through Gloo."""
        return False

    def resident(self, numel: int, dtype: torch.dtype = torch.float32) -> Resident:
        """A bucket of `numel` zeros on every rank; here an ordinary tensor. Collective."""
        tensor = torch.zeros(numel, dtype=dtype)

        def all_reduce(op: ReduceOp.RedOpType, is_async: bool) -> Work:
            opts = AllreduceOptions()
            opts.reduceOp, opts.asyncOp = ReduceOp(op), is_async
            return self.allreduce([tensor], opts)

        return Resident(tensor, all_reduce)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name that `init_process_group` knows."""
        return NAME

    allreduce = _by_gloo("allreduce")
    allreduce_coalesced = _by_gloo("allreduce_coalesced")
    reduce = _by_gloo("reduce")
    broadcast = _by_gloo("broadcast")
    allgather = _by_gloo("allgather")
    all_gather_single = _by_gloo("_allgather_base")
    all_gather_single_coalesced = _by_gloo("allgather_into_tensor_coalesced")
    reduce_scatter = _by_gloo("reduce_scatter")
    reduce_scatter_single = _by_gloo("_reduce_scatter_base")
    reduce_scatter_single_coalesced = _by_gloo("reduce_scatter_tensor_coalesced")
    all_to_all_single = _by_gloo("alltoall_base")
    barrier = _by_gloo("barrier")
    alltoall_base = all_to_all_single  # the names before torch 2.12
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    send = _by_gloo("send")
    recv = _by_gloo("recv")
