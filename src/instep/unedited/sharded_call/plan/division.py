"""How the rows of a call's arguments are divided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from instep.training.pytree import is_column


@dataclass(frozen=True)
class Division:
    """How the leaves of a call's arguments are divided."""

    dims: tuple[int | None, ...]
    """Of each leaf the dimension of the batch; None for what every rank gets whole."""
    batch_dim: int
    """The dimension of the batch in the leaf from which its size is taken."""

    def count_rows(self, leaves: Sequence[Any]) -> int | None:
        """The rows of these leaves; None if they do not divide like this."""
        if len(leaves) != len(self.dims):
            return None
        sizes = {
            _size(leaf, dim) for leaf, dim in zip(leaves, self.dims, strict=True) if dim is not None
        }
        return sizes.pop() if len(sizes) == 1 else None

    def has_different_rows(self, leaves: Sequence[Any]) -> bool:
        """Whether any of the tensors that it divides has. Equal ones, as of a first call with
        zeros, do not tell what a row gets from other rows."""
        pairs = zip(leaves, self.dims, strict=True)
        return any(dim is not None and not _has_equal_rows(leaf, dim) for leaf, dim in pairs)


def candidate_divisions(leaves: Sequence[Any], at_least: int) -> Iterator[Division]:
    """Divisions of these arguments, likely ones first: the batch is dimension 0, else 1.

    A list of strings with one entry per row is always divided; a list of numbers may be something
    else, such as a size, and a square matrix may be a mask between positions. `at_least`: the rows
    that a batch must have to be divided.
    """
    seen = set()
    for batch_dim in (0, 1):
        for total in _sizes(leaves, batch_dim):
            if total < at_least:
                continue
            dims = tuple(_dim_of(leaf, total, batch_dim) for leaf in leaves)
            without_numbers = tuple(
                None if is_column(leaf) and not has_text(leaf) else dim
                for leaf, dim in zip(leaves, dims, strict=True)
            )
            without_squares = tuple(
                None if _is_square(leaf) else dim for leaf, dim in zip(leaves, dims, strict=True)
            )
            for candidate in (dims, without_numbers, without_squares):
                is_divided = any(dim is not None for dim in candidate)
                if is_divided and candidate not in seen and not _replicates_text(leaves, candidate):
                    seen.add(candidate)
                    yield Division(candidate, batch_dim)


def max_rows(leaves: Sequence[Any]) -> int:
    """How many rows there are, if the batch is dimension 0."""
    return max((x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim()), default=0)


def count_elements(leaves: Sequence[Any]) -> int:
    """How many elements the tensors among these have."""
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def has_text(leaf: Any) -> bool:
    """Whether this is a string, or a list with one in it."""
    if isinstance(leaf, dict):
        return any(map(has_text, leaf.values()))
    return isinstance(leaf, str | bytes) or (
        isinstance(leaf, list | tuple) and any(map(has_text, leaf))
    )


def _replicates_text(leaves: Sequence[Any], dims: Sequence[int | None]) -> bool:
    """Whether strings of which there is one per row go to every rank whole: then each batch's
    would have to be compared."""
    rows = max_rows(leaves)
    return any(
        dim is None and is_column(leaf) and len(leaf) == rows and has_text(leaf)
        for leaf, dim in zip(leaves, dims, strict=True)
    )


def _sizes(leaves: Sequence[Any], dim: int) -> list[int]:
    """The different sizes of tensors in this dimension."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > dim]
    return list(dict.fromkeys(tensor.shape[dim] for tensor in tensors))


def _has_equal_rows(leaf: Any, dim: int) -> bool:
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return False
    return torch.equal(leaf, leaf.narrow(dim, 0, 1).expand_as(leaf))


def _is_square(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.shape[0] == leaf.shape[1]


def _size(leaf: Any, dim: int) -> int | None:
    if isinstance(leaf, Tensor):
        return leaf.shape[dim] if leaf.dim() > dim else None
    return len(leaf) if is_column(leaf) else None


def _dim_of(leaf: Any, total: int, batch_dim: int) -> int | None:
    if is_column(leaf):
        return 0 if len(leaf) == total else None
    if not isinstance(leaf, Tensor):
        return None
    for dim in (batch_dim, 1 - batch_dim):
        if leaf.dim() > dim and leaf.shape[dim] == total:
            return dim
    return None
