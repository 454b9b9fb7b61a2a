"""The collectives over one mapping, which holds the signals and then each rank's staging buffers.

Whatever its size, a tensor goes through the staging in chunks. Successive chunks alternate between
two buffers, so one barrier per chunk is enough: between the reading of a buffer and the next
writing to it all ranks pass a barrier.

To reduce a large tensor, each rank reduces its own share of every chunk. It stages only the shares
of the others, and puts the result of its own share into the slot that this leaves free:

    step k    fetch the results of chunk k-2; reduce my share of k-1; stage chunk k; barrier
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest

import torch
from torch import Tensor

from instep.distributed.shm.memory.mapping import round_up
from instep.distributed.shm.memory.peer_memory import PeerMemory, allow_siblings, can_read
from instep.distributed.shm.memory.peers import Peer
from instep.distributed.shm.memory.reduction import Reduction, buffer_count, reduce_into
from instep.distributed.shm.memory.signals import (
    BYTES_PER_RANK,
    CollectiveSignature,
    Signals,
    signature_of,
)
from instep.distributed.shm.memory.staging import BUFFERS, Staging

_COUNT = Reduction("SUM", torch.add, frozenset({torch.int32}))
_PART_BYTES, _SMALLEST_PART_BYTES = 1 << 20, 64 << 10
"""The most and the least that a rank stages at a time."""
_ALL_PARTS_BYTES = 64 << 20
"""All ranks' staging together, unless they are very many."""
_ONE_SHOT_BYTES = 64 << 10
"""All ranks' input together, up to which every rank reduces all of it."""
_SMALL_BYTES = 16 << 10
"""Tensors of up to this size are packed, to be reduced together."""
_DIRECT_BYTES = 2 << 20
"""Of one rank, from which on the others read its tensors where they are."""


def part_bytes(size: int) -> int:
    """The number of bytes that a rank stages at a time, in a group of `size` ranks."""
    share = _ALL_PARTS_BYTES // (BUFFERS * size)
    return max(_SMALLEST_PART_BYTES, min(_PART_BYTES, 1 << share.bit_length() - 1))


def mapping_bytes(size: int) -> int:
    """The size of the mapping of `size` ranks."""
    return round_up(size * BYTES_PER_RANK) + BUFFERS * size * part_bytes(size)


@dataclass(frozen=True)
class _Chunk:
    """A range of a tensor that is staged at once."""

    use: int
    """Of the staging."""
    start: int
    stop: int
    bounds: list[int]
    """The start of each rank's share, and the end of the last one."""


class Exchange:
    """This rank's view of the shared mapping. One thread at a time may use it.

    All tensors are 1-D, contiguous and on the CPU. Every method is a collective and raises what
    `Signals.barrier` raises.
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
        self.others = [other for other in range(self.size) if other != rank]
        """The other ranks."""
        self.staging = Staging(data[round_up(self.size * BYTES_PER_RANK) :], self.size)
        self.part_bytes = self.staging.part_bytes
        """How many bytes a rank stages at a time."""
        self._buffers: dict[torch.dtype, list[Tensor]] = {}
        self.peer_memory: PeerMemory | None = None
        """Reads tensors of the other ranks where they are; None where the system denies it."""

    def open_peer_memory(self) -> None:
        """Read the other ranks' memory directly from now on, if all ranks can. Collective."""
        allow_siblings()
        memory = PeerMemory([peer.pid for peer in self.signals.peers])
        probe = torch.tensor([self.rank], device="cpu")
        addresses = self._publish_addresses([probe], signature_of("peer memory"), None)
        fine = can_read(memory, [of_rank[0] for of_rank in addresses], range(self.size))
        self.peer_memory = memory if self.count_ranks(fine) == self.size else None

    def count_ranks(self, condition: bool, timeout: timedelta | None = None) -> int:
        """On how many ranks it is true. Collective."""
        count = torch.tensor([condition], dtype=torch.int32, device="cpu")
        self.all_reduce(count, _COUNT, timeout)
        return int(count)

    def barrier(self, timeout: timedelta | None) -> None:
        """Wait for all ranks."""
        self.signals.barrier(signature_of("barrier"), timeout)

    def all_reduce(self, flat: Tensor, reduction: Reduction, timeout: timedelta | None) -> None:
        """Replace `flat` by the reduction of all ranks' `flat`: the same bits on every rank."""
        numel = flat.numel()
        signature = signature_of("all_reduce", flat.dtype, numel, reduction.name)
        if self.size == 2 or flat.nbytes * self.size <= _ONE_SHOT_BYTES:
            self._one_shot_reduce(flat, reduction, signature, timeout)
        else:
            self._two_shot_reduce(flat, reduction, signature, timeout, self.rank)

    def all_reduce_each(
        self, flats: Sequence[Tensor], reduction: Reduction, timeout: timedelta | None
    ) -> None:
        """`all_reduce` of each of several tensors of one dtype; small ones are packed together."""
        small = [flat for flat in flats if flat.numel() * flat.itemsize <= _SMALL_BYTES]
        if len(small) > 1:
            packed = torch.cat(small)
            self.all_reduce(packed, reduction, timeout)
            for flat, reduced in zip(small, packed.split([f.numel() for f in small]), strict=True):
                flat.copy_(reduced)
        for flat in flats:
            if len(small) <= 1 or flat.numel() * flat.itemsize > _SMALL_BYTES:
                self.all_reduce(flat, reduction, timeout)

    def reduce(
        self, flat: Tensor, reduction: Reduction, root: int, timeout: timedelta | None
    ) -> None:
        """Replace `flat` on rank `root` by the reduction of all ranks' `flat`."""
        signature = signature_of("reduce", flat.dtype, flat.numel(), reduction.name, root)
        self._two_shot_reduce(flat, reduction, signature, timeout, root)

    def broadcast(self, flat: Tensor, root: int, timeout: timedelta | None) -> None:
        """Replace `flat` by that of rank `root`."""
        signature = signature_of("broadcast", flat.dtype, flat.numel(), root=root)
        raw = flat.view(torch.uint8)
        for chunk in self._chunks(raw.numel(), self.staging.part_bytes):
            staged = self.staging.part(chunk.use, root, torch.uint8, chunk.stop - chunk.start)
            piece = raw[chunk.start : chunk.stop]
            if self.rank == root:
                staged.copy_(piece)
            self.signals.barrier(signature, timeout)
            if self.rank != root:
                piece.copy_(staged)

    def all_gather(
        self,
        outputs: Sequence[Tensor],
        flat: Tensor,
        timeout: timedelta | None,
        signature: CollectiveSignature | None = None,
    ) -> None:
        """Write the `flat` of rank r to `outputs[r]`, for every r.

        `signature`: of the collective of which this is a part.
        """
        signature = signature or signature_of("all_gather", flat.dtype, flat.numel())
        raw = flat.view(torch.uint8)
        if 0 < raw.numel() <= self.staging.part_bytes:
            views = self.staging.parts(torch.uint8, raw.numel())
            views[self.rank].copy_(raw)
            self.signals.barrier(signature, timeout)
            for output, view in zip(outputs, views, strict=True):
                output.view(torch.uint8).copy_(view)
            return
        outputs[self.rank].copy_(flat)
        self._gather_each([[output] for output in outputs], signature, timeout)

    def all_gather_bytes(
        self, mine: bytes, signature: CollectiveSignature, timeout: timedelta | None
    ) -> bytes:
        """The few bytes of each rank, one rank after the other; all have the same number."""
        parts = self.staging.bytes_of_parts(len(mine))
        parts[self.rank][:] = mine
        self.signals.barrier(signature, timeout)
        return b"".join(parts)

    def all_gather_each(self, parts: Sequence[Sequence[Tensor]], timeout: timedelta | None) -> None:
        """Overwrite the tensors `parts[r]` with those of rank r, for every other rank r.

        They have the same sizes on all ranks. Nothing is packed, and own tensors are only read.
        """
        tensors = [tensor for each in parts for tensor in each]
        numel = sum(tensor.numel() for tensor in tensors)
        signature = signature_of("all_gather_each", tensors[0].dtype, numel)
        self._gather_each(parts, signature, timeout)

    def _gather_each(
        self,
        parts: Sequence[Sequence[Tensor]],
        signature: CollectiveSignature,
        timeout: timedelta | None,
    ) -> None:
        if self.peer_memory is not None and self._is_read_directly(parts):
            addresses = self._publish_addresses(parts[self.rank], signature, timeout)
            has_read = self._read_others(parts, addresses)
            if self.count_ranks(has_read, timeout) == self.size:
                return
            self.peer_memory = None  # as on every other rank
        chunks = [_chunks_of_bytes(each, self.staging.part_bytes) or [[]] for each in parts]
        for pieces in zip_longest(*chunks, fillvalue=[]):
            use = self.staging.next_use()
            sizes = [[piece.numel() for piece in each] for each in pieces]
            staged = [
                self.staging.part(use, rank, torch.uint8, sum(sizes[rank]))
                for rank in range(self.size)
            ]
            if pieces[self.rank]:
                torch.cat(pieces[self.rank], out=staged[self.rank])
            self.signals.barrier(signature, timeout)
            for other in self.others:
                values = staged[other].split(sizes[other])
                for piece, value in zip(pieces[other], values, strict=True):
                    piece.copy_(value)

    def _read_others(
        self, parts: Sequence[Sequence[Tensor]], addresses: Sequence[Sequence[int]]
    ) -> bool:
        """Read the other ranks' tensors where they are; False if the system denies it by now.

        A rank of an unedited script restricts itself after its group was made (landlock(7)), and
        may not trace the others from then on.
        """
        assert self.peer_memory is not None
        for other in self.others:
            try:
                self.peer_memory.read_each(other, addresses[other], parts[other])
            except PermissionError:
                return False
            except ProcessLookupError:
                pass  # it has died: what follows says so
        return True

    def reduce_scatter(
        self,
        out: Tensor,
        inputs: Sequence[Tensor],
        reduction: Reduction,
        timeout: timedelta | None,
        signature: CollectiveSignature | None = None,
    ) -> None:
        """Write the reduction of all ranks' `inputs[r]` to `out` of rank r.

        `out` may be `inputs[r]`. `signature`: of the collective of which this is a part.
        """
        signature = signature or signature_of(
            "reduce_scatter", out.dtype, out.numel(), reduction.name
        )
        for chunk in self._chunks(out.numel(), self.staging.slot_bytes // out.itemsize):
            numel = chunk.stop - chunk.start
            for other in self.others:
                staged = self.staging.slot(chunk.use, self.rank, other, out.dtype, numel)
                staged.copy_(inputs[other][chunk.start : chunk.stop])
            self.signals.barrier(signature, timeout)
            parts = [
                self.staging.slot(chunk.use, rank, self.rank, out.dtype, numel)
                for rank in range(self.size)
            ]
            own = inputs[self.rank][chunk.start : chunk.stop]
            parts[self.rank].copy_(own)
            buffers = self.buffers_for(out.dtype, numel)
            reduce_into(out[chunk.start : chunk.stop], parts, reduction, buffers)

    def _one_shot_reduce(
        self,
        flat: Tensor,
        reduction: Reduction,
        signature: CollectiveSignature,
        timeout: timedelta | None,
    ) -> None:
        """Every rank reduces everything: one barrier, but each rank reads the staging of all."""
        numel, longest = flat.numel(), self.staging.part_bytes // flat.itemsize
        for piece in flat.split(longest) if numel > longest else (flat,):
            numel = piece.numel()
            views = self.staging.parts(flat.dtype, numel)
            views[self.rank].copy_(piece)
            self.signals.barrier(signature, timeout)
            if self.size == 2:  # my tensor is nearer than its staged copy
                views = [piece, views[1]] if self.rank == 0 else [views[0], piece]
            reduce_into(piece, views, reduction, self.buffers_for(flat.dtype, numel))

    def _is_read_directly(self, parts: Sequence[Sequence[Tensor]]) -> bool:
        """Whether it is faster, and the addresses have room in the staging."""
        largest = max(sum(tensor.nbytes for tensor in each) for each in parts)
        return largest >= _DIRECT_BYTES and max(map(len, parts)) < self.staging.part_bytes // 8

    def _publish_addresses(
        self, tensors: Sequence[Tensor], signature: CollectiveSignature, timeout: timedelta | None
    ) -> list[list[int]]:
        """The addresses of all ranks' tensors. Until the next barrier the others may read these."""
        use, longest = self.staging.next_use(), self.staging.part_bytes // 8
        mine = torch.tensor(
            [len(tensors), *(tensor.data_ptr() for tensor in tensors)], device="cpu"
        )
        self.staging.part(use, self.rank, torch.int64, longest)[: mine.numel()] = mine
        self.signals.barrier(signature, timeout)
        parts = [self.staging.part(use, r, torch.int64, longest) for r in range(self.size)]
        return [part[1 : 1 + int(part[0])].tolist() for part in parts]

    def _two_shot_reduce(
        self,
        flat: Tensor,
        reduction: Reduction,
        signature: CollectiveSignature,
        timeout: timedelta | None,
        root: int,
    ) -> None:
        """Reduce `flat` chunk by chunk; the result goes to the ranks whose `root` is their own."""
        longest = self.staging.slot_bytes // flat.itemsize * self.size
        chunks = list(self._chunks(flat.numel(), longest))
        for step in range(len(chunks) + 2):
            if step >= 2 and root == self.rank:
                self._fetch(flat, chunks[step - 2])
            if 1 <= step <= len(chunks):
                self._reduce_share(flat, chunks[step - 1], reduction)
            if step < len(chunks):
                self._stage(flat, chunks[step])
            if step <= len(chunks):
                self.signals.barrier(signature, timeout)

    def _stage(self, flat: Tensor, chunk: _Chunk) -> None:
        """Stage the shares of the other ranks."""
        for other in self.others:
            staged, piece = self._share(flat, chunk, self.rank, other)
            staged.copy_(piece)

    def _reduce_share(self, flat: Tensor, chunk: _Chunk, reduction: Reduction) -> None:
        """Reduce my share of a chunk that all ranks have staged, into my own staging."""
        out, own = self._share(flat, chunk, self.rank, self.rank)
        parts = [
            own if rank == self.rank else self._share(flat, chunk, rank, self.rank)[0]
            for rank in range(self.size)
        ]
        reduce_into(out, parts, reduction, self.buffers_for(flat.dtype, out.numel()))

    def _fetch(self, flat: Tensor, chunk: _Chunk) -> None:
        """Copy all ranks' results of a chunk into my tensor."""
        for rank in range(self.size):
            staged, piece = self._share(flat, chunk, rank, rank)
            piece.copy_(staged)

    def _share(self, flat: Tensor, chunk: _Chunk, rank: int, of: int) -> tuple[Tensor, Tensor]:
        """The share of rank `of`: as `rank` stages it, and in my tensor."""
        start, stop = chunk.bounds[of], chunk.bounds[of + 1]
        staged = self.staging.slot(chunk.use, rank, of, flat.dtype, stop - start)
        return staged, flat[start:stop]

    def _chunks(self, numel: int, longest: int) -> Iterator[_Chunk]:
        """Cut `numel` elements into chunks, at least one; each is one use of the staging."""
        for start in range(0, max(numel, 1), longest):
            stop = min(start + longest, numel)
            bounds = [start + (stop - start) * rank // self.size for rank in range(self.size + 1)]
            yield _Chunk(self.staging.next_use(), start, stop, bounds)

    def buffers_for(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """This rank's private memory for the inner nodes of the reduction tree."""
        if self.size <= 2:
            return []
        if dtype not in self._buffers:
            longest = max(self.staging.slot_bytes, _ONE_SHOT_BYTES // self.size) // dtype.itemsize
            with torch.inference_mode(False):
                self._buffers[dtype] = [
                    torch.empty(longest, dtype=dtype, device="cpu")
                    for _ in range(buffer_count(self.size))
                ]
        return [tensor[:numel] for tensor in self._buffers[dtype]]


def _chunks_of_bytes(tensors: Sequence[Tensor], longest: int) -> list[list[Tensor]]:
    """The bytes of 1-D tensors, one after the other, in chunks of `longest` and a shorter one."""
    chunks: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        rest = tensor.view(torch.uint8)
        while rest.numel():
            if room == 0:
                chunks.append([])
                room = longest
            piece, rest = rest[:room], rest[room:]
            chunks[-1].append(piece)
            room -= piece.numel()
    return chunks
