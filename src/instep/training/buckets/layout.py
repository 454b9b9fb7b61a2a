"""Which tensors travel together. Pure: no process is needed to plan."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in its bucket."""

    index: int
    """Which of the planned tensors."""
    start: int
    """Its first element in the bucket."""
    stop: int
    """The element after its last."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel in one message."""

    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        """How many elements travel."""
        return self.slots[-1].stop


def plan_buckets(
    sizes: Sequence[tuple[int, int]], kinds: Sequence[Hashable], capacity: int
) -> list[Bucket]:
    """Fill buckets in the order given.

    Args:
        sizes: of each tensor, its index and its number of elements.
        kinds: what must be equal within a bucket (dtype and device).
        capacity: elements at which a bucket is full; a larger tensor has one of its own.

    Returns:
        Buckets whose slots cover every tensor once; each kind's tensors stay in order.
    """
    filling: dict[Hashable, list[Slot]] = {}
    buckets: list[Bucket] = []
    for (index, size), kind in zip(sizes, kinds, strict=True):
        slots = filling.setdefault(kind, [])
        start = slots[-1].stop if slots else 0
        if slots and start + size > capacity:
            buckets.append(Bucket(tuple(slots)))
            slots, start = [], 0
            filling[kind] = slots
        slots.append(Slot(index, start, start + size))
    buckets.extend(Bucket(tuple(slots)) for slots in filling.values() if slots)
    return buckets
