"""A process group in Python that leaves everything to Gloo: the base class of the backend.

It defines every method that torch's C++ trampoline (PyProcessGroup) looks up. Where a method is
missing, the trampoline calls the C++ one while it holds the GIL. Gloo's worker, which frees the
last tensor under the lock of its queue, waits for the GIL, and the caller waits for the lock: a
deadlock. (torch 2.13: a broadcast_object_list after send and recv, in 2 of 7 runs.)
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


def _call_gloo(method: str) -> Callable[..., Work]:
    """The method of that name, which calls Gloo without the GIL."""

    def call_gloo(self: ProcessGroupOverGloo, *args: Any, **kwargs: Any) -> Work:
        work: Work = getattr(self._gloo_group, method)(*args, **kwargs)
        return work

    call_gloo.__name__ = method
    return call_gloo


@skip_methods
class ProcessGroupOverGloo(ProcessGroup):
    """The group of `init_process_group("instep")` where the ranks cannot share memory."""

    def __init__(self, store: Store, gloo: ProcessGroupGloo, name: str) -> None:
        rank, size = gloo.rank(), gloo.size()
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub knows one of two
        self._gloo_group = ProcessGroup(store, rank, size)
        for group in (self, self._gloo_group):
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._set_group_name(GroupName(name))

    def shares_memory(self) -> bool:
        """Whether all ranks of this group share memory."""
        return False

    def resident(self, numel: int, dtype: torch.dtype = torch.float32) -> Resident:
        """A bucket of `numel` zeros on every rank; over Gloo an ordinary tensor. Collective."""
        tensor = torch.zeros(numel, dtype=dtype)

        def all_reduce(op: ReduceOp.RedOpType, is_async: bool) -> Work:
            opts = AllreduceOptions()
            opts.reduceOp, opts.asyncOp = ReduceOp(op), is_async
            return self.allreduce([tensor], opts)

        return Resident(tensor, all_reduce)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name for `init_process_group`."""
        return NAME

    allreduce = _call_gloo("allreduce")
    allreduce_coalesced = _call_gloo("allreduce_coalesced")
    reduce = _call_gloo("reduce")
    broadcast = _call_gloo("broadcast")
    allgather = _call_gloo("allgather")
    all_gather_single = _call_gloo("_allgather_base")
    all_gather_single_coalesced = _call_gloo("allgather_into_tensor_coalesced")
    reduce_scatter = _call_gloo("reduce_scatter")
    reduce_scatter_single = _call_gloo("_reduce_scatter_base")
    reduce_scatter_single_coalesced = _call_gloo("reduce_scatter_tensor_coalesced")
    all_to_all_single = _call_gloo("alltoall_base")
    barrier = _call_gloo("barrier")
    alltoall_base = all_to_all_single  # the names before torch 2.12
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    send = _call_gloo("send")
    recv = _call_gloo("recv")
