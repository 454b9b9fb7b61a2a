"""How the rows of a call's arguments are divided.

Rows are those of tensors and numpy arrays, and the entries of lists: of plain values (`is_column`),
or, in a call that is read so (`BoundCall.by_entries`), of anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.training.blocks import Block, blocks_of
from instep.training.pytree import is_column, is_value, leaves_of


@dataclass(frozen=True)
class Division:
    """How the leaves of a call's arguments are divided."""

    dims: tuple[int | None, ...]
    """Of each leaf the dimension of the batch; None for what every rank gets whole."""
    batch_dim: int
    """The dimension of the batch in the leaf from which its size is taken."""
    offsets: int | None = None
    """Which leaf says where each row begins in those of `flat`, as for nn.EmbeddingBag."""
    flat: tuple[int, ...] = ()
    """The leaves with the rows one after the other, of any lengths."""

    def count_rows(self, leaves: Sequence[Any]) -> int | None:
        """The rows of these leaves; None if they do not divide like this."""
        if len(leaves) != len(self.dims):
            return None
        sizes: set[int | None] = set()
        for leaf, dim in zip(leaves, self.dims, strict=True):
            if dim is not None:
                sizes.add(_size(leaf, dim))
        return sizes.pop() if len(sizes) == 1 else None

    def has_different_rows(self, leaves: Sequence[Any]) -> bool:
        """Whether any of the tensors that it divides has. Equal ones, as of a first call with
        zeros, do not tell what a row gets from other rows."""
        pairs = zip(leaves, self.dims, strict=True)
        return any(dim is not None and not _has_equal_rows(leaf, dim) for leaf, dim in pairs)

    def slices(self, leaves: Sequence[Any], blocks: Sequence[Block]) -> dict[int, list[Tensor]]:
        """What each of these blocks has of each leaf that is cut by offsets, by the leaf's number;
        of the offsets, too, which begin at the block."""
        if self.offsets is None:
            return {}
        offsets = leaves[self.offsets]
        starts = offsets.tolist()
        found = {self.offsets: [offsets[b.start : b.stop] - starts[b.start] for b in blocks]}
        for place in self.flat:
            ends = [*starts, len(leaves[place])]
            found[place] = [leaves[place][starts[b.start] : ends[b.stop]] for b in blocks]
        return found


def candidate_divisions(leaves: Sequence[Any], at_least: int) -> Iterator[Division]:
    """Divisions of these arguments, likely ones first: the batch is dimension 0, else 1.

    A list of strings with one entry per row is always divided; a list of numbers may be something
    else, such as a size, and a square matrix may be a mask between positions. `at_least`: the rows
    that a batch must have to be divided.
    """
    yield from _divisions_by_offsets(leaves, at_least)
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


def _divisions_by_offsets(leaves: Sequence[Any], at_least: int) -> Iterator[Division]:
    for place, offsets in enumerate(leaves):
        if not _may_be_offsets(offsets) or len(offsets) < at_least:
            continue
        total, end = len(offsets), int(offsets[-1])
        lengths = [len(leaf) if _is_flat(leaf) else 0 for leaf in leaves]
        for length in dict.fromkeys(each for each in lengths if each > total and each >= end):
            flat = tuple(k for k, each in enumerate(lengths) if each == length)
            dims = tuple(None if k in flat else _dim_of(x, total, 0) for k, x in enumerate(leaves))
            yield Division(dims, 0, place, flat)


def _may_be_offsets(leaf: Any) -> bool:
    return (
        _is_flat(leaf)
        and not (leaf.is_floating_point() or leaf.is_complex())
        and leaf.dtype != torch.bool
        and len(leaf) > 1
        and int(leaf[0]) == 0
        and bool((leaf[1:] >= leaf[:-1]).all())
    )


def _is_flat(leaf: Any) -> bool:
    is_vector = isinstance(leaf, Tensor) and leaf.dim() == 1 and leaf.layout is torch.strided
    return is_vector and not (leaf.requires_grad or leaf.is_meta)


def is_list_of(value: Any, count: int | None) -> bool:
    """Whether this is a list or tuple with so many entries, of one type, that are no plain
    values."""
    return (
        type(value) in (list, tuple)
        and len(value) == count
        and not is_column(value)
        and len({type(entry) for entry in value if entry is not None}) == 1
    )


def is_entries(leaf: Any) -> bool:
    """Whether this leaf is a list or tuple that has one entry for each sample."""
    return type(leaf) in (list, tuple) and not is_column(leaf)


def has_other_lengths(leaf: Any) -> bool:
    """Whether these entries differ in how many rows they have themselves: they are no batches."""
    return is_entries(leaf) and len({shape[:1] for shape in shapes_of([leaf])}) > 1


def values_in(leaf: Any) -> list[Any]:
    """This leaf alone, or what is in its entries."""
    return leaves_of(leaf) if is_entries(leaf) else [leaf]


def tensors_in(leaf: Any) -> list[Tensor]:
    """The tensors that are this leaf, or in its entries."""
    if isinstance(leaf, Tensor):
        return [leaf]
    return [each for each in values_in(leaf) if isinstance(each, Tensor)]


def shapes_of(leaves: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors and arrays among these, and in their entries."""
    shapes: list[tuple[int, ...]] = []
    for each in chain.from_iterable(map(values_in, leaves)):
        if isinstance(each, Tensor | np.ndarray):
            shapes.append(tuple(each.shape))
    return tuple(shapes)


def max_rows(leaves: Sequence[Any]) -> int:
    """How many rows there are, if the batch is dimension 0; of plain lists if there is nothing
    else."""
    return max(_sizes(leaves, 0), default=0)


def count_elements(leaves: Sequence[Any]) -> int:
    """How many elements the tensors and arrays among these have, and plain lists entries."""
    return sum(map(_count, leaves))


def has_text(leaf: Any) -> bool:
    """Whether this is a string, or a list with one in it."""
    if isinstance(leaf, dict):
        return any(map(has_text, leaf.values()))
    return isinstance(leaf, str | bytes) or (
        isinstance(leaf, list | tuple) and any(map(has_text, leaf))
    )


def size_differences(
    leaves: Sequence[Any], rows: int, size: int
) -> frozenset[tuple[int, int, str]]:
    """Where the shards of this batch, of so many rows, differ in the sizes of their entries, of
    `size` shards.

    A module that pads to the longest entry, or divides by the sum of their lengths, gives other
    results for a part of such a batch only: where the shards are alike, that cannot be seen.
    """
    found = set()
    for k, leaf in enumerate(leaves):
        is_list = is_entries(leaf) or (is_column(leaf) and has_rows(leaf))
        if not is_list or len(leaf) != rows or rows < size:
            continue
        by_entry = [_sizes_in(entry) for entry in leaf]
        if len({len(sizes) for sizes in by_entry}) > 1:
            found.add((k, -1, "count"))
            continue
        blocks = blocks_of(size, rows)
        for place, sizes in enumerate(zip(*by_entry, strict=True)):
            shards = [sizes[block.start : block.stop] for block in blocks]
            longest = {tuple(map(max, zip(*of_shard, strict=False))) for of_shard in shards}
            if len(longest) > 1:
                found.add((k, place, "longest"))
            of_row = {sum(map(math.prod, each)) / len(each) for each in shards}
            if len(of_row) > 1:
                found.add((k, place, "sum"))
    return frozenset(found)


def _sizes_in(entry: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors and arrays in an entry, and the lengths of strings and lists."""
    sizes = []
    for each in leaves_of(entry):
        if isinstance(each, Tensor | np.ndarray):
            sizes.append(tuple(each.shape))
        elif isinstance(each, str | bytes) or is_column(each):
            sizes.append((len(each),))
    return sizes


def _replicates_text(leaves: Sequence[Any], dims: Sequence[int | None]) -> bool:
    """Whether strings of which there is one per row go to every rank whole: then each batch's
    would have to be compared."""
    rows = max_rows(leaves)
    return any(
        dim is None and is_column(leaf) and len(leaf) == rows and has_text(leaf)
        for leaf, dim in zip(leaves, dims, strict=True)
    )


def _sizes(leaves: Sequence[Any], dim: int) -> list[int]:
    """The different numbers of rows that the batch may have, if they are in this dimension."""
    lists = [len(leaf) for leaf in leaves if is_entries(leaf)]
    if lists:
        return list(dict.fromkeys(lists)) if dim == 0 else []
    arrays = [
        leaf
        for leaf in leaves
        if isinstance(leaf, Tensor | np.ndarray) and not has_layout_without_rows(leaf)
    ]
    sizes = [array.shape[dim] for array in arrays if array.ndim > dim]
    if not arrays and dim == 0:
        sizes = [len(leaf) for leaf in leaves if has_rows(leaf)]
    return list(dict.fromkeys(sizes))


def has_rows(leaf: Any) -> bool:
    """Whether a batch may consist of this alone: a list of numbers is no batch."""
    if isinstance(leaf, Tensor | np.ndarray):
        return leaf.ndim > 0
    return is_column(leaf) and (has_text(leaf) or not all(map(is_value, leaf)))


def has_layout_without_rows(leaf: Any) -> bool:
    """Whether this is a tensor of a layout of which no rows can be taken."""
    return isinstance(leaf, Tensor) and leaf.layout not in (torch.strided, torch.sparse_coo)


def _has_equal_rows(leaf: Any, dim: int) -> bool:
    if isinstance(leaf, np.ndarray):
        return not leaf.dtype.hasobject and bool(np.all(leaf == leaf.take([0], dim)))
    if is_entries(leaf):
        first, *others = ([x for x in leaves_of(entry) if isinstance(x, Tensor)] for entry in leaf)
        return bool(first) and all(
            len(own) == len(first) and all(map(torch.equal, own, first)) for own in others
        )
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return False
    return torch.equal(leaf, leaf.narrow(dim, 0, 1).expand_as(leaf))


def _is_square(leaf: Any) -> bool:
    is_matrix = isinstance(leaf, Tensor | np.ndarray) and leaf.ndim == 2
    return is_matrix and leaf.shape[0] == leaf.shape[1]


def _size(leaf: Any, dim: int) -> int | None:
    if isinstance(leaf, Tensor | np.ndarray):
        return leaf.shape[dim] if leaf.ndim > dim else None
    return len(leaf) if is_column(leaf) or is_entries(leaf) else None


def _count(leaf: Any) -> int:
    if isinstance(leaf, Tensor):
        return leaf.numel()
    if is_entries(leaf):
        return sum(map(_count, leaves_of(leaf)))
    if isinstance(leaf, np.ndarray):
        return leaf.size
    return len(leaf) if is_column(leaf) else 0


def _dim_of(leaf: Any, total: int, batch_dim: int) -> int | None:
    if is_column(leaf) or is_entries(leaf):
        return 0 if len(leaf) == total else None
    if not isinstance(leaf, Tensor | np.ndarray) or has_layout_without_rows(leaf):
        return None
    for dim in (batch_dim, 1 - batch_dim):
        if leaf.ndim > dim and leaf.shape[dim] == total:
            return dim
    return None
