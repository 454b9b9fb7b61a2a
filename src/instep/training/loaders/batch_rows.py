"""The rows of whole batches: how many there are, and a rank's."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import numpy as np
from torch import Tensor

from instep.process.torch_private.tensors import tree_flatten, tree_map
from instep.training.blocks import Block, is_record, tensor_leaves
from instep.training.errors import CannotShardError

T = TypeVar("T")
_Kind = Literal["tensors", "lists", "samples"]
"""What has the rows of a batch: the dimension 0 of all its tensors; the lists and tensors in it; or
the batch itself is a list of samples."""


@dataclass(frozen=True)
class _Rows:
    total: int
    lists: frozenset[int] = frozenset()
    """The ids of the lists and tuples that have a sample in each entry."""


class BatchRows:
    """Finds the rows of the batches of one loader, which are all of one kind."""

    def __init__(self, batch_size: int | None = None) -> None:
        """`batch_size`: how many rows a batch has, other than the last one, where that is known."""
        self._batch_size = batch_size
        self._kind: _Kind | None = None

    def count(self, batch: object) -> int:
        """How many samples it has. Raises CannotShardError where that is not to be seen."""
        return self._find(batch).total

    def slice(self, batch: T, block: Block) -> T:
        """A block's rows of every tensor, as views; and of every list, NumPy array and tuple of
        strings with an entry for each row."""
        lists = self._find(batch).lists

        def has_rows(node: Any) -> bool:
            if isinstance(node, np.ndarray):
                return node.ndim > 0 and len(node) == block.total
            if isinstance(node, Tensor) or id(node) in lists:
                return True
            is_column = type(node) is tuple and all(isinstance(entry, str) for entry in node)
            entries = (isinstance(node, list) or is_column) and len(node) == block.total
            return entries and not tensor_leaves(node)

        def local_rows(node: Any) -> Any:
            if isinstance(node, Tensor):
                return node[:1] if block.is_empty else node[block.start : block.stop]
            if has_rows(node):
                return block.slice(node)
            return _map_fields(node, cut) if is_record(node) else node

        def cut(value: Any) -> Any:
            return tree_map(local_rows, value, is_leaf=has_rows)

        local: T = cut(batch)
        return local

    def _find(self, batch: object) -> _Rows:
        found = _ways(batch)
        if self._kind in found:
            return found[self._kind]
        size = self._batch_size
        full = [kind for kind, rows in found.items() if rows.total == size]
        # Images may have more channels than there are of them; columns are in a tuple, as a rule.
        are_samples = full == ["samples"] and isinstance(batch, list)
        if "tensors" in found and found["tensors"].total >= (size or 0) and not are_samples:
            full = ["tensors"]
        if len(full) == 1:
            (self._kind,) = full
            return found[self._kind]
        if "tensors" in found:
            return found["tensors"]
        # A list of tensors of different lengths may be one of columns that do not fit.
        if len(found) != 1 or ("samples" in found and isinstance(_children(batch)[0], Tensor)):
            raise _no_rows(batch)
        return next(iter(found.values()))


def _ways(batch: object) -> dict[_Kind, _Rows]:
    """The ways to read a batch."""
    found: dict[_Kind, _Rows] = {}
    tensors = tensor_leaves(batch)
    if not tensors:
        return {"samples": _Rows(len(batch))} if isinstance(batch, list) else {}
    length = _one_of(tensor.shape[0] if tensor.dim() else None for tensor in tensors)
    if length is not None:
        found["tensors"] = _Rows(length)
    columns = [each for each in _children(batch) if tensor_leaves(each)]
    lists = [each for each in columns if _is_list_of_samples(each)]
    length = _one_of(_length(each) for each in columns)
    if lists and length is not None:
        found["lists"] = _Rows(length, frozenset(map(id, lists)))
    if _is_list_of_samples(batch):
        assert isinstance(batch, list | tuple)
        found["samples"] = _Rows(len(batch), frozenset([id(batch)]))
    return found


def _children(batch: Any) -> list[Any]:
    if is_record(batch):
        return [getattr(batch, field.name) for field in fields(batch)]
    children, _ = tree_flatten(batch, is_leaf=lambda node: node is not batch)
    return children


def _one_of(lengths: Iterable[int | None]) -> int | None:
    """The one length that they all have."""
    different = {*lengths}
    return different.pop() if len(different) == 1 else None


def _length(column: Any) -> int | None:
    if isinstance(column, Tensor):
        return column.shape[0] if column.dim() else None
    return len(column) if _is_list_of_samples(column) else None


def _is_list_of_samples(value: Any) -> bool:
    """Whether this is a list or tuple of things of one kind, with tensors in them."""
    if type(value) not in (list, tuple) or not value:
        return False
    kinds = {(type(each), *((t.dim(), t.dtype) for t in tensor_leaves(each))) for each in value}
    return len(kinds) == 1 and bool(tensor_leaves(value[0]))


def may_be_batches(samples: object) -> bool:
    """Whether these are batches of one size, but for a smaller last one, rather than samples: each
    is a tuple, list or dict of tensors with as many rows as each other."""
    if not isinstance(samples, list) or any(isinstance(each, Tensor) for each in samples):
        return False
    sizes = [_one_of(t.shape[0] if t.dim() else None for t in tensor_leaves(s)) for s in samples]
    *full, last = [size for size in sizes if size is not None] or [0]
    return len(full) + 1 == len(sizes) and len({*full}) == 1 and 0 < last < full[0]


def _map_fields(record: Any, function: Any) -> Any:
    new = copy.copy(record)
    for field in fields(record):
        object.__setattr__(new, field.name, function(getattr(record, field.name)))
    return new


def _no_rows(batch: object) -> CannotShardError:
    if isinstance(batch, int):
        return CannotShardError(
            f"a batch has rows; got {type(batch).__name__}. A sampler, which yields numbers, is "
            "divided by its loader: instep.shard(DataLoader(dataset, batch_size, sampler=sampler))."
        )
    tensors = tensor_leaves(batch)
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or type(batch).__name__
    return CannotShardError(
        f"a batch is tensors with the same number of rows (dimension 0); got {shapes}. In a tuple, "
        "list, dict or dataclass there may also be lists of tensors, one for each sample. Let "
        "collate_fn return such a batch, or use a map-style data set: each rank loads its own "
        "samples of that, and a batch may be anything."
    )
