"""Which rows of a call's inputs are this rank's. Pure: no process is needed to plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from instep.training.blocks import Block


@dataclass(frozen=True)
class Division:
    """How the leaves of a call's arguments are divided."""

    dims: tuple[int | None, ...]
    """Of each leaf the dimension of the batch; None for what every rank gets whole."""
    batch_dim: int
    """The dimension of the batch in the leaf that tells its size."""

    def block(self, leaves: Sequence[Any], rank: int, size: int) -> Block | None:
        """This rank's rows of these leaves; None where they are not a batch of this kind."""
        if len(leaves) != len(self.dims):
            return None
        sizes = set()
        for leaf, dim in zip(leaves, self.dims, strict=True):
            if dim is not None:
                if not isinstance(leaf, Tensor) or leaf.dim() <= dim:
                    return None
                sizes.add(leaf.shape[dim])
        if len(sizes) != 1:
            return None
        return Block(rank, size, sizes.pop())


def divisions(leaves: Sequence[Any], at_least: int) -> Iterator[Division]:
    """Ways to divide these arguments, likely ones first: the batch is dimension 0, else 1.

    `at_least`: the rows that a batch must have to be divided.
    """
    seen = set()
    for batch_dim in (0, 1):
        for total in _sizes(leaves, batch_dim):
            if total < at_least:
                continue
            dims = tuple(_dim_of(leaf, total, batch_dim) for leaf in leaves)
            if dims not in seen:
                seen.add(dims)
                yield Division(dims, batch_dim)


def _sizes(leaves: Sequence[Any], dim: int) -> list[int]:
    """The different sizes of tensors in this dimension."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > dim]
    return list(dict.fromkeys(tensor.shape[dim] for tensor in tensors))


def _dim_of(leaf: Any, total: int, batch_dim: int) -> int | None:
    if not isinstance(leaf, Tensor):
        return None
    for dim in (batch_dim, 1 - batch_dim):
        if leaf.dim() > dim and leaf.shape[dim] == total:
            return dim
    return None
