"""What moves tensors and values between ranks: the only door to torch.distributed besides
`rendezvous`, `groups` and `lanes` (and the shared-memory backend).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from instep.distributed import shm
from instep.distributed.communication import signed_pickle
from instep.distributed.communication.groups import Group
from instep.distributed.communication.tensors import as_bytes, current_device
from instep.distributed.errors import RendezvousError
from instep.distributed.rendezvous import bootstrap
from instep.distributed.watchdog import interrupts
from instep.distributed.watchdog.stack_inspection import Waiting
from instep.process import settings

T = TypeVar("T")

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when the tensor holds the result."""


class Transport(Protocol):
    """One class per kind of world. Ranks here are places in the group: from 0 to size - 1."""

    rank: int
    size: int
    in_place: bool
    """Whether it is cheapest to reduce tensors where they lie, one by one, with the caller's own
    thread; else to pack them first, and let them travel while the caller goes on."""
    control_device: torch.device
    """Where what instep itself has to say can travel: the CPU, but for groups of NCCL alone."""

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        """Start to reduce a contiguous `tensor` over all ranks into itself."""

    def all_reduce_each(self, tensors: list[Tensor], op: str) -> None:
        """Reduce tensors of one dtype over all ranks, each into itself."""

    def reduce(self, tensor: Tensor, op: str, root: int) -> Pending:
        """Start to reduce a contiguous `tensor` into root's; elsewhere it is scratch."""

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        """Start to overwrite a contiguous `tensor` with root's."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor; all have the shape of `tensor`."""

    def all_to_all(self, gives: Sequence[Tensor], takes: Sequence[int]) -> list[Tensor]:
        """Give the r-th of these one-dimensional tensors to rank r; take `takes[r]` elements."""

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous `tensor`."""

    def receive(self, tensor: Tensor, source: int) -> None:
        """Overwrite a contiguous `tensor` with what `source` sends."""

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's value, pickled."""

    def broadcast_object(self, value: T, root: int) -> T:
        """Root's value, pickled."""

    def send_object(self, value: object, to: int) -> None:
        """Send a value, pickled."""

    def receive_object(self, source: int) -> Any:
        """The value that `source` sends."""


class _Done:
    def wait(self) -> None:
        return None


class LocalTransport:
    """A world of one: nothing to move."""

    rank, size, in_place = 0, 1, True
    control_device = torch.device("cpu")

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        return _Done()

    def all_reduce_each(self, tensors: list[Tensor], op: str) -> None:
        return None

    def reduce(self, tensor: Tensor, op: str, root: int) -> Pending:
        return _Done()

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        return _Done()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone()]

    def all_to_all(self, gives: Sequence[Tensor], takes: Sequence[int]) -> list[Tensor]:
        return [gives[0].clone()]

    def send(self, tensor: Tensor, to: int) -> None:
        raise AssertionError("a world of one has nobody to send to")

    def receive(self, tensor: Tensor, source: int) -> None:
        raise AssertionError("a world of one has nobody to receive from")

    def all_gather_object(self, value: T) -> list[T]:
        return [value]

    def broadcast_object(self, value: T, root: int) -> T:
        return value

    def send_object(self, value: object, to: int) -> None:
        raise AssertionError("a world of one has nobody to send to")

    def receive_object(self, source: int) -> Any:
        raise AssertionError("a world of one has nobody to receive from")


def _nothing() -> None:
    """Collectives of some of the ranks are not counted: see `watch.interrupts`."""


class ProcessGroupTransport:
    """A process group; None is the default one, the world."""

    in_place = False

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.control_device = _home(group or dist.group.WORLD)
        # A model keeps its transport until Python ends; a group must not live so long.
        self._held = None if group is None else weakref.ref(group)
        self._begin = interrupts.collective if group is None else _nothing

    @property
    def _group(self) -> dist.ProcessGroup | None:
        if self._held is None:
            return None
        group = self._held()
        if group is None:
            raise RendezvousError.group_destroyed()
        return group

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        self._begin()
        work = dist.all_reduce(tensor, _OPS[op], self._group, async_op=True)
        return Waiting(work, "all_reduce", self._group)

    def all_reduce_each(self, tensors: list[Tensor], op: str) -> None:
        for pending in [self.all_reduce(tensor, op) for tensor in tensors]:
            pending.wait()

    def reduce(self, tensor: Tensor, op: str, root: int) -> Pending:
        self._begin()
        work = dist.reduce(tensor, None, _OPS[op], self._group, async_op=True, group_dst=root)
        return Waiting(work, "reduce", self._group)

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        self._begin()
        work = dist.broadcast(tensor, None, self._group, async_op=True, group_src=root)
        return Waiting(work, "broadcast", self._group)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._begin()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, self._group)
        return parts

    def all_to_all(self, gives: Sequence[Tensor], takes: Sequence[int]) -> list[Tensor]:
        self._begin()
        sent = torch.cat(list(gives))
        received = sent.new_empty(sum(takes))
        sizes = [give.numel() for give in gives]
        dist.all_to_all_single(received, sent, list(takes), sizes, self._group)
        # Views of one tensor would share its version counter: changing one in place would spoil
        # what autograd has saved of the others.
        return [part.clone() for part in received.split(list(takes))]

    def send(self, tensor: Tensor, to: int) -> None:
        dist.send(tensor, group=self._group, group_dst=to)

    def receive(self, tensor: Tensor, source: int) -> None:
        dist.recv(tensor, group=self._group, group_src=source)

    def all_gather_object(self, value: T) -> list[T]:
        mine = self._as_tensor(signed_pickle.dumps(value))
        sizes = [int(size) for size in self.all_gather(self._size_of(mine))]
        padded = mine.new_empty(max(sizes))
        padded[: mine.numel()] = mine
        parts = zip(self.all_gather(padded), sizes, strict=True)
        return [self._from_tensor(part[:size]) for part, size in parts]

    def broadcast_object(self, value: T, root: int) -> T:
        mine = self._as_tensor(signed_pickle.dumps(value) if self.rank == root else b"")
        size = self._size_of(mine)
        self.broadcast(size, root).wait()
        message = mine if self.rank == root else mine.new_empty(int(size))
        self.broadcast(message, root).wait()
        if self.rank == root:
            return value
        received: T = self._from_tensor(message)
        return received

    def send_object(self, value: object, to: int) -> None:
        message = self._as_tensor(signed_pickle.dumps(value))
        self.send(self._size_of(message), to)
        self.send(message, to)

    def receive_object(self, source: int) -> Any:
        size = self._size_of(self._as_tensor(b""))
        self.receive(size, source)
        message = self._as_tensor(bytes(int(size)))
        self.receive(message, source)
        return self._from_tensor(message)

    def _as_tensor(self, message: bytes) -> Tensor:
        empty = torch.empty(0, dtype=torch.uint8)
        flat = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else empty
        return flat.to(self.control_device)

    def _size_of(self, message: Tensor) -> Tensor:
        return torch.tensor([message.numel()], device=self.control_device)

    def _from_tensor(self, message: Tensor) -> Any:
        return signed_pickle.loads(message.cpu().numpy().data)


class SharedMemoryTransport(ProcessGroupTransport):
    """A group of one host's CPU ranks. Its frequent calls go past torch's dispatcher, which takes
    longer than a small collective."""

    in_place = True

    def __init__(self, group: dist.ProcessGroup | None, shared: shm.InstepProcessGroup) -> None:
        super().__init__(group)
        self._shared = weakref.ref(shared)

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        self._begin()
        self._sharing.all_reduce_now([tensor], _OPS[op])
        return _Done()

    def all_reduce_each(self, tensors: list[Tensor], op: str) -> None:
        self._begin()
        self._sharing.all_reduce_now(tensors, _OPS[op])

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._begin()
        return self._sharing.all_gather_now(tensor)

    @property
    def _sharing(self) -> shm.InstepProcessGroup:
        group = self._shared()
        if group is None:
            raise RendezvousError.group_destroyed()
        return group


def transport(group: Group | None = None) -> Transport:
    """The way to the other ranks (of `group`); meets them first where that has not happened.

    The one place that asks whether there are any. Raises NotAMemberError.
    """
    if _instead is not None:
        return _instead
    if group is not None:
        if not bootstrap.alone():
            group.own_group_rank()
        return LocalTransport() if group.size == 1 else _over(group.handle)
    if bootstrap.alone():
        return LocalTransport()
    bootstrap.join()
    return _over(None) if dist.is_initialized() else LocalTransport()


_ways: weakref.WeakKeyDictionary[dist.ProcessGroup, Transport] = weakref.WeakKeyDictionary()


def _over(group: dist.ProcessGroup | None) -> Transport:
    """The way through a group; None is the world."""
    members = group or dist.group.WORLD
    assert members is not None
    way = _ways.get(members)
    if way is None:
        if isinstance(members, shm.InstepProcessGroup):
            way = SharedMemoryTransport(group, members)
        else:
            way = ProcessGroupTransport(group)
        _ways[members] = way
    return way


_asides: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)


def overlap_group(way: Transport) -> Transport:
    """A second way between all ranks, beside `way`: what travels there while the caller goes on
    needs no order with what goes by `way`. Where nothing does, `way` itself. Collective."""
    if way.in_place:
        return way
    world = dist.group.WORLD
    assert world is not None
    if world not in _asides:
        _asides[world] = dist.new_group(timeout=settings.patience())
    return ProcessGroupTransport(_asides[world])


def _home(group: dist.ProcessGroup | None) -> torch.device:
    assert group is not None
    kinds = [device.type for device in group._device_types]
    return torch.device("cpu") if "cpu" in kinds else current_device(kinds[0])


_instead: Transport | None = None


@contextmanager
def use_transport(way: Transport) -> Iterator[None]:
    """Inside, `transport()` is `way`."""
    global _instead
    before, _instead = _instead, way
    try:
        yield
    finally:
        _instead = before


def group_rank(rank: int, what: str, group: Group | None) -> int:
    """Where in the group `rank` of the world is. Raises ValueError where it is not."""
    if group is not None:
        return group.group_rank(rank)
    size = transport().size
    if not 0 <= rank < size:
        raise ValueError(f"{what} {rank} does not exist: the ranks are 0 to {size - 1}.")
    return rank


def broadcast_coalesced(tensors: Sequence[Tensor], root: int = 0) -> None:
    """Overwrite each tensor with root's, one message per dtype and device. In place."""
    way = transport()
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in kinds.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
        way.broadcast(as_bytes(flat), root).wait()
        for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
