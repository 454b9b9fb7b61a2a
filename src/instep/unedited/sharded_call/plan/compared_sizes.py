"""The sizes of the arguments of calls that were compared, and what is new in those of another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from instep.training.blocks import blocks_of
from instep.training.pytree import is_column
from instep.unedited.sharded_call.plan.division import is_entries, shapes_of, size_differences

MAX_COMPARED = 4
"""Other shapes are compared anew this many times; after that they count among the samples."""


@dataclass(eq=False)
class ComparedSizes:
    """The sizes of calls of one kind.

    A forward that cuts the batch into pieces of its own, as batch statistics of 32 rows each, gives
    the same for a part of the batch while the parts begin where pieces do, or while there is one
    piece. Neither the first four shapes nor a branch tell when that ends. So sizes are new, too,
    where parts begin at a multiple of less than before, and where one is about twice the largest.
    And what a forward does for few rows (it squeezes a batch of one, or divides by no less than
    eight) a small part does before the batch: so they are new where the smallest part has fewer
    rows than any before. All of this happens a few times, as a rule.
    """

    shapes: set[tuple[Any, ...]] = field(default_factory=set)
    differences: frozenset[tuple[int, int, str]] = frozenset()
    """Where shards had entries of other sizes than others."""
    steps: dict[tuple[int, int], int] = field(default_factory=dict)
    """Of each dimension of each argument: a divisor of every place where a shard began, had it been
    the dimension of the rows."""
    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    """Of each dimension the bits of its largest size."""
    smallest: int = 0
    """The rows of the smallest part."""

    def add(self, leaves: Sequence[Any], rows: int, size: int) -> bool:
        """Whether a call with these arguments and so many rows is to be compared, which `size`
        shards divide. It counts as compared then."""
        news = (
            self._add_shapes(leaves),
            self._add_differences(leaves, rows, size),
            self._add_steps(leaves, size),
            self._add_smallest(rows // size),
        )
        return any(news)

    def _add_smallest(self, rows: int) -> bool:
        before, self.smallest = self.smallest, min(rows, self.smallest or rows)
        return 0 < rows < before

    def _add_shapes(self, leaves: Sequence[Any]) -> bool:
        shapes = shapes_of(leaves)
        if shapes in self.shapes or len(self.shapes) >= MAX_COMPARED:
            return False
        self.shapes.add(shapes)
        return True

    def _add_differences(self, leaves: Sequence[Any], rows: int, size: int) -> bool:
        before = self.differences
        self.differences |= size_differences(leaves, rows, size)
        return self.differences != before

    def _add_steps(self, leaves: Sequence[Any], size: int) -> bool:
        is_new = False
        for k, leaf in enumerate(leaves):
            for dim, length in enumerate(_shape(leaf)):
                place, bits = (k, dim), length.bit_length()
                before = self.steps.get(place, 0)
                step = math.gcd(before, _step(size, length))
                if step != before or bits > self.lengths.get(place, 0):
                    self.steps[place] = step
                    self.lengths[place] = max(bits, self.lengths.get(place, 0))
                    is_new = True
        return is_new


def _shape(leaf: Any) -> tuple[int, ...]:
    if isinstance(leaf, Tensor | np.ndarray):
        return tuple(leaf.shape)
    return (len(leaf),) if is_column(leaf) or is_entries(leaf) else ()


@lru_cache(maxsize=1024)
def _step(size: int, total: int) -> int:
    """Of what the starts of so many shards, and the end, are multiples."""
    return math.gcd(total, *(block.start for block in blocks_of(size, total)))
