"""Operations of a forward that go over the rows: inside of torch's own functions, and for each two
rows.

Such an operation is known by the shapes of what it is given and returns, which are other ones for a
part of the batch: the dimension of the rows is gone, or there are two of them, as in `h @ h.T`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.process.torch_private.tensors import tree_leaves, tree_map_only
from instep.unedited.sharded_call.compare.probes.recorded_operations import (
    OperationPlace,
    OperationRecorder,
    RecordedOperation,
)
from instep.unedited.sharded_call.compare.probes.row_reads import RowReads
from instep.unedited.sharded_call.compare.probes.row_wide_values import (
    KnownTensors,
    RowWideValues,
)
from instep.unedited.sharded_call.compare.rounding import LEAST_ERROR, finite_error
from instep.unedited.sharded_call.plan.control_flow import noted_reads
from instep.unedited.sharded_call.shards.reductions import Place as ReductionPlace
from instep.unedited.sharded_call.shards.reductions import ReductionCall

_SUMS = frozenset(
    f"aten::{name}" for name in ("sum", "mean", "dot", "vdot", "mv", "addmv", "mm", "addmm", "bmm")
)
"""Those that add up over rows what is linear in each."""
_ALONG = frozenset(
    f"aten::{name}"
    for name in (
        *("_softmax", "_log_softmax", "_logcumsumexp", "cumsum", "cumprod", "sort", "topk"),
        *("_safe_softmax", "kthvalue", "flip", "roll"),
    )
)
"""Operations along a dimension, which they keep; it is the next argument after the tensor."""
_MOVING = frozenset(
    f"aten::{name}"
    for name in (
        *("cat", "stack", "index", "index_select", "gather", "take", "masked_select", "nonzero"),
        *("index_put", "scatter", "slice_scatter", "select_scatter", "constant_pad_nd", "repeat"),
        *("_pack_padded_sequence", "_pad_packed_sequence", "embedding", "where", "masked_fill"),
        *("_unsafe_view", "view_copy", "clone", "empty_like", "new_empty"),
    )
)
"""Operations that choose elements, give them another shape, or make room. How many may depend on
what is in the rows, and may be as many in a part of the batch."""


_ONE_ROW = frozenset(f"aten::{name}" for name in ("select", "slice"))
"""Views that may be of a few rows, as many of a part of the batch."""


class _Call(NamedTuple):
    """A call of an operation."""

    given: list[torch.Size]
    """The shapes of the tensors that it is given."""
    returned: list[torch.Size]
    dim: Any
    """The argument after the first."""

    @classmethod
    def of(cls, args: Any, result: Any) -> _Call:
        """The call with these arguments and this result."""
        return cls(_shapes(args), _shapes(result), args[1] if len(args) > 1 else None)

    def dim_argument(self) -> int | None:
        """The dimension along which it goes, if there is one."""
        dims = self.dim if isinstance(self.dim, list | tuple) else [self.dim]
        own = len(self.given[0])
        return dims[0] % own if len(dims) == 1 and isinstance(dims[0], int) and own else None


def _shapes(values: Any) -> list[torch.Size]:
    return [each.shape for each in tree_leaves(values) if isinstance(each, Tensor)]


class OperationKind(Enum):
    """How an operation goes over the rows."""

    SUM = auto()
    """A sum or a mean over them, or of products with them."""
    REDUCTION = auto()
    """Another one over them, or along them."""
    PAIRS = auto()
    """It computes something for each two of them."""
    WHOLE_NUMBERS = auto()
    """It gives whole numbers over them: what is compared with these, or computed in floats, is
    another."""


class RowOperations:
    """The operations of a forward that go over rows, found by the shapes in the whole forward and
    in that of a part of the batch.

    Those that the script calls as reductions over the first dimension are left out, and so are
    those of instep's own functions, which go over the rows of all ranks.
    """

    def __init__(self) -> None:
        self._whole: dict[OperationPlace, list[_Call]] = {}
        self._part: dict[OperationPlace, list[_Call]] = {}
        self._lengths: dict[ReductionPlace, set[int]] = {}
        """Over how many rows the script's own reductions go in the whole forward."""
        self._mixing: set[tuple[OperationPlace, int]] = set()
        """The operations that keep the rows, and of which a row depends on others."""
        self.reads = RowReads()
        """Where the forward reads from its rows."""
        self._values = RowWideValues(self.reads)
        """What a part's forward computes from such operations."""
        self._has_whole_numbers = False
        self.are_known = False
        """Whether both forwards have come to their ends."""

    @contextmanager
    def noted(self, *, of_whole: bool) -> Iterator[None]:
        """Inside, the operations of a forward are noted."""
        found = self._whole if of_whole else self._part
        found.clear()
        self.are_known = False
        self.reads.begin(of_whole=of_whole)
        if of_whole:
            self._lengths.clear()
        else:
            self._mixing.clear()
            self._has_whole_numbers = False
            self._values = RowWideValues(self.reads)

        def note(seen: RecordedOperation) -> Any:
            name, *_ = seen.place
            if not of_whole:
                self._values.note_operation(seen)
            if not seen.is_in_place and (not seen.is_view or name in _ONE_ROW):
                calls = found.setdefault(seen.place, [])
                calls.append(_Call.of(seen.args, seen.result))
                if not of_whole:
                    self._note_kind(seen, len(calls) - 1)
            return seen.result

        def note_reduction(call: ReductionCall, result: Any) -> None:
            lengths = self._lengths.setdefault(call.place, set())
            if of_whole:
                lengths.add(len(call.tensor))
            elif lengths and len(call.tensor) not in lengths:
                self._values.add(result)
                self._has_whole_numbers |= _has_whole_numbers(result)

        sizes = nullcontext() if of_whole else self._values.reading_sizes()
        note_row_read = partial(self.reads.note, of_whole=of_whole)
        with OperationRecorder(note, note_reduction).enabled(), sizes, noted_reads(note_row_read):
            yield
        self.are_known = not of_whole
        self.reads.end(lambda place: len(self._whole.get(place, ())) != len(self._part[place]))

    def _note_kind(self, seen: RecordedOperation, k: int) -> None:
        """Note what follows from an operation of a part's forward, the k-th at its place."""
        wholes = self._whole.get(seen.place, [])
        if k >= len(wholes):
            return
        part = self._part[seen.place][k]
        given = _row_dims(wholes[k].given, part.given)
        returned = _row_dims(wholes[k].returned, part.returned)
        name, *_ = seen.place
        if not any(given):
            return
        if seen.is_view:
            if name in _ONE_ROW and not any(returned):
                self._values.note_row(seen)
                self._has_whole_numbers |= _has_whole_numbers(seen.result)
            return
        self._values.note_choice(seen)
        if not (name in _MOVING or any(returned)):
            self._values.add(seen.result)
            self._has_whole_numbers |= _has_whole_numbers(seen.result)
            if isinstance(seen.result, bool):  # of `torch.equal`
                self._values.note_read(seen.frame)
        elif (
            name not in _MOVING
            and len(_row_lengths(part.given, given) | _row_lengths(part.returned, returned)) == 1
            and max(map(len, given)) == max(map(len, returned)) == 1
            and _mixes_rows(seen, given, returned)
        ):
            self._mixing.add((seen.place, k))

    def kinds(self) -> set[OperationKind]:
        """The kinds of which there are any."""
        calls = ((place, k) for place, calls in self._part.items() for k in range(len(calls)))
        found = {kind for place, k in calls if (kind := self._kind(place, k)[0]) is not None}
        return found | ({OperationKind.WHOLE_NUMBERS} if self._has_whole_numbers else set())

    @contextmanager
    def scaled(self, kind: OperationKind, factor: float, rows: int) -> Iterator[None]:
        """Inside, in the forward of a part with so many rows, what operations of this kind return
        is multiplied, and truth values are the other way round: for two rows, not for one."""
        counts: Counter[OperationPlace] = Counter()
        if kind is OperationKind.WHOLE_NUMBERS:
            with self._of_other_numbers(factor):
                yield
            return

        def scale(seen: RecordedOperation) -> Any:
            place = seen.place
            if seen.is_in_place or (seen.is_view and place[0] not in _ONE_ROW):
                return seen.result
            own, dims = self._kind(place, counts[place])
            counts[place] += 1
            if own is not kind:
                return seen.result
            return tree_map_only(Tensor, lambda x: _scaled(x, factor, dims, rows), seen.result)

        with OperationRecorder(scale).enabled():
            yield

    @contextmanager
    def _of_other_numbers(self, factor: float) -> Iterator[None]:
        """Inside, what is computed from whole numbers over the rows is another: floats are
        multiplied, a truth value is the other one, and of several all are true."""
        counts: Counter[OperationPlace] = Counter()
        numbers = KnownTensors()

        def follow(seen: RecordedOperation) -> Any:
            place = seen.place
            if seen.is_in_place or (seen.is_view and place[0] not in _ONE_ROW):
                return seen.result
            kind, _ = self._kind(place, counts[place])
            counts[place] += 1
            if kind in (OperationKind.SUM, OperationKind.REDUCTION):
                if _has_whole_numbers(seen.result):
                    numbers.add(seen.result)
            elif place[0] not in _MOVING and numbers.have((seen.args, seen.kwargs)):
                if _has_whole_numbers(seen.result):
                    numbers.add(seen.result)
                elif factor != 1:
                    return tree_map_only(Tensor, lambda x: _other(x, factor), seen.result)
            return seen.result

        def follow_reduction(call: ReductionCall, result: Any) -> None:
            lengths = self._lengths.get(call.place)
            if lengths and len(call.tensor) not in lengths and _has_whole_numbers(result):
                numbers.add(result)

        with OperationRecorder(follow, follow_reduction).enabled():
            yield

    def _kind(self, place: OperationPlace, k: int) -> tuple[OperationKind | None, list[int]]:
        """The kind of the k-th operation at this place, and the dimensions of two rows of what it
        returns for each two of them."""
        wholes, parts = self._whole.get(place, []), self._part.get(place, [])
        if len(wholes) != len(parts) or k >= len(parts):  # which is which is not known
            return None, []
        part = parts[k]
        given = _row_dims(wholes[k].given, part.given)
        returned = _row_dims(wholes[k].returned, part.returned)
        if not any(given):
            return None, []
        pairs = next((dims for dims in returned if len(dims) > 1), [])
        if pairs and max(map(len, given)) == 1:
            return OperationKind.PAIRS, pairs
        name, *_ = place
        is_along = name in _ALONG and part.dim_argument() in given[0]
        is_along |= (place, k) in self._mixing
        if is_along or not (name in _MOVING or any(returned)):
            return OperationKind.SUM if name in _SUMS else OperationKind.REDUCTION, []
        return None, []


def _mixes_rows(seen: RecordedOperation, given: list[list[int]], returned: list[list[int]]) -> bool:
    """Whether one half of the rows that an operation returns is another if the other half of those
    that it is given is."""
    if torch.Tag.nondeterministic_seeded in seen.func.tags:
        return False
    results = [x for x in tree_leaves(seen.result) if isinstance(x, Tensor)]
    for is_first in (False, True):
        try:
            others = _with_changed_half(seen, given, is_first)
        except RuntimeError:  # of what such numbers do not allow
            return False
        if any(
            one.shape == other.shape and _has_other_half(one, other, dims[0], not is_first)
            for one, other, dims in zip(results, others, returned, strict=False)
            if dims
        ):
            return True
    return False


def _with_changed_half(
    seen: RecordedOperation, given: list[list[int]], is_first: bool
) -> list[Tensor]:
    """What an operation returns if it is given other floats in one half of the rows."""
    dims = iter(given)
    args = tree_map_only(Tensor, lambda x: _with_other_half(x, next(dims), is_first), seen.args)
    return [x for x in tree_leaves(seen.func(*args, **seen.kwargs)) if isinstance(x, Tensor)]


def _with_other_half(x: Tensor, dims: list[int], is_first: bool) -> Tensor:
    """These floats with others in one half of the rows."""
    if not (dims and x.is_floating_point()):
        return x
    x = x.detach()
    half, other = _half(x, dims[0], is_first), _half(x, dims[0], not is_first)
    changed = 3 * half + 1
    return torch.cat((changed, other) if is_first else (other, changed), dims[0])


def _half(x: Tensor, dim: int, is_first: bool) -> Tensor:
    count = x.shape[dim] // 2
    return x.narrow(dim, 0, count) if is_first else x.narrow(dim, count, x.shape[dim] - count)


def _has_other_half(one: Tensor, other: Tensor, dim: int, is_first: bool) -> bool:
    if not one.is_floating_point():
        return False
    error = finite_error(_half(other, dim, is_first), _half(one, dim, is_first))
    return error is not None and error > LEAST_ERROR


def _row_dims(wholes: list[torch.Size], parts: list[torch.Size]) -> list[list[int]]:
    """Of each of these tensors the dimensions that have other lengths in the whole forward."""
    if [*map(len, wholes)] != [*map(len, parts)]:
        return []
    return [
        [k for k, (n, m) in enumerate(zip(whole, part, strict=True)) if n != m]
        for whole, part in zip(wholes, parts, strict=True)
    ]


def _row_lengths(shapes: list[torch.Size], dims: list[list[int]]) -> set[int]:
    """How long these dimensions are: rows may have become one dimension with others."""
    return {shape[dim] for shape, own in zip(shapes, dims, strict=True) for dim in own}


def _scaled(result: Tensor, factor: float, pair: list[int], rows: int) -> Tensor:
    """What an operation returns, multiplied; with a `pair` of dimensions of rows, between rows that
    are not the same."""
    is_truth = result.dtype is torch.bool
    if not (is_truth or result.is_floating_point()):
        return result
    scaled = ~result if is_truth and factor != 1 else multiplied(result, factor)
    if not pair:
        return scaled
    first, second = (torch.arange(result.shape[dim], device=result.device) for dim in pair)
    # Several tensors with the same rows may have been joined, or each row repeated.
    same = (first[:, None] - second) % rows == 0
    if len(first) == len(second):
        same |= first[:, None] // (len(first) // rows or 1) == second // (len(first) // rows or 1)
    shape = [1] * result.dim()
    shape[pair[0]], shape[pair[1]] = len(first), len(second)
    return result.where(same.view(shape), scaled)


def _has_whole_numbers(result: Any) -> bool:
    """Whether there are any among what an operation returns."""
    tensors = (each for each in tree_leaves(result) if isinstance(each, Tensor))
    return any(
        not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool) for x in tensors
    )


def _other(result: Tensor, factor: float) -> Tensor:
    """What is computed from whole numbers, if these are others."""
    if result.dtype is not torch.bool:
        return multiplied(result, factor)
    return torch.ones_like(result) if result.dim() else ~result


def multiplied(result: Tensor, factor: float) -> Tensor:
    """These numbers times the factor, and a large factor itself where they are zero: as a mean of
    what nothing exceeds yet."""
    if not result.is_floating_point() or factor == 1:
        return result
    product = result * factor
    return product if factor < 1 else product.masked_fill(result == 0, factor)
