"""Reductions whose result is in shared memory.

`all_reduce` copies a tensor into the mapping and out again. A resident bucket is in shared memory
already: each rank reduces its own share of it, in pieces that stay in cache, and writes the result
to every rank's bucket. `reduce_to_host` reads tensors of the ranks' own memory, and all ranks share
one result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise, zip_longest

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from instep.distributed.errors import SharedMemoryError
from instep.distributed.shm.exchange import Exchange
from instep.distributed.shm.memory.mapping import SharedMemory, create_memory, map_memory, round_up
from instep.distributed.shm.memory.reduction import (
    Reduction,
    buffer_count,
    find_reduction,
    reduce_into,
)
from instep.distributed.shm.memory.signals import signature_of
from instep.process.torch_private.distributed import Work

_PIECE_BYTES = 256 << 10
_ALIGNMENT = 64  # bytes; a cache line has one writer
_Piece = tuple[int, int, int]
"""Elements of one of several tensors: which tensor, the first, and the one after the last."""


@dataclass(frozen=True, eq=False)
class Resident:
    """A tensor that every rank of the group has, and that is reduced in place."""

    tensor: Tensor
    """This rank's values, 1-D, zeros at first. Write to it, take views of it, keep it."""
    _all_reduce: Callable[[ReduceOp.RedOpType, bool], Work]

    def all_reduce(self, op: ReduceOp.RedOpType = ReduceOp.SUM, async_op: bool = False) -> Work:
        """Replace every rank's `tensor` by their reduction: the same bits on all ranks.

        Until it has ended, no rank may use its tensor: the others write to it.
        """
        work = self._all_reduce(op, async_op)
        if not async_op:
            work.wait()
        return work


class SharedBucket:
    """All ranks' tensors of one bucket, in this rank's mapping."""

    def __init__(self, exchange: Exchange, numel: int, dtype: torch.dtype) -> None:
        """Collective. Raises SharedMemoryError on all ranks if there is too little memory."""
        self._exchange = exchange
        stride = round_up(max(numel, 1) * dtype.itemsize)
        memory = _map_on_all_ranks(exchange, stride * exchange.size)
        self.parts = [
            memory[rank * stride : (rank + 1) * stride].view(dtype)[:numel]
            for rank in range(exchange.size)
        ]
        self.mine = self.parts[exchange.rank]
        self._pieces = self._cut(numel, dtype)
        longest = max((parts[0].numel() for parts in self._pieces), default=0)
        nodes = buffer_count(exchange.size) + 1 if exchange.size > 2 else 0
        self._buffers = [torch.empty(longest, dtype=dtype, device="cpu") for _ in range(nodes)]

    def reduction(self, op: ReduceOp.RedOpType) -> Reduction:
        """The reduction `op`; ValueError if it is not supported for this dtype."""
        reduction = find_reduction(op, self.mine.dtype)
        if reduction is None:
            raise ValueError(
                f"a resident bucket of {self.mine.dtype} cannot be reduced by {op.name}"
            )
        return reduction

    def all_reduce(self, reduction: Reduction) -> None:
        """Reduce my share, while the others reduce theirs."""
        signature = signature_of(
            "reduce_resident", self.mine.dtype, self.mine.numel(), reduction.name
        )
        self._exchange.signals.barrier(signature)
        for parts in self._pieces:
            self._reduce_piece(parts, reduction)
        self._exchange.signals.barrier(signature)

    def _reduce_piece(self, parts: list[Tensor], reduction: Reduction) -> None:
        """Reduce one piece of all ranks in place."""
        if len(parts) <= 2:
            out, targets = parts[0], parts[1:]
        else:
            out, targets = self._buffers[0][: parts[0].numel()], parts
        reduce_into(out, parts, reduction, [s[: out.numel()] for s in self._buffers[1:]])
        for target in targets:
            target.copy_(out)

    def _cut(self, numel: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """My share of the bucket in pieces; of each piece all ranks' views."""
        unit = _ALIGNMENT // dtype.itemsize
        units = -(-numel // unit)
        rank, size = self._exchange.rank, self._exchange.size
        start, stop = (min(numel, units * r // size * unit) for r in (rank, rank + 1))
        length = max(unit, _PIECE_BYTES // size // dtype.itemsize)
        return [
            [part[lo : min(lo + length, stop)] for part in self.parts]
            for lo in range(start, stop, length)
        ]


def reduce_to_host(
    exchange: Exchange,
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    reduction: Reduction,
    timeout: timedelta | None,
) -> None:
    """Write the reduction of all ranks' `tensors[k]` to `results[k]`, which is memory of all ranks.

    All are 1-D, contiguous and of one dtype. Each rank reduces its share of all elements, which the
    others stage for it chunk by chunk: while one chunk is reduced, the next one is staged.
    """
    sizes, dtype = [tensor.numel() for tensor in tensors], tensors[0].dtype
    signature = signature_of("all_reduce", dtype, sum(sizes), reduction.name)
    edges = [sum(sizes) * rank // exchange.size for rank in range(exchange.size + 1)]
    longest = exchange.staging.slot_bytes // dtype.itemsize
    shares = [_pieces(sizes, start, stop, longest) for start, stop in pairwise(edges)]
    staged: tuple[int, list[_Piece]] | None = None
    for chunks in (*zip_longest(*shares, fillvalue=[]), None):
        if chunks is not None:
            use = exchange.staging.next_use()
            for other in exchange.others:
                _stage(exchange, use, other, [tensors[k][lo:hi] for k, lo, hi in chunks[other]])
        if staged is not None:
            _reduce_staged(exchange, *staged, tensors, results, reduction)
        exchange.signals.barrier(signature, timeout)
        staged = None if chunks is None else (use, chunks[exchange.rank])


def _pieces(sizes: Sequence[int], start: int, stop: int, longest: int) -> list[list[_Piece]]:
    """The elements from `start` to `stop` of tensors of these sizes, counted one tensor after the
    other, in chunks of `longest` and a shorter one."""
    chunks: list[list[_Piece]] = [[] for _ in range(start, stop, longest)]
    begin = 0
    for k, size in enumerate(sizes):
        position, end = max(start, begin), min(stop, begin + size)
        while position < end:
            chunk = (position - start) // longest
            until = min(end, start + (chunk + 1) * longest)
            chunks[chunk].append((k, position - begin, until - begin))
            position = until
        begin += size
    return chunks


def _stage(exchange: Exchange, use: int, reader: int, pieces: Sequence[Tensor]) -> None:
    if pieces:
        numel = sum(piece.numel() for piece in pieces)
        slot = exchange.staging.slot(use, exchange.rank, reader, pieces[0].dtype, numel)
        torch.cat(list(pieces), out=slot)


def _reduce_staged(
    exchange: Exchange,
    use: int,
    pieces: Sequence[_Piece],
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    reduction: Reduction,
) -> None:
    """Reduce this rank's pieces of a chunk that the others have staged."""
    rank, dtype, offset = exchange.rank, tensors[0].dtype, 0
    numel = sum(stop - start for _, start, stop in pieces)
    slots = {
        other: exchange.staging.slot(use, other, rank, dtype, numel) for other in exchange.others
    }
    for k, start, stop in pieces:
        own, end = tensors[k][start:stop], offset + stop - start
        parts = [own if each == rank else slots[each][offset:end] for each in range(exchange.size)]
        buffers = exchange.buffers_for(dtype, stop - start)
        reduce_into(results[k][start:stop], parts, reduction, buffers)
        offset = end


def _map_on_all_ranks(exchange: Exchange, size: int) -> Tensor:
    """New memory that all ranks have mapped, or SharedMemoryError on all of them."""
    problem, memory = "", None
    with ExitStack() as open_memory:
        address = torch.full((2,), -1, device="cpu")
        try:
            if exchange.rank == 0:
                shared = open_memory.enter_context(create_memory(size))
                address = torch.tensor([shared.pid, shared.descriptor], device="cpu")
        except OSError as error:
            problem = str(error)
        exchange.broadcast(address, 0, None)
        pid, descriptor = address.tolist()
        try:
            if pid >= 0:
                memory = map_memory(SharedMemory(pid, descriptor), size)
        except OSError as error:
            problem = str(error)
        failed = exchange.count_ranks(memory is None)
    if memory is None or failed:
        raise SharedMemoryError(size, failed, problem)
    return memory
