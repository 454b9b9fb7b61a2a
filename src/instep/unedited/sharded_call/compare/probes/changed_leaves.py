"""A call's arguments with other values in their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.training.pytree import flatten, is_column, unflatten
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.division import is_entries

_OF_SECOND_HALF = 0.75
"""By which floats of the second half of the rows are multiplied beside that."""

Kept = Callable[[Sequence[int], int, torch.Generator], Tensor]
"""Where a tensor of this shape, whose rows are in this dimension, keeps its elements."""


def with_other_values(
    call: BoundCall, dims: Sequence[int | None], factors: Sequence[float], seed: int
) -> BoundCall:
    """The call with other values in the rows of its arguments."""
    generator = torch.Generator().manual_seed(seed)
    of_rows = [factor * (8 - seed) / 8 for factor in factors]
    pairs = zip(call.leaves, dims, strict=True)
    return call.with_leaves([_changed(leaf, dim, of_rows, generator) for leaf, dim in pairs])


def _changed(
    leaf: Any, dim: int | None, factors: Sequence[float], generator: torch.Generator
) -> Any:
    """This argument with other values in its rows; without rows in `dim` as it is."""
    if is_entries(leaf):
        return mapped(leaf, lambda x, k: _times(x, factors[k % len(factors)]))
    if isinstance(leaf, np.ndarray):
        return mapped(leaf, lambda x, _: _changed(x, dim, factors, generator))
    if dim is None or not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return leaf
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return zeroed(leaf, dim, keep_beginnings, generator) if leaf.dim() > 1 else leaf
    shape = [1] * leaf.dim()
    shape[dim] = -1
    rows = leaf.shape[dim]
    of_rows = torch.tensor(list(islice(cycle(factors), rows)), device="cpu")
    of_rows[rows // 2 :] *= _OF_SECOND_HALF
    changed = leaf.detach() * of_rows.view(shape).to(leaf)
    return changed.where(_one_of_each_row(leaf, dim, generator), torch.zeros_like(leaf))


def _one_of_each_row(leaf: Tensor, dim: int, generator: torch.Generator) -> Tensor:
    """False for one element of each row that has several."""
    rows, size = leaf.shape[dim], leaf.numel() // max(1, leaf.shape[dim])
    kept = torch.ones(rows, size, dtype=torch.bool, device="cpu")
    if size > 1:
        places = torch.randint(size, (rows, 1), generator=generator, device="cpu")
        kept.scatter_(1, places, value=False)
    others = [length for k, length in enumerate(leaf.shape) if k != dim]
    return kept.view(rows, *others).movedim(0, dim).to(leaf.device)


def with_large_ends(
    call: BoundCall, dims: Sequence[int | None], seed: int, *, factor: float
) -> BoundCall:
    """The call with its first and its last row times a factor."""

    def changed(leaf: Any, dim: int | None) -> Any:
        if dim is None:
            return leaf
        if is_entries(leaf):
            ends = (0, len(leaf) - 1)
            return mapped(leaf, lambda x, k: _times(x, of_ends) if k in ends else x)
        if isinstance(leaf, np.ndarray):
            return mapped(leaf, lambda x, _: changed(x, dim))
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return leaf
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        other = leaf.detach().clone()
        for row in (0, -1):
            other.select(dim, row).mul_(of_ends)
        return other

    of_ends = factor * (8 - seed) / 8
    pairs = zip(call.leaves, dims, strict=True)
    return call.with_leaves([changed(leaf, dim) for leaf, dim in pairs])


def with_other_numbers(
    call: BoundCall, dims: Sequence[int | None], seed: int, *, factor: float
) -> BoundCall:
    """The call with other numbers than those that it gets beside rows; of zeros, with the factor
    itself."""
    by = factor * (8 - seed) / 8

    def changed(leaf: Any, dim: int | None) -> Any:
        if isinstance(leaf, bool | np.bool_) or dim is not None:
            return leaf
        if isinstance(leaf, int | np.integer):
            return type(leaf)(leaf * int(by) or int(by)) if abs(by) >= 1 else leaf
        if isinstance(leaf, float | np.floating):
            return type(leaf)(leaf * by or by)
        if is_column(leaf):
            return type(leaf)(changed(each, None) for each in leaf)
        if isinstance(leaf, np.ndarray):
            return mapped(leaf, lambda x, _: changed(x, None))
        if not isinstance(leaf, Tensor) or leaf.requires_grad or not leaf.is_floating_point():
            return leaf
        if type(leaf) is not Tensor or leaf.layout is not torch.strided:
            return leaf
        return (leaf * by).masked_fill(leaf == 0, by)

    pairs = zip(call.leaves, dims, strict=True)
    return call.with_leaves([changed(leaf, dim) for leaf, dim in pairs])


def with_one_label(call: BoundCall, dims: Sequence[int | None], row: int) -> BoundCall:
    """The call with the whole number of this row in all rows, where rows have one each."""
    pairs = zip(call.leaves, dims, strict=True)
    return call.with_leaves([_labelled(leaf, dim, row) for leaf, dim in pairs])


def _labelled(leaf: Any, dim: int | None, row: int) -> Any:
    if dim is None:
        return leaf
    if is_entries(leaf):
        return type(leaf)([leaf[row]] * len(leaf)) if _is_label(leaf[row]) else leaf
    if is_column(leaf):
        return type(leaf)([leaf[row]] * len(leaf)) if type(leaf[row]) is int else leaf
    if isinstance(leaf, np.ndarray):
        return mapped(leaf, lambda x, _: _labelled(x, dim, row))
    is_vector = isinstance(leaf, Tensor) and leaf.dim() == 1 and leaf.layout is torch.strided
    return leaf[row].expand_as(leaf).clone() if is_vector and _is_label(leaf[row]) else leaf


def with_all_labels(call: BoundCall, dims: Sequence[int | None], first: int) -> BoundCall:
    """The call with each label up to the largest, and 0 or 1 where all are zero, in a row of each
    half of the batch."""
    pairs = zip(call.leaves, dims, strict=True)
    return call.with_leaves([_relabelled(leaf, dim, first) for leaf, dim in pairs])


def with_large_labels(call: BoundCall, dims: Sequence[int | None], first: int) -> BoundCall:
    """As `with_all_labels`, with labels up to about twice the largest."""
    pairs = zip(call.leaves, dims, strict=True)
    return call.with_leaves([_relabelled(leaf, dim, first, times=2) for leaf, dim in pairs])


def with_small_labels(call: BoundCall, dims: Sequence[int | None], first: int) -> BoundCall:
    """As `with_all_labels`, without the largest label in the second half of the batch."""
    pairs = zip(call.leaves, dims, strict=True)
    leaves = [_relabelled(leaf, dim, first, is_smaller=True) for leaf, dim in pairs]
    return call.with_leaves(leaves)


def _relabelled(
    leaf: Any, dim: int | None, first: int, *, is_smaller: bool = False, times: int = 1
) -> Any:
    if isinstance(leaf, np.ndarray):
        change = partial(_relabelled, is_smaller=is_smaller, times=times)
        return mapped(leaf, lambda x, _: change(x, dim, first))
    if dim is None or not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return leaf
    if leaf.is_complex() or leaf.requires_grad:
        return leaf
    has_values = bool(leaf.any())
    if dim != 0 or leaf.numel() != len(leaf):
        return leaf if has_values or is_smaller else _with_ones(leaf, first)
    if leaf.is_floating_point() and has_values:
        return leaf
    half, count = max(1, len(leaf) // 2), times * max(2, int(leaf.max()) + 1)
    numbers = (torch.arange(len(leaf), device="cpu") + first) % half * count // half
    if is_smaller:
        if count < 3:  # or no label would be in both halves
            return leaf
        numbers[half:] = numbers[half:].clamp(max=count - 2)
        numbers[first] = count - 1
    return numbers.view(leaf.shape).to(leaf)


def _with_ones(leaf: Tensor, seed: int) -> Tensor:
    """These zeros with ones in place of about half of them."""
    generator = torch.Generator().manual_seed(seed)
    return keep_half(leaf.shape, 0, generator).to(leaf)


def with_nan(call: BoundCall, dims: Sequence[int | None], place: int) -> BoundCall:
    """The call with NaN in the first and the last row of floats that have several in a row."""

    def changed(leaf: Any, dim: int | None) -> Any:
        if isinstance(leaf, np.ndarray):
            return mapped(leaf, lambda x, _: changed(x, dim))
        if dim is None or not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return leaf
        if not leaf.is_floating_point() or leaf.numel() < 2 * leaf.shape[dim]:
            return leaf
        other = leaf.detach().movedim(dim, 0).clone(memory_format=torch.contiguous_format)
        rows = other.view(len(other), -1)
        rows[0, place] = rows[-1, -1 - place] = torch.nan
        return other.movedim(0, dim)

    pairs = zip(call.leaves, dims, strict=True)
    return call.with_leaves([changed(leaf, dim) for leaf, dim in pairs])


def _is_label(value: Any) -> bool:
    is_number = isinstance(value, Tensor) and not (value.dim() or value.requires_grad)
    return is_number and not (value.is_floating_point() or value.is_complex())


def _times(x: Tensor, factor: float) -> Tensor:
    return x.detach() * factor if x.is_floating_point() else x


def mapped(leaf: Any, function: Callable[[Tensor, int], Tensor]) -> Any:
    """This array, or this list with one entry for each row, with `function` applied to each tensor
    and array, and the number of its entry."""

    def of_value(value: Any, number: int) -> Any:
        if isinstance(value, Tensor):
            return function(value, number)
        if isinstance(value, np.ndarray):
            with suppress(TypeError):  # of a dtype that torch has not
                return function(torch.tensor(value, device="cpu"), number).numpy()
        return value

    if not is_entries(leaf):
        return of_value(leaf, 0)
    entries = [flatten(entry) for entry in leaf]
    return type(leaf)(
        unflatten([of_value(x, number) for x in leaves], structure)
        for number, (leaves, structure) in enumerate(entries)
    )


def zeroed(
    leaf: Any,
    dim: int | None,
    kept: Kept,
    generator: torch.Generator,
    *,
    only_integers: bool = False,
) -> Any:
    """This argument with zeros where `kept` says so; without rows in `dim` as it is."""
    if dim is not None and is_entries(leaf):

        def zeroed_entry(x: Tensor, number: int) -> Tensor:
            return zeroed(x[None], 0, kept, generator, only_integers=only_integers)[0]  # type: ignore[no-any-return]

        return mapped(leaf, zeroed_entry)
    if isinstance(leaf, np.ndarray):
        return mapped(
            leaf, lambda x, _: zeroed(x, dim, kept, generator, only_integers=only_integers)
        )
    if dim is None or not isinstance(leaf, Tensor) or leaf.requires_grad:
        return leaf
    if leaf.layout is not torch.strided or (only_integers and leaf.is_floating_point()):
        return leaf
    mask = kept(leaf.shape, dim, generator).to(leaf.device)
    return leaf.where(mask, torch.zeros_like(leaf))


def keep_half(shape: Sequence[int], dim: int, generator: torch.Generator) -> Tensor:
    """True for about half of the elements."""
    return torch.rand(shape, generator=generator, device="cpu") < 0.5


def keep_beginnings(shape: Sequence[int], dim: int, generator: torch.Generator) -> Tensor:
    """True for at least one element from the beginning of each row of the batch dimension `dim`."""
    others = [k for k in range(len(shape)) if k != dim]
    if not others:
        return torch.tensor(True, device="cpu")
    length, along = shape[others[0]], others[0]
    lengths = torch.randint(1, length + 1, (shape[dim],), generator=generator, device="cpu")
    of_rows, of_elements = [1] * len(shape), [1] * len(shape)
    of_rows[dim], of_elements[along] = -1, -1
    return torch.arange(length, device="cpu").view(of_elements) < lengths.view(of_rows)
