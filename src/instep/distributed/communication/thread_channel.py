"""Ways between all ranks for threads, beside what the script itself sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from instep.distributed.communication import signed_pickle
from instep.distributed.communication.transport import Pending

T = TypeVar("T")


@dataclass(frozen=True)
class _All:
    works: Sequence[dist.Work | None]

    def wait(self) -> None:
        for work in self.works:
            if work is not None:
                work.wait()


class ThreadChannel:
    """A way of its own between all ranks, for one thread at a time: what goes on in other lanes, or
    outside of them, may come in another order on each rank.
    """

    def __init__(self, number: int) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._tag = number
        self._others = [rank for rank in range(self.size) if rank != self.rank]

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's value, pickled."""
        mine = torch.frombuffer(bytearray(signed_pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.tensor([mine.numel()]) for _ in range(self.size)]
        self._swap(sizes)
        texts = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        texts[self.rank] = mine
        self._swap(texts)
        return [signed_pickle.loads(text.numpy().data) for text in texts]

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        """Start to overwrite a contiguous `tensor` with root's."""
        if self.rank != root:
            return _All([dist.irecv(tensor, root, tag=self._tag)])
        return _All([dist.isend(tensor, other, tag=self._tag) for other in self._others])

    def _swap(self, parts: Sequence[Tensor]) -> None:
        """Overwrite each other rank's part with what it sends."""
        works = [dist.isend(parts[self.rank], other, tag=self._tag) for other in self._others]
        works += [dist.irecv(parts[other], other, tag=self._tag) for other in self._others]
        _All(works).wait()
