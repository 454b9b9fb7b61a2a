"""Operations of a forward that go over the rows: inside of torch's own functions, and for each two
rows.

Such an operation is known by the shapes of what it is given and returns, which are other ones for a
part of the batch: the dimension of the rows is gone, or there are two of them, as in `h @ h.T`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.process import frames_from
from instep.process.torch_private.dispatch import KernelMode
from instep.process.torch_private.tensors import tree_leaves, tree_map_only
from instep.unedited.sharded_call.shards.reductions import (
    REDUCTIONS,
    ReductionCall,
    replaced_reductions,
)

_Place = tuple[str, str, int, int]
"""An operation, and where the script, or a library other than torch, calls what computes it."""
_Answer = Callable[[_Place, Any, Any], Any]
"""Gets the place of an operation, its arguments and its result, and returns what is its result."""
_CALLS = "instep.unedited.sharded_call.plan.bound_call"
"""Instep's module that calls the script's outermost one."""
_PASSED = frozenset(
    (
        "instep.process.patching",
        "instep.unedited.sharded_call.modules",
        "instep.unedited.sharded_call.own_forward",
        "instep.unedited.sharded_call.shards.reductions",
    )
)
"""Those that call torch's modules and functions as the script does."""
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
    )
)
"""Operations that choose elements. How many may depend on what is in the rows, and may be as many
in a part of the batch."""


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

    @property
    def is_sum(self) -> bool:
        """Whether it may be the sum or the mean that the forward returns."""
        return self is OperationKind.SUM


class RowOperations:
    """The operations of a forward that go over rows, found by the shapes in the whole forward and
    in that of a part of the batch.

    Those that the script calls as reductions over the first dimension are left out, and so are
    those of instep's own functions, which go over the rows of all ranks.
    """

    def __init__(self) -> None:
        self._whole: dict[_Place, list[_Call]] = {}
        self._part: dict[_Place, list[_Call]] = {}
        self.are_known = False
        """Whether both forwards have come to their ends."""

    @contextmanager
    def noted(self, *, of_whole: bool) -> Iterator[None]:
        """Inside, the operations of a forward are noted."""
        found = self._whole if of_whole else self._part
        found.clear()
        self.are_known = False

        def note(place: _Place, args: Any, result: Any) -> Any:
            found.setdefault(place, []).append(_Call.of(args, result))
            return result

        with _Operations(note).enabled():
            yield
        self.are_known = not of_whole

    def kinds(self) -> set[OperationKind]:
        """The kinds of which there are any."""
        calls = ((place, k) for place, calls in self._part.items() for k in range(len(calls)))
        return {kind for place, k in calls if (kind := self._kind(place, k)[0]) is not None}

    @contextmanager
    def scaled(self, kind: OperationKind, factor: float, rows: int) -> Iterator[None]:
        """Inside, in the forward of a part with so many rows, what operations of this kind return
        is multiplied, and truth values are the other way round: for two rows, not for one."""
        counts: Counter[_Place] = Counter()

        def scale(place: _Place, args: Any, result: Any) -> Any:
            own, dims = self._kind(place, counts[place])
            counts[place] += 1
            if own is not kind:
                return result
            return tree_map_only(Tensor, lambda x: _scaled(x, factor, dims, rows), result)

        with _Operations(scale).enabled():
            yield

    def _kind(self, place: _Place, k: int) -> tuple[OperationKind | None, list[int]]:
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
        if is_along or not (name in _MOVING or any(returned)):
            return OperationKind.SUM if name in _SUMS else OperationKind.REDUCTION, []
        return None, []


class _Operations(KernelMode):
    """A mode in which a function gets the result of each operation."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__()
        self._answer = answer
        self._is_ignored = False

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Inside, operations on this thread are seen."""
        with replaced_reductions(self._ignored, REDUCTIONS), self:
            yield

    def _ignored(self, call: ReductionCall) -> Any:
        if not call.is_over_first_dim():
            return NotImplemented
        before, self._is_ignored = self._is_ignored, True
        try:
            return call.run()
        finally:
            self._is_ignored = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind is not Tensor for kind in types):  # what these make of it is seen then
            return NotImplemented
        result = func(*args, **kwargs)
        schema: Any = getattr(func, "_schema", None)  # there are operations without one
        if self._is_ignored or schema is None or _is_view_or_in_place(schema):
            return result
        place = _place_of(sys._getframe(1))
        return result if place is None else self._answer((schema.name, *place), args, result)


def _is_view_or_in_place(schema: Any) -> bool:
    """Whether what an operation returns shares memory with what it is given."""
    return any(each.alias_info is not None for each in schema.returns)


def _place_of(frame: FrameType | None) -> tuple[str, int, int] | None:
    """Where the code that is neither torch's nor instep's is, from this frame on outwards; None
    where a function of instep's computes what goes over all ranks."""
    for each in frames_from(frame):
        name = each.f_globals.get("__name__", "")
        if name == _CALLS:
            break
        owner = name.partition(".")[0]
        if owner == "instep" and name not in _PASSED:
            return None
        if owner not in ("torch", "instep"):
            return each.f_code.co_filename, each.f_code.co_firstlineno, each.f_lasti
    return "", 0, 0


def _row_dims(wholes: list[torch.Size], parts: list[torch.Size]) -> list[list[int]]:
    """Of each of these tensors the dimensions that have other lengths in the whole forward."""
    if [*map(len, wholes)] != [*map(len, parts)]:
        return []
    return [
        [k for k, (n, m) in enumerate(zip(whole, part, strict=True)) if n != m]
        for whole, part in zip(wholes, parts, strict=True)
    ]


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


def multiplied(result: Tensor, factor: float) -> Tensor:
    """These numbers times the factor, and a large factor itself where they are zero: as a mean of
    what nothing exceeds yet."""
    if not result.is_floating_point() or factor == 1:
        return result
    product = result * factor
    return product if factor < 1 else product.masked_fill(result == 0, factor)
