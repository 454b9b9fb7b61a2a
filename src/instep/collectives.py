"""Talking: typed collectives, out of place and differentiable; the only door to torch.distributed
besides `rendezvous` (and `shm`).

A derivative of a collective is a collective: every rank must run the backward. The loss that is
differentiated is the sum of all ranks' losses (as everywhere in the field).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from instep import rendezvous
from instep.errors import CollectiveError, UnknownOpError, WrongDeviceError

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
    """What moves tensors between ranks, in place: one class per kind of world."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        """Start to reduce a contiguous `tensor` over all ranks into itself."""

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        """Start to overwrite a contiguous `tensor` with root's."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor; all have the shape of `tensor`."""

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's value, pickled."""

    def broadcast_object(self, value: T, root: int) -> T:
        """Root's value, pickled."""


class _Done:
    def wait(self) -> None:
        return None


class _Alone:
    """A world of one: nothing to move."""

    rank, size = 0, 1

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        return _Done()

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        return _Done()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone()]

    def all_gather_object(self, value: T) -> list[T]:
        return [value]

    def broadcast_object(self, value: T, root: int) -> T:
        return value


class _Together:
    """The default process group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        return cast(Pending, dist.all_reduce(tensor, _OPS[op], async_op=True))

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        return cast(Pending, dist.broadcast(tensor, root, async_op=True))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        return parts

    def all_gather_object(self, value: T) -> list[T]:
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: T, root: int) -> T:
        box = [value]
        dist.broadcast_object_list(box, root)
        return box[0]


def transport() -> Transport:
    """The way to the other ranks; meets them first where that has not happened.

    The one place that asks whether there are any.
    """
    if not dist.is_initialized():
        rendezvous.init()
    return _Together() if dist.is_initialized() else _Alone()


# ------------------------------------------------------------------------------------- tensors


def all_reduce(tensor: Tensor, op: str = "sum") -> Tensor:
    """Combine `tensor` over all ranks; every rank gets the result.

    Args:
        tensor: any shape, the same on all ranks. "mean" needs a floating-point or complex dtype,
            "min" and "max" an ordered one.
        op: "sum", "mean", "min" or "max".

    Returns:
        A new tensor of the same shape, dtype and device. The derivative of a sum is the sum of
        the incoming gradients, of a mean their mean; min and max have none here.

    Raises UnknownOpError, WrongDeviceError, CollectiveError.
    """
    if op not in _OPS:
        raise UnknownOpError(op, _OPS)
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise CollectiveError(f"the mean of {tensor.dtype} is no {tensor.dtype}; use op='sum'.")
    check_reachable(tensor)
    reduced: Tensor = applied(_AllReduce, tensor, op)
    return reduced


def broadcast(tensor: Tensor, root: int = 0) -> Tensor:
    """Root's tensor, on every rank.

    Args:
        tensor: the same shape and dtype on all ranks; only root's values matter.
        root: the rank that gives.

    Returns:
        A new tensor. The derivative is the sum of all ranks' gradients at root, zero elsewhere.

    Raises ValueError for a root that does not exist, WrongDeviceError.
    """
    _existing(root)
    check_reachable(tensor)
    given: Tensor = applied(_Broadcast, tensor, root)
    return given


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor, in the order of ranks, on every rank.

    Args:
        tensor: the same shape and dtype on all ranks.

    Returns:
        `world_size` new tensors. The derivative is the sum of the gradients that all ranks have
        for this rank's tensor.

    Raises WrongDeviceError.
    """
    check_reachable(tensor)
    return list(applied(_AllGather, tensor))


def barrier() -> None:
    """Return when every rank has come here."""
    transport().all_reduce(torch.zeros(()), "sum").wait()


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`; torch leaves it untyped."""
    return function.apply(*args)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str) -> Tensor:
        ctx.op = op
        if op not in ("sum", "mean"):
            ctx.set_materialize_grads(False)
        return _moved(tensor, lambda t, flat: t.all_reduce(flat, op), op)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        if ctx.op not in ("sum", "mean"):
            raise CollectiveError(f"all_reduce with op={ctx.op!r} has no derivative.")
        return applied(_AllReduce, grads[0], ctx.op), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int) -> Tensor:
        ctx.root = root
        return _moved(tensor, lambda t, flat: t.broadcast(flat, root))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = applied(_AllReduce, grads[0], "sum")
        return total if transport().rank == ctx.root else torch.zeros_like(total), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor) -> tuple[Tensor, ...]:
        return tuple(transport().all_gather(tensor.detach().contiguous()))

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Tensor:
        total: Tensor = applied(_AllReduce, torch.stack(grads), "sum")
        return total[transport().rank]


def _moved(tensor: Tensor, move: Callable[[Transport, Tensor], Pending], op: str = "sum") -> Tensor:
    """A contiguous copy of `tensor` after an in-place collective."""
    way = transport()
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    move(way, copy).wait()
    return copy.div_(way.size) if op == "mean" else copy


def _existing(root: int) -> None:
    size = transport().size
    if not 0 <= root < size:
        raise ValueError(f"root {root} does not exist: the ranks are 0 to {size - 1}.")


def check_reachable(tensor: Tensor) -> None:
    """Raise WrongDeviceError unless this job's ranks can exchange `tensor` where it lies."""
    reachable = ["cpu"]
    if torch.cuda.is_available():
        reachable.append(f"cuda:{torch.cuda.current_device()}")
    if str(tensor.device) not in reachable:
        raise WrongDeviceError(tensor.device, reachable)


# ------------------------------------------------------------------------------------- objects


def broadcast_object(value: T, root: int = 0) -> T:
    """Root's value, pickled, on every rank."""
    _existing(root)
    return transport().broadcast_object(value, root)


def all_gather_object(value: T) -> list[T]:
    """Every rank's value, pickled, in the order of ranks."""
    return transport().all_gather_object(value)


def gather_object(value: T, root: int = 0) -> list[T] | None:
    """Every rank's value at `root`, in the order of ranks; None elsewhere."""
    _existing(root)
    way = transport()
    values = way.all_gather_object(value)
    return values if way.rank == root else None


# ------------------------------------------------------------------------------ many at a time


def broadcast_all(tensors: Sequence[Tensor], root: int = 0) -> None:
    """Overwrite each tensor with root's, one message per dtype and device. In place."""
    way = transport()
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in kinds.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
        way.broadcast(flat, root).wait()
        for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
