"""Staging buffers in shared memory, in which ranks put data for other ranks.

A rank writes to memory that it has read before. Between cores without a common cache (a processor
may have one for each few cores, a host several processors) a cache line moves to the core that
reads it; the writer then waits long to write it again, and the reader does not. Measured on an
EPYC, all_reduce of 20 MB over 2 ranks: 11 ms where each rank kept its part, 3 ms where ranks swap
parts; with a common cache 3 ms either way.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

BUFFERS = 2
_ALIGNMENT = 64  # bytes: a cache line has one writer
_CACHED_VIEWS = 256


class Staging:
    """Two buffers, used alternately, each with one part of equal size for each rank.

    A part has one slot for each rank: the data of `writer` for `reader`, or, where both are the
    same rank, for all ranks.
    """

    def __init__(self, memory: memoryview, ranks: int) -> None:
        self._memory = memory
        self._ranks = ranks
        self.part_bytes: Final = len(memory) // (ranks * BUFFERS)
        self.slot_bytes: Final = self.part_bytes // ranks // _ALIGNMENT * _ALIGNMENT
        self._uses = 0
        self._views: dict[tuple[torch.dtype, int, int], list[Tensor]] = {}

    def next_use(self) -> int:
        """The number of the next use, for `part` and `slot`; the same on all ranks."""
        self._uses += 1
        return self._uses

    def part(self, use: int, writer: int, dtype: torch.dtype, numel: int) -> Tensor:
        """The first `numel` elements of the part of `writer` in this use."""
        buffer, swap = use % BUFFERS, use // BUFFERS
        return self._view(buffer, (writer + swap) % self._ranks, 0, dtype, numel)

    def parts(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """`part` of every rank in the next use; the tensors are cached."""
        use = self.next_use()
        buffer, swap = use % BUFFERS, use // BUFFERS % self._ranks
        views = self._views.get((dtype, numel, buffer))
        if views is None:
            if len(self._views) >= _CACHED_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # the cache serves callers outside of it, too
                views = [self._view(buffer, part, 0, dtype, numel) for part in range(self._ranks)]
            self._views[dtype, numel, buffer] = views
        return views[swap:] + views[:swap]

    def bytes_of_parts(self, length: int) -> list[memoryview]:
        """The first bytes of the part of every rank in the next use."""
        use = self.next_use()
        first, swap = use % BUFFERS * self._ranks, use // BUFFERS
        parts = []
        for writer in range(self._ranks):
            offset = (first + (writer + swap) % self._ranks) * self.part_bytes
            parts.append(self._memory[offset : offset + length])
        return parts

    def slot(self, use: int, writer: int, reader: int, dtype: torch.dtype, numel: int) -> Tensor:
        """The first `numel` elements of the slot from `writer` to `reader` in this use."""
        buffer, swap = use % BUFFERS, use // BUFFERS
        if writer == reader:
            part = slot = (writer + swap) % self._ranks
        else:
            part, slot = (writer, reader) if swap % 2 == 0 else (reader, writer)
        return self._view(buffer, part, slot, dtype, numel)

    def _view(self, buffer: int, part: int, slot: int, dtype: torch.dtype, numel: int) -> Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        offset = (buffer * self._ranks + part) * self.part_bytes + slot * self.slot_bytes
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset)
