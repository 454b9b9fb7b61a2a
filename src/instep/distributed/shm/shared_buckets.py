"""Buckets that live in shared memory, so that all ranks reduce them where they are.

A tensor that goes through `all_reduce` is copied into the mapping and out again. A bucket is
already there: each rank reduces its own share of it, in blocks that stay in cache, and writes the
result to every rank's bucket. Nothing else moves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import ReduceOp

from instep.distributed.errors import SharedMemoryError
from instep.distributed.shm.exchange import Exchange
from instep.distributed.shm.memory.mapping import Place, map_memory, new_memory, round_up
from instep.distributed.shm.memory.reduction import (
    Reduction,
    find_reduction,
    reduce_into,
    scratch_count,
)
from instep.distributed.shm.signature import call

_BLOCK_BYTES = 256 << 10
_COUNT = Reduction("SUM", torch.add, frozenset({torch.int32}))
_ALIGNMENT = 64  # bytes; a cache line has one writer


@dataclass(frozen=True, eq=False)
class Resident:
    """A tensor that every rank of the group has, and that is reduced where it lives."""

    tensor: Tensor
    """This rank's values, 1-D, zeros at first. Write to it, take views of it, keep it."""
    _all_reduce: Callable[[ReduceOp.RedOpType, bool], Work]

    def all_reduce(self, op: ReduceOp.RedOpType = ReduceOp.SUM, async_op: bool = False) -> Work:
        """Replace every rank's `tensor` by their reduction: the same bits on all ranks.

        Until it is over, no rank may touch its tensor: the others write to it.
        """
        work = self._all_reduce(op, async_op)
        if not async_op:
            work.wait()
        return work


class SharedBucket:
    """All ranks' parts of one bucket, as this rank sees them."""

    def __init__(self, exchange: Exchange, numel: int, dtype: torch.dtype) -> None:
        """Collective. Raises SharedMemoryError on all ranks if there is not so much memory."""
        self._exchange = exchange
        stride = round_up(max(numel, 1) * dtype.itemsize)
        memory = _map_together(exchange, stride * exchange.size)
        self.parts = [
            memory[rank * stride : (rank + 1) * stride].view(dtype)[:numel]
            for rank in range(exchange.size)
        ]
        self.mine = self.parts[exchange.rank]
        self._blocks = self._cut(numel, dtype)
        block = max((parts[0].numel() for parts in self._blocks), default=0)
        nodes = scratch_count(exchange.size) + 1 if exchange.size > 2 else 0
        self._scratch = [torch.empty(block, dtype=dtype) for _ in range(nodes)]

    def reduction(self, op: ReduceOp.RedOpType) -> Reduction:
        """How to do `op` here; ValueError if that is not known for this dtype."""
        reduction = find_reduction(op, self.mine.dtype)
        if reduction is None:
            raise ValueError(
                f"a resident bucket of {self.mine.dtype} cannot be reduced by {op.name}"
            )
        return reduction

    def all_reduce(self, reduction: Reduction) -> None:
        """Reduce my share, while the others reduce theirs."""
        what = call("reduce_resident", self.mine.dtype, self.mine.numel(), reduction.name)
        self._exchange.signals.meet(what)
        for parts in self._blocks:
            self._reduce_block(parts, reduction)
        self._exchange.signals.meet(what)

    def _reduce_block(self, parts: list[Tensor], reduction: Reduction) -> None:
        """Reduce one block of all ranks in place."""
        if len(parts) <= 2:
            out, targets = parts[0], parts[1:]
        else:
            out, targets = self._scratch[0][: parts[0].numel()], parts
        reduce_into(out, parts, reduction, [s[: out.numel()] for s in self._scratch[1:]])
        for target in targets:
            target.copy_(out)

    def _cut(self, numel: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """My share of the bucket, block by block; of each block all ranks' views."""
        unit = _ALIGNMENT // dtype.itemsize
        units = -(-numel // unit)
        rank, size = self._exchange.rank, self._exchange.size
        start, stop = (min(numel, units * r // size * unit) for r in (rank, rank + 1))
        length = max(unit, _BLOCK_BYTES // size // dtype.itemsize)
        return [
            [part[lo : min(lo + length, stop)] for part in self.parts]
            for lo in range(start, stop, length)
        ]


def _map_together(exchange: Exchange, size: int) -> Tensor:
    """New memory that all ranks have mapped, or SharedMemoryError on all of them."""
    problem, memory = "", None
    with ExitStack() as held:
        place = torch.full((2,), -1)
        try:
            if exchange.rank == 0:
                made = held.enter_context(new_memory(size))
                place = torch.tensor([made.pid, made.descriptor])
        except OSError as error:
            problem = str(error)
        exchange.broadcast(place, 0, None)
        pid, descriptor = place.tolist()
        try:
            if pid >= 0:
                memory = map_memory(Place(pid, descriptor), size)
        except OSError as error:
            problem = str(error)
        failed = torch.tensor([memory is None], dtype=torch.int32)
        exchange.all_reduce(failed, _COUNT, None)
    if memory is None or failed.item():
        raise SharedMemoryError(size, int(failed.item()), problem)
    return memory
