"""Which tensors travel together. Pure: planning needs no process group."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from instep.process import settings


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in its bucket."""

    index: int
    """Which of the planned tensors."""
    start: int
    """Its first element in the bucket."""
    stop: int
    """The element after its last."""


@dataclass(frozen=True)
class BucketLayout:
    """Tensors that travel in one message."""

    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        """How many elements travel."""
        return self.slots[-1].stop


def bucket_capacity(tensors: Iterable[Tensor]) -> int:
    """The number of elements at which a bucket is full: INSTEP_BUCKET_MIB of the widest element."""
    widest = max((tensor.element_size() for tensor in tensors), default=1)
    return int(settings.BUCKET_MIB) * 2**20 // widest


def plan_tensors(tensors: Mapping[int, Tensor], capacity: int | None = None) -> list[BucketLayout]:
    """Buckets for tensors given by their indices, of one dtype and device each."""
    return plan_buckets(
        [(index, tensor.numel()) for index, tensor in tensors.items()],
        [(tensor.dtype, tensor.device) for tensor in tensors.values()],
        bucket_capacity(tensors.values()) if capacity is None else capacity,
    )


def plan_buckets(
    sizes: Sequence[tuple[int, int]], keys: Sequence[Hashable], capacity: int
) -> list[BucketLayout]:
    """Fill buckets in the order given.

    Args:
        sizes: the index and the number of elements of each tensor.
        keys: what must be equal within a bucket (dtype and device).
        capacity: elements at which a bucket is full; a larger tensor has one of its own.

    Returns:
        Buckets whose slots cover every tensor once; tensors with the same key stay in order.
    """
    filling: dict[Hashable, list[Slot]] = {}
    buckets: list[BucketLayout] = []
    for (index, size), key in zip(sizes, keys, strict=True):
        slots = filling.setdefault(key, [])
        start = slots[-1].stop if slots else 0
        if slots and start + size > capacity:
            buckets.append(BucketLayout(tuple(slots)))
            slots, start = [], 0
            filling[key] = slots
        slots.append(Slot(index, start, start + size))
    buckets.extend(BucketLayout(tuple(slots)) for slots in filling.values() if slots)
    return buckets
