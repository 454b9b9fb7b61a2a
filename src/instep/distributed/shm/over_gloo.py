"""A process group in Python that leaves everything to Gloo: the base class of the backend.

It defines every method that torch's C++ trampoline (PyProcessGroup) looks up. Where a method is
missing, the trampoline calls the C++ one while it holds the GIL. Gloo's worker, which frees the
last tensor under the lock of its queue, waits for the GIL, and the caller waits for the lock: a
deadlock. (torch 2.13: a broadcast_object_list after send and recv, in 2 of 7 runs.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, ReduceOp, Store
from torch.distributed.distributed_c10d import GroupName, default_pg_timeout

from instep.distributed.flight_record.record_format import message_group
from instep.distributed.flight_record.recorder import recorder
from instep.distributed.shm.overloads import accept_overloads
from instep.distributed.shm.shared_buckets import Resident
from instep.process import in_main_thread
from instep.process.torch_private.compiler import skip_methods
from instep.process.torch_private.distributed import AllreduceOptions, ProcessGroup, Work

NAME = "instep"


def _call_gloo(method: str, op: str, mine: int | None = None) -> Callable[..., Work]:
    """The method of that name, which calls Gloo without the GIL.

    `op`: the collective's name in the flight record; `mine`: which argument has this rank's
    tensors, if they must have equal shapes on all ranks.
    """

    def call_gloo(self: ProcessGroupOverGloo, *args: Any, **kwargs: Any) -> Work:
        number = self._enter(op, () if mine is None else args[mine], args)
        try:
            work = self._dispatch(method, *args, **kwargs)
        except Exception:  # Gloo refuses the arguments
            if number >= 0:
                recorder.leave(number)
            raise
        if number >= 0:
            self._follow(work, number, args)
        return work

    call_gloo.__name__ = method
    return call_gloo


def _send_by_gloo(method: str, op: str) -> Callable[..., Work]:
    """The method of that name, whose arguments are tensors, a peer (if it has one) and a tag."""

    def call_gloo(self: ProcessGroupOverGloo, tensors: list[Tensor], *args: int) -> Work:
        number = self._enter_message(op, tensors, *args)
        work: Work = getattr(self._gloo_group, method)(tensors, *args)
        if number >= 0:
            reference = weakref.ref(work)  # nobody need wait for it
            recorder.follow(number, lambda: _has_ended(reference()))
        return work

    call_gloo.__name__ = method
    return call_gloo


def _has_ended(work: Work | None) -> bool:
    return work is None or work.is_completed()


@skip_methods
@accept_overloads
class ProcessGroupOverGloo(ProcessGroup):
    """The group of `init_process_group("instep")` where the ranks cannot share memory."""

    def __init__(
        self, store: Store, gloo: ProcessGroupGloo, name: str, *, is_recorded: bool = True
    ) -> None:
        """`is_recorded`: collectives are noted in the flight record."""
        rank, size = gloo.rank(), gloo.size()
        self._members = [*(gloo.options.global_ranks_in_group or range(size))]
        self._recorded_as = recorder.add_group(name, self._members) if is_recorded else ""
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub knows one of two
        self._gloo = gloo
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
        tensor = torch.zeros(numel, dtype=dtype, device="cpu")

        def all_reduce(op: ReduceOp.RedOpType, is_async: bool) -> Work:
            opts = AllreduceOptions()
            opts.reduceOp, opts.asyncOp = ReduceOp(op), is_async
            return self.allreduce([tensor], opts)

        return Resident(tensor, all_reduce)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name for `init_process_group`."""
        return NAME

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier over Gloo in which group rank 0 names, as group ranks, who does not come.

        `timeout`: None for 30 minutes; `wait_all_ranks`: name all of them and not the first one.
        Raises RuntimeError. Gloo has then closed its connections: what this group leaves to
        Gloo fails from now on.
        """
        number = self._enter("monitored_barrier", (), ())
        limit = default_pg_timeout if timeout is None else timeout
        try:
            barrier = self._gloo_group.monitored_barrier  # type: ignore[attr-defined]
            barrier(limit, wait_all_ranks)
        finally:
            recorder.leave(number)

    def _dispatch(self, method: str, *args: Any, **kwargs: Any) -> Work:
        """Call Gloo's method through torch, which finds the backend by the tensors. Where it finds
        none (an empty list, sparse tensors), Gloo itself says what is wrong."""
        work: Work
        try:
            work = getattr(self._gloo_group, method)(*args, **kwargs)
        except NotImplementedError:
            work = getattr(self._gloo, method)(*args, **kwargs)
        return work

    def _enter(self, op: str, mine: object, args: tuple[Any, ...]) -> int:
        """Note a collective; its number, or -1 if this group's are not recorded."""
        if not self._recorded_as:
            return -1
        tensors = _flat_list(mine)
        opts = args[-1] if args else None
        root, reduction = getattr(opts, "rootRank", None), getattr(opts, "reduceOp", None)
        return recorder.enter(
            op,
            (sum(t.numel() for t in tensors),) if len(tensors) > 1 else _shape_of(tensors),
            tensors[0].dtype if tensors else None,
            self._recorded_as,
            self._global_rank(root),
            "" if reduction is None else reduction.op.name,
        )

    def _enter_message(self, op: str, tensors: list[Tensor], *peer_and_tag: int) -> int:
        """Note a message of the main thread, as `_enter`: other threads' come in any order."""
        if not self._recorded_as or not in_main_thread():
            return -1
        *peers, tag = peer_and_tag
        mine = self._members[self.rank()]
        other = self._global_rank(peers[0] if peers else None)
        pair = message_group(mine, mine if other is None else other, tag)
        return recorder.enter(op, _shape_of(tensors), tensors[0].dtype, pair, other)

    def _global_rank(self, rank: int | None) -> int | None:
        """The rank in the job of a rank of this group, or the number itself if there is none."""
        return self._members[rank] if rank is not None and 0 <= rank < self.size() else rank

    def _follow(self, work: Work, number: int, args: tuple[Any, ...]) -> None:
        """Note when the collective has ended."""
        if args and not getattr(args[-1], "asyncOp", True):
            try:
                work.wait()
            finally:
                recorder.leave(number)
        else:
            recorder.follow(number, work.is_completed)

    allreduce = _call_gloo("allreduce", "all_reduce", 0)
    allreduce_coalesced = _call_gloo("allreduce_coalesced", "all_reduce_coalesced", 0)
    reduce = _call_gloo("reduce", "reduce", 0)
    broadcast = _call_gloo("broadcast", "broadcast", 0)
    allgather = _call_gloo("allgather", "all_gather", 1)
    all_gather_single = _call_gloo("_allgather_base", "all_gather", 1)
    all_gather_single_coalesced = _call_gloo("allgather_into_tensor_coalesced", "all_gather", 1)
    reduce_scatter = _call_gloo("reduce_scatter", "reduce_scatter", 0)
    reduce_scatter_single = _call_gloo("_reduce_scatter_base", "reduce_scatter", 0)
    reduce_scatter_single_coalesced = _call_gloo(
        "reduce_scatter_tensor_coalesced", "reduce_scatter", 0
    )
    all_to_all_single = _call_gloo("alltoall_base", "all_to_all")
    barrier = _call_gloo("barrier", "barrier")
    alltoall_base = all_to_all_single  # the names before torch 2.12
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    gather = _call_gloo("gather", "gather", 1)
    scatter = _call_gloo("scatter", "scatter", 0)
    alltoall = _call_gloo("alltoall", "all_to_all")
    send = _send_by_gloo("send", "send")
    recv = _send_by_gloo("recv", "recv")
    recv_anysource = _send_by_gloo("recv_anysource", "recv")


def _flat_list(tensors: Any) -> list[Tensor]:
    """A tensor, or a list of them, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else [*tensors]


def _shape_of(tensors: list[Tensor]) -> tuple[int, ...] | None:
    return tensors[0].shape if tensors else None
