"""Communication between the threads of different ranks, in tagged messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from instep.distributed.pending import Pending
from instep.distributed.rendezvous import signed_pickle

T = TypeVar("T")


@dataclass(frozen=True)
class _Works:
    works: Sequence[dist.Work | None]

    def wait(self) -> None:
        for work in self.works:
            if work is not None:
                work.wait()


class ThreadChannel:
    """Messages with a tag of their own between all ranks, for one thread at a time.

    Each rank may use other channels, or none, in a different order meanwhile.
    """

    def __init__(self, number: int) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._tag = number
        self._others = [rank for rank in range(self.size) if rank != self.rank]

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's value, pickled."""
        own = signed_pickle.dumps_tensor(value)
        sizes = [torch.tensor([own.numel()], device="cpu") for _ in range(self.size)]
        self._all_gather(sizes)
        pickled = [torch.empty(int(size), dtype=torch.uint8, device="cpu") for size in sizes]
        pickled[self.rank] = own
        self._all_gather(pickled)
        return [signed_pickle.loads_tensor(part) for part in pickled]

    def broadcast_object(self, value: T, root: int) -> T:
        """Root's value, pickled."""
        pickled = signed_pickle.dumps_tensor(value)
        size = torch.tensor([pickled.numel()], device="cpu")
        self.broadcast(size, root).wait()
        if self.rank != root:
            pickled = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self.broadcast(pickled, root).wait()
        return value if self.rank == root else signed_pickle.loads_tensor(pickled)

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        """Start to overwrite a contiguous `tensor` with root's."""
        if self.rank != root:
            return _Works([dist.irecv(tensor, root, tag=self._tag)])
        return _Works([dist.isend(tensor, other, tag=self._tag) for other in self._others])

    def _all_gather(self, parts: Sequence[Tensor]) -> None:
        """Send the own part; overwrite the others with those of the other ranks."""
        works = [dist.isend(parts[self.rank], other, tag=self._tag) for other in self._others]
        works += [dist.irecv(parts[other], other, tag=self._tag) for other in self._others]
        _Works(works).wait()
