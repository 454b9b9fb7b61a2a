"""The collectives themselves, over one mapping: signals, then each rank's staging.

Whatever its size, a tensor goes through its rank's staging in chunks. A chunk takes one part and
the next chunk the next one, so one meeting per chunk is enough: when a rank writes to a part again,
all ranks have met since it was last read.

To reduce a large tensor, each rank reduces its own share of every chunk. It stages only what the
others reduce, and puts the result of its share where its own staging has been left free:

    step k    fetch the results of chunk k-2; reduce my share of k-1; stage chunk k; meet
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter

import torch
from torch import Tensor

from instep.errors import SharedMemoryError
from instep.shm.calls import Call, call
from instep.shm.mapping import Place, map_memory, new_memory, round_up
from instep.shm.peers import Peer
from instep.shm.reduction import Reduction, reduce_into, scratch_count
from instep.shm.signals import BYTES_PER_RANK, Signals
from instep.shm.staging import FAR_PARTS, NEAR_PARTS, Staging, Trials

_PART_BYTES = 1 << 20
_ALL_PARTS_BYTES = 64 << 20  # all ranks' staging together, unless they are very many
_SMALLEST_PART_BYTES = 64 << 10
_AT_ONCE_BYTES = 64 << 10  # all ranks' input together, up to which every rank reduces all of it
_SMALL_BYTES = 16 << 10
_ALIGNMENT = 64  # bytes: a cache line has one writer
_ALL_FAR_PARTS_BYTES = 256 << 20
_COUNT = Reduction("SUM", torch.add, frozenset({torch.int32}))
_TIMES = Reduction("SUM", torch.add, frozenset({torch.float64}))


def part_bytes(size: int) -> int:
    """How much of a tensor a rank stages at a time, in a group of `size` ranks."""
    share = _ALL_PARTS_BYTES // (NEAR_PARTS * size)
    return max(_SMALLEST_PART_BYTES, min(_PART_BYTES, 1 << share.bit_length() - 1))


def mapping_bytes(size: int) -> int:
    """The mapping that `Exchange` needs for `size` ranks."""
    return round_up(size * BYTES_PER_RANK) + NEAR_PARTS * size * part_bytes(size)


@dataclass(frozen=True)
class _Chunk:
    """A stretch of a tensor that is staged at once."""

    staging: Staging
    turn: int
    start: int
    stop: int
    cuts: list[int]
    """Where each rank's share begins, and the end of the last one."""


class Exchange:
    """This rank's end of the shared mapping. One thread at a time may use it.

    All tensors are 1-D, contiguous and on the CPU. Every method is a collective and raises what
    `Signals.meet` raises.
    """

    def __init__(
        self,
        memory: Tensor,
        rank: int,
        peers: Sequence[Peer],
        default_timeout: Callable[[], timedelta],
    ) -> None:
        self.rank = rank
        self.size = len(peers)
        data = memory.numpy().data
        self.signals = Signals(data, rank, peers, default_timeout)
        self._others = [other for other in range(self.size) if other != rank]
        self._part = part_bytes(self.size)
        self._near = Staging(data[round_up(self.size * BYTES_PER_RANK) :], self.size, NEAR_PARTS)
        self._far: Staging | None = None
        self._trials = Trials()
        self._scratch: dict[torch.dtype, list[Tensor]] = {}

    def map_together(self, size: int) -> Tensor:
        """New memory that all ranks have mapped: zeros, uint8.

        Raises SharedMemoryError on all ranks if there is not so much memory.
        """
        problem, memory = "", None
        with ExitStack() as held:
            place = torch.full((2,), -1)
            try:
                if self.rank == 0:
                    made = held.enter_context(new_memory(size))
                    place = torch.tensor([made.pid, made.descriptor])
            except OSError as error:
                problem = str(error)
            self.broadcast(place, 0, None)
            pid, descriptor = place.tolist()
            try:
                if pid >= 0:
                    memory = map_memory(Place(pid, descriptor), size)
            except OSError as error:
                problem = str(error)
            failed = torch.tensor([memory is None], dtype=torch.int32)
            self.all_reduce(failed, _COUNT, None)
        if memory is None or failed.item():
            raise SharedMemoryError(size, int(failed.item()), problem)
        return memory

    def barrier(self, timeout: timedelta | None) -> None:
        """Wait for all ranks."""
        self.signals.meet(call("barrier"), timeout)

    def all_reduce(self, flat: Tensor, reduction: Reduction, timeout: timedelta | None) -> None:
        """Replace `flat` by the reduction of all ranks' `flat`: the same bits on every rank."""
        numel = flat.numel()
        what = call("all_reduce", flat.dtype, numel, reduction.name)
        if self.size == 2 or flat.nbytes * self.size <= _AT_ONCE_BYTES:
            self._reduce_at_once(flat, reduction, what, timeout)
        else:
            self._reduce_by_shares(flat, reduction, what, timeout, self.rank)

    def all_reduce_each(
        self, flats: Sequence[Tensor], reduction: Reduction, timeout: timedelta | None
    ) -> None:
        """`all_reduce` of each of several tensors of one dtype; small ones travel together."""
        small = [flat for flat in flats if flat.numel() * flat.itemsize <= _SMALL_BYTES]
        if len(small) > 1:
            together = torch.cat(small)
            self.all_reduce(together, reduction, timeout)
            for flat, reduced in zip(
                small, together.split([f.numel() for f in small]), strict=True
            ):
                flat.copy_(reduced)
        for flat in flats:
            if len(small) <= 1 or flat.numel() * flat.itemsize > _SMALL_BYTES:
                self.all_reduce(flat, reduction, timeout)

    def reduce(
        self, flat: Tensor, reduction: Reduction, root: int, timeout: timedelta | None
    ) -> None:
        """Replace `flat` on rank `root` by the reduction of all ranks' `flat`."""
        what = call("reduce", flat.dtype, flat.numel(), reduction.name, root)
        self._reduce_by_shares(flat, reduction, what, timeout, root)

    def broadcast(self, flat: Tensor, root: int, timeout: timedelta | None) -> None:
        """Replace `flat` by that of rank `root`."""
        what = call("broadcast", flat.dtype, flat.numel(), root=root)
        raw = flat.view(torch.uint8)
        for chunk in self._chunks(raw, self._part, what, timeout):
            staged = chunk.staging.view(root, chunk.turn, torch.uint8, 0, chunk.stop - chunk.start)
            piece = raw[chunk.start : chunk.stop]
            if self.rank == root:
                self._put(staged, piece)
            self.signals.meet(what, timeout)
            if self.rank != root:
                piece.copy_(staged)

    def all_gather(
        self,
        outputs: Sequence[Tensor],
        flat: Tensor,
        timeout: timedelta | None,
        what: Call | None = None,
    ) -> None:
        """Write the `flat` of rank r to `outputs[r]`, for every r; `what` it is a part of."""
        what = what or call("all_gather", flat.dtype, flat.numel())
        raw = flat.view(torch.uint8)
        if 0 < raw.numel() <= self._part:
            views = self._staging_for(raw, what, timeout).views(torch.uint8, raw.numel())
            self._put(views[self.rank], raw)
            self.signals.meet(what, timeout)
            for output, view in zip(outputs, views, strict=True):
                output.view(torch.uint8).copy_(view)
            return
        targets = [output.view(torch.uint8) for output in outputs]
        for chunk in self._chunks(raw, self._part, what, timeout):
            numel = chunk.stop - chunk.start
            views = [
                chunk.staging.view(rank, chunk.turn, torch.uint8, 0, numel)
                for rank in range(self.size)
            ]
            self._put(views[self.rank], raw[chunk.start : chunk.stop])
            self.signals.meet(what, timeout)
            views[self.rank] = raw[chunk.start : chunk.stop]
            for target, view in zip(targets, views, strict=True):
                target[chunk.start : chunk.stop].copy_(view)

    def reduce_scatter(
        self,
        out: Tensor,
        inputs: Sequence[Tensor],
        reduction: Reduction,
        timeout: timedelta | None,
        what: Call | None = None,
    ) -> None:
        """Write the reduction of all ranks' `inputs[r]` to `out` of rank r; `what` it is a part of.

        `out` may be `inputs[r]`.
        """
        what = what or call("reduce_scatter", out.dtype, out.numel(), reduction.name)
        room = self._room(out.dtype)
        for chunk in self._chunks(out, room, what, timeout):
            numel = chunk.stop - chunk.start
            for other in self._others:
                staged = chunk.staging.view(self.rank, chunk.turn, out.dtype, other * room, numel)
                self._put(staged, inputs[other][chunk.start : chunk.stop])
            self.signals.meet(what, timeout)
            mine = self.rank * room
            parts = [
                chunk.staging.view(rank, chunk.turn, out.dtype, mine, numel)
                for rank in range(self.size)
            ]
            own = inputs[self.rank][chunk.start : chunk.stop]
            parts[self.rank].copy_(own)
            scratch = self._scratch_tensors(out.dtype, numel)
            reduce_into(out[chunk.start : chunk.stop], parts, reduction, scratch)

    def _reduce_at_once(
        self, flat: Tensor, reduction: Reduction, what: Call, timeout: timedelta | None
    ) -> None:
        """Every rank reduces everything: one meeting, but each reads what all have staged."""
        staging = self._staging_for(flat, what, timeout)
        large = flat.nbytes > self._part
        for piece in flat.split(self._part // flat.itemsize) if large else (flat,):
            numel = piece.numel()
            views = staging.views(flat.dtype, numel)
            self._put(views[self.rank], piece)
            self.signals.meet(what, timeout)
            if self.size == 2:  # my own values are nearer than what I have staged
                views = [piece, views[1]] if self.rank == 0 else [views[0], piece]
            reduce_into(piece, views, reduction, self._scratch_tensors(flat.dtype, numel))

    def _reduce_by_shares(
        self, flat: Tensor, reduction: Reduction, what: Call, timeout: timedelta | None, root: int
    ) -> None:
        """Reduce `flat` chunk by chunk; the result goes to the ranks whose `root` is their own."""
        longest = self._room(flat.dtype) * self.size
        chunks = list(self._chunks(flat, longest, what, timeout))
        for step in range(len(chunks) + 2):
            if step >= 2 and root == self.rank:
                self._fetch(flat, chunks[step - 2])
            if 1 <= step <= len(chunks):
                self._reduce_share(flat, chunks[step - 1], reduction)
            if step < len(chunks):
                self._stage(flat, chunks[step])
            if step <= len(chunks):
                self.signals.meet(what, timeout)

    def _stage(self, flat: Tensor, chunk: _Chunk) -> None:
        """Put where the others see it what they reduce of my chunk."""
        for other in self._others:
            staged, piece = self._share(flat, chunk, self.rank, other)
            self._put(staged, piece)

    def _reduce_share(self, flat: Tensor, chunk: _Chunk, reduction: Reduction) -> None:
        """Reduce my share of a chunk that all have staged, into my own staging."""
        out, own = self._share(flat, chunk, self.rank, self.rank)
        parts = [
            own if rank == self.rank else self._share(flat, chunk, rank, self.rank)[0]
            for rank in range(self.size)
        ]
        reduce_into(out, parts, reduction, self._scratch_tensors(flat.dtype, out.numel()))

    def _fetch(self, flat: Tensor, chunk: _Chunk) -> None:
        """Take everybody's results of a chunk."""
        for rank in range(self.size):
            staged, piece = self._share(flat, chunk, rank, rank)
            piece.copy_(staged)

    def _share(self, flat: Tensor, chunk: _Chunk, rank: int, of: int) -> tuple[Tensor, Tensor]:
        """The share of rank `of`: in the staging of `rank`, and in my tensor."""
        start, stop = chunk.cuts[of], chunk.cuts[of + 1]
        place = of * self._room(flat.dtype)
        staged = chunk.staging.view(rank, chunk.turn, flat.dtype, place, stop - start)
        return staged, flat[start:stop]

    def _room(self, dtype: torch.dtype) -> int:
        """How many elements fit into one of `size` equal pieces of a staging part.

        A share has the same place in every chunk, also in a short last one: while one rank fetches
        a result, the next chunk's shares are written around it.
        """
        return self._part // self.size // _ALIGNMENT * _ALIGNMENT // dtype.itemsize

    def _chunks(
        self, flat: Tensor, longest: int, what: Call, timeout: timedelta | None
    ) -> Iterator[_Chunk]:
        """Cut a tensor into chunks, at least one, and take a turn for each."""
        staging, numel = self._staging_for(flat, what, timeout), flat.numel()
        for start in range(0, max(numel, 1), longest):
            stop = min(start + longest, numel)
            cuts = [start + (stop - start) * rank // self.size for rank in range(self.size + 1)]
            yield _Chunk(staging, staging.next_turn(), start, stop, cuts)

    def _put(self, staged: Tensor, values: Tensor) -> None:
        """Write to my staging."""
        if not self._trials.measuring:
            staged.copy_(values)
            return
        start = perf_counter()
        staged.copy_(values)
        self._trials.wrote(values.nbytes, perf_counter() - start)

    def _staging_for(self, flat: Tensor, what: Call, timeout: timedelta | None) -> Staging:
        """Through which parts a tensor of this size goes now.

        Where the ranks have to talk about it they meet before: whoever does not come, or comes for
        something else, is named with the call that this is for.
        """
        size = flat.nbytes
        if size < self._part // 2:
            return self._near
        if self._trials.moves(size):
            self.signals.meet(what, timeout)
            rates = torch.tensor(self._trials.rates(), dtype=torch.float64)
            self.all_reduce(rates, _TIMES, timeout)
            self._trials.settle(*rates.tolist())
        if self._trials.far and self._far is None:
            self.signals.meet(what, timeout)
            self._far = self._new_far_staging()
        return self._far if self._trials.far and self._far is not None else self._near

    def _new_far_staging(self) -> Staging | None:
        parts = max(NEAR_PARTS, min(FAR_PARTS, _ALL_FAR_PARTS_BYTES // (self.size * self._part)))
        try:
            memory = self.map_together(self.size * parts * self._part)
        except SharedMemoryError:
            self._trials.give_up()
            return None
        return Staging(memory.numpy().data, self.size, parts)

    def _scratch_tensors(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """This rank's own memory for the inner nodes of the tree."""
        if self.size <= 2:
            return []
        if dtype not in self._scratch:
            longest = max(self._room(dtype), _AT_ONCE_BYTES // self.size // dtype.itemsize)
            with torch.inference_mode(False):
                self._scratch[dtype] = [
                    torch.empty(longest, dtype=dtype) for _ in range(scratch_count(self.size))
                ]
        return [tensor[:numel] for tensor in self._scratch[dtype]]
