"""Transports move tensors and values between ranks.

Only this module, `bootstrap`, `groups` and `thread_channel` call the collectives of
torch.distributed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d  # has torch's own functions, not patches

from instep.distributed import shm
from instep.distributed.communication.errors import name_lost_peer
from instep.distributed.communication.groups import Group
from instep.distributed.communication.local_transport import Completed, LocalTransport
from instep.distributed.errors import RendezvousError
from instep.distributed.flight_record.record_format import group_text, message_group
from instep.distributed.flight_record.recorder import enter, leaving
from instep.distributed.identity.torch_devices import control_device
from instep.distributed.pending import Pending, RoundedSum
from instep.distributed.rendezvous import bootstrap, signed_pickle
from instep.distributed.watchdog.call_stack import TrackedWork
from instep.distributed.watchdog.signals.rank_signals import rank_signals
from instep.process import settings
from instep.process.process_value import ProcessValue
from instep.process.torch_private.tensors import foreach_copy_

T = TypeVar("T")

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class Transport(Protocol):
    """What every transport can do. Ranks here are group ranks, from 0 to size - 1."""

    rank: int
    size: int
    in_place: bool
    """Whether it is cheapest to reduce tensors where they are, one by one on the caller's thread.
    Otherwise they are packed into buckets, whose reduction overlaps with the caller's work."""
    control_device: torch.device
    """For instep's own messages: the CPU, except for groups that have only an accelerator's."""

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        """Start to reduce a contiguous `tensor` over all ranks into itself."""

    def sum_rounded(self, tensor: Tensor, dtype: torch.dtype) -> Pending:
        """Start to sum a contiguous `tensor` of floats over all ranks into itself.

        What is sent is rounded to `dtype`: each rank's numbers, or where the ranks of several hosts
        share memory, the sums of each host.
        """

    def all_reduce_each(self, tensors: list[Tensor], op: str) -> None:
        """Reduce tensors of one dtype over all ranks, each into itself."""

    def reduce(self, tensor: Tensor, op: str, root: int) -> Pending:
        """Start to reduce a contiguous `tensor` into root's; on other ranks it is overwritten."""

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        """Start to overwrite a contiguous `tensor` with root's."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor; all have the shape of `tensor`."""

    def all_gather_each(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Overwrite the tensors `parts[r]` with those of rank r, for every other rank r.

        All are contiguous, 1-D and of one dtype, and have the same sizes on all ranks.
        """

    def all_to_all(self, inputs: Sequence[Tensor], output_sizes: Sequence[int]) -> list[Tensor]:
        """Send the r-th of these 1-D tensors to rank r; receive `output_sizes[r]` elements."""

    def barrier(self) -> None:
        """Return when all ranks have called this."""

    def open_memory(self, size: int) -> int | None:
        """The descriptor of new memory of `size` bytes or more that every rank has open; None
        unless the ranks use the shared memory of one host.

        Raises SharedMemoryError on all ranks if any of them cannot have it.
        """

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous `tensor`."""

    def recv(self, tensor: Tensor, source: int) -> None:
        """Overwrite a contiguous `tensor` with what `source` sends."""

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's value, pickled."""

    def broadcast_object(self, value: T, root: int) -> T:
        """Root's value, pickled."""

    def send_object(self, value: object, to: int) -> None:
        """Send a value, pickled."""

    def recv_object(self, source: int) -> Any:
        """The value that `source` sends."""


class ProcessGroupTransport:
    """Over a process group; None is the default one, the world."""

    in_place = False

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.control_device = control_device(group)
        # A model keeps its transport until Python ends; a group must not live so long.
        self._weak_group = None if group is None else weakref.ref(group)
        # Collectives of some of the ranks are not counted: see `watchdog.signals`.
        self._count = rank_signals.count_collective if group is None else lambda: None
        members = group or dist.group.WORLD
        assert members is not None
        self._ranks = dist.get_process_group_ranks(members)
        is_recorded = isinstance(members, shm.ProcessGroupOverGloo)  # by the group itself
        text = group_text(f"torch-{members.group_name}", self._ranks)
        self._recorded_as = "" if is_recorded else text

    @property
    def _group(self) -> dist.ProcessGroup | None:
        if self._weak_group is None:
            return None
        group = self._weak_group()
        if group is None:
            raise RendezvousError.group_destroyed()
        return group

    def _enter(
        self, op: str, tensor: Tensor | None, root: int | None = None, reduction: str = ""
    ) -> int:
        """The number of a collective in the flight record; -1 where the group itself records.

        `tensor`: None where the ranks' tensors may differ.
        """
        if not self._recorded_as:
            return -1
        root = root if root is None else self._ranks[root]
        shape, dtype = (None, None) if tensor is None else (tensor.shape, tensor.dtype)
        return enter(op, shape, dtype, self._recorded_as, root, reduction)

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        self._count()
        number = self._enter("all_reduce", tensor, None, _OPS[op].name)
        work = c10d.all_reduce(tensor, _OPS[op], self._group, async_op=True)
        return TrackedWork(work, "all_reduce", self._group, number)

    def sum_rounded(self, tensor: Tensor, dtype: torch.dtype) -> Pending:
        members = self._group or dist.group.WORLD
        if not isinstance(members, shm.ProcessGroupAcrossHosts):
            return RoundedSum(tensor, dtype, lambda rounded: self.all_reduce(rounded, "sum"))
        self._count()
        return TrackedWork(members.sum_rounded(tensor, dtype), "all_reduce", self._group)

    def all_reduce_each(self, tensors: list[Tensor], op: str) -> None:
        for pending in [self.all_reduce(tensor, op) for tensor in tensors]:
            pending.wait()

    def reduce(self, tensor: Tensor, op: str, root: int) -> Pending:
        self._count()
        number = self._enter("reduce", tensor, root, _OPS[op].name)
        work = c10d.reduce(tensor, None, _OPS[op], self._group, async_op=True, group_dst=root)
        return TrackedWork(work, "reduce", self._group, number)

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        self._count()
        number = self._enter("broadcast", tensor, root)
        work = dist.broadcast(tensor, None, self._group, async_op=True, group_src=root)
        return TrackedWork(work, "broadcast", self._group, number)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._count()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with leaving(self._enter("all_gather", tensor)):
            c10d.all_gather(parts, tensor, self._group)
        return parts

    def all_gather_each(self, parts: Sequence[Sequence[Tensor]]) -> None:
        sizes = [[tensor.numel() for tensor in each] for each in parts]
        if (longest := max(map(sum, sizes))) == 0:
            return
        first = next(tensor for each in parts for tensor in each)
        message = first.new_empty(longest)
        if mine := parts[self.rank]:
            torch.cat(list(mine), out=message[: sum(sizes[self.rank])])
        for rank, received in enumerate(self.all_gather(message)):
            if rank != self.rank and parts[rank]:
                values = received[: sum(sizes[rank])].split(sizes[rank])
                foreach_copy_(list(parts[rank]), list(values))

    def all_to_all(self, inputs: Sequence[Tensor], output_sizes: Sequence[int]) -> list[Tensor]:
        self._count()
        sent = torch.cat(list(inputs))
        received = sent.new_empty(sum(output_sizes))
        sizes = [tensor.numel() for tensor in inputs]
        with leaving(self._enter("all_to_all", None)):
            dist.all_to_all_single(received, sent, list(output_sizes), sizes, self._group)
        # Views of one tensor share its version counter: changing one in place would invalidate
        # what autograd has saved of the others.
        return [part.clone() for part in received.split(list(output_sizes))]

    def open_memory(self, size: int) -> int | None:
        return None

    def barrier(self) -> None:
        self._count()
        with leaving(self._enter("barrier", None)):
            if self.control_device.type == "cpu":
                dist.barrier(self._group)
            else:
                zero = torch.zeros((), device=self.control_device)
                c10d.all_reduce(zero, group=self._group)
                zero.item()  # wait for the device, too, on which the reduction is only queued

    def send(self, tensor: Tensor, to: int) -> None:
        number = self._enter_message("send", tensor, to)
        with leaving(number), name_lost_peer("send", self._ranks[to]):
            dist.send(tensor, group=self._group, group_dst=to)

    def recv(self, tensor: Tensor, source: int) -> None:
        number = self._enter_message("recv", tensor, source)
        with leaving(number), name_lost_peer("recv", self._ranks[source]):
            dist.recv(tensor, group=self._group, group_src=source)

    def _enter_message(self, op: str, tensor: Tensor, peer: int) -> int:
        """As `_enter`, of a message."""
        if not self._recorded_as:
            return -1
        pair = message_group(self._ranks[self.rank], self._ranks[peer])
        return enter(op, tensor.shape, tensor.dtype, pair, self._ranks[peer])

    def all_gather_object(self, value: T) -> list[T]:
        mine = signed_pickle.dumps_tensor(value).to(self.control_device)
        sizes = [int(size) for size in self.all_gather(self._size_of(mine))]
        padded = mine.new_empty(max(sizes))
        padded[: mine.numel()] = mine
        parts = zip(self.all_gather(padded), sizes, strict=True)
        return [signed_pickle.loads_tensor(part[:size]) for part, size in parts]

    def broadcast_object(self, value: T, root: int) -> T:
        is_root = self.rank == root
        mine = signed_pickle.dumps_tensor(value if is_root else None).to(self.control_device)
        size = self._size_of(mine)
        self.broadcast(size, root).wait()
        message = mine if is_root else mine.new_empty(int(size))
        self.broadcast(message, root).wait()
        return value if is_root else signed_pickle.loads_tensor(message)

    def send_object(self, value: object, to: int) -> None:
        message = signed_pickle.dumps_tensor(value).to(self.control_device)
        self.send(self._size_of(message), to)
        self.send(message, to)

    def recv_object(self, source: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64, device=self.control_device)
        self.recv(size, source)
        message = size.new_empty(int(size), dtype=torch.uint8)
        self.recv(message, source)
        return signed_pickle.loads_tensor(message)

    def _size_of(self, message: Tensor) -> Tensor:
        return message.new_tensor([message.numel()], dtype=torch.int64)


class SharedMemoryTransport(ProcessGroupTransport):
    """Over a group of one host's CPU ranks. The frequent calls bypass torch's dispatcher, which
    takes longer than a small collective."""

    in_place = True

    def __init__(self, group: dist.ProcessGroup | None, shared: shm.InstepProcessGroup) -> None:
        super().__init__(group)
        self._weak_shm_group = weakref.ref(shared)

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        self._count()
        self._shm_group.all_reduce_now([tensor], _OPS[op])
        return Completed()

    def all_reduce_each(self, tensors: list[Tensor], op: str) -> None:
        self._count()
        self._shm_group.all_reduce_now(tensors, _OPS[op])

    def all_reduce_to_host(self, tensors: list[Tensor], results: list[Tensor], op: str) -> None:
        """Reduce contiguous tensors of one dtype over all ranks into 1-D tensors in the memory of
        `open_memory`, which all ranks share: each rank writes a part of them."""
        self._count()
        self._shm_group.all_reduce_to_host_now(tensors, results, _OPS[op])

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._count()
        return self._shm_group.all_gather_now(tensor)

    def all_gather_bytes(self, mine: bytes) -> bytes:
        """Every rank's few float64 numbers, as bytes, one rank's after another's; all ranks have as
        many."""
        self._count()
        return self._shm_group.all_gather_bytes_now(mine)

    def all_gather_each(self, parts: Sequence[Sequence[Tensor]]) -> None:
        self._count()
        self._shm_group.all_gather_each_now(parts)

    def open_memory(self, size: int) -> int:
        self._count()
        return self._shm_group.open_memory(size)

    @property
    def _shm_group(self) -> shm.InstepProcessGroup:
        group = self._weak_shm_group()
        if group is None:
            raise RendezvousError.group_destroyed()
        return group


def get_transport(group: Group | None = None) -> Transport:
    """The transport between all ranks, or those of `group`; joins the process group if need be.

    In a world of one it answers at once, so that no caller has two ways. Raises NotAMemberError.
    """
    if _override.value is not None:
        return _override.value
    if group is not None:
        if not bootstrap.is_world_of_one():
            group.own_group_rank()
        return LocalTransport() if group.size == 1 else _transport_over(group.handle)
    if bootstrap.is_world_of_one():
        return LocalTransport()
    bootstrap.ensure_init()
    return _transport_over(None) if dist.group.WORLD is not None else LocalTransport()


_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, Transport] = weakref.WeakKeyDictionary()


def _transport_over(group: dist.ProcessGroup | None) -> Transport:
    """The transport over a process group; None is the world."""
    members = group or dist.group.WORLD
    assert members is not None
    if members not in _transports:
        _transports[members] = (
            SharedMemoryTransport(group, members)
            if isinstance(members, shm.InstepProcessGroup)
            else ProcessGroupTransport(group)
        )
    return _transports[members]


_overlap_groups = weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]()


def overlap_group(transport: Transport) -> Transport:
    """A second process group of all ranks, so that buckets in flight cannot interleave with other
    collectives. Returns `transport` itself if its collectives are synchronous. Collective."""
    if transport.in_place:
        return transport
    world = dist.group.WORLD
    assert world is not None
    if world not in _overlap_groups:
        _overlap_groups[world] = dist.new_group(timeout=settings.timeout())
    return ProcessGroupTransport(_overlap_groups[world])


_override = ProcessValue[Transport | None](None)


def use_transport(transport: Transport) -> AbstractContextManager[object]:
    """Inside, `get_transport()` returns `transport`."""
    return _override.set_to(transport)


def group_rank(rank: int, name: str, group: Group | None) -> int:
    """The group rank of a rank of the world. Raises ValueError if it is no member.

    `name`: of the argument, for the error.
    """
    if group is not None:
        return group.group_rank(rank)
    size = get_transport().size
    if not 0 <= rank < size:
        raise ValueError(f"{name} {rank} does not exist: the ranks are 0 to {size - 1}.")
    return rank
