"""The plan of a module's sharded calls: how its arguments are divided and its outputs joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from instep.training.blocks import Block
from instep.training.pytree import Structure, one_leaf
from instep.unedited.sharded_call.plan.bound_call import AttributePlace, BoundCall, Given
from instep.unedited.sharded_call.plan.division import Division
from instep.unedited.sharded_call.plan.module_state.stored_parameters import StoredParameter
from instep.unedited.sharded_call.plan.whole_reasons import WholeReason

MemoryOrder = tuple[int, ...]
"""The dimensions of a tensor as they lie in memory, the outermost first."""


@dataclass(frozen=True)
class OutputPlan:
    """How the ranks' outputs become one output for the script (placements are those of DTensor)."""

    placement: Literal["shard", "entries", "partial_mean", "partial_sum", "replicate"]
    dim: int = 0
    """The dimension of the rows, where it is sharded."""
    interleaved: bool = False
    """Whether one row of each sample comes after the other: (time x batch, ...)."""
    is_lazy: bool = False
    """Whether the rows stay on their ranks until the script looks at them, however few they are:
    those of caches, and those from which another output was computed, for the script may ask for
    the gradient of that one."""
    has_values: bool = field(default=True, compare=False)
    """Whether it was compared when it was not all zeros."""
    order: MemoryOrder | None = field(default=None, compare=False)
    """Of the whole output, if it is a tensor."""
    given: Given | None = None
    """What the forward returns there as it is, or a view of: the script may change that in
    place."""
    row_stride: int | None = field(default=None, compare=False)
    """Of a view: how far its rows are apart in memory; 0 without rows. None: it is as given."""
    numbers: frozenset[str] = field(default=frozenset(), compare=False)
    """What it was whenever it was compared, if it is a number or truth value."""


class Draw(NamedTuple):
    """One random operation of a forward."""

    number: int
    """How many there were before it."""
    op: str
    dims: int
    """Of the tensor that it draws."""


class DrawRows(NamedTuple):
    """The rows in the tensor of a draw, and its memory order."""

    dim: int | None
    """None where it has no rows."""
    order: MemoryOrder
    """Of that for the whole batch: it is filled in this order."""
    of_sample: tuple[float, ...] = ()
    """Its shape, with the rows of one sample."""


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """How the calls of one module are sharded."""

    division: Division
    outputs: tuple[OutputPlan, ...]
    structure: Structure
    """Of what it returns. A list with one entry for each row is one leaf of it."""
    is_random: bool
    """Whether it draws random numbers."""
    generators: tuple[torch.Generator, ...] = ()
    """Those of its own."""
    draw_rows: Mapping[Draw, DrawRows] = field(default_factory=dict)
    """Where its draws of random numbers have rows, where their shape misleads."""
    draws_outside_torch: bool = False
    """Whether it draws from numpy's or Python's global generators, the same on all ranks."""
    changes_attributes: bool = False
    """Whether its forward changes plain values that it keeps."""
    stored: tuple[StoredParameter, ...] = ()
    """Its parameters in lists and objects, if its forward uses some from there."""
    kept: tuple[AttributePlace, ...] = ()
    """The attributes that its forward sets to tensors, which are joined as outputs are."""
    with_graphs: frozenset[AttributePlace] = frozenset()
    """Those of `kept` that had a graph before a call that was compared."""
    sums_without_rows: frozenset[tuple[str, int, int]] | None = None
    """Where its own sums and means go over the rows of all ranks: the places of those that do not,
    since what they add up has no rows. None: all go over this rank's rows."""
    files: tuple[str, ...] = ()
    """Those that its forward reads."""
    is_noisy: bool = False
    """Whether it is the same only up to what rounding does to this call, which was measured."""

    @cached_property
    def has_values(self) -> bool:
        """Whether each of its outputs is."""
        return all(output.has_values for output in self.outputs)

    def updated(self, later: ShardingPlan) -> ShardingPlan:
        """With what a later comparison of such a call has found."""
        return replace(
            self,
            outputs=later.outputs,
            is_random=self.is_random or later.is_random,
            generators=later.generators or self.generators,
            draw_rows={**self.draw_rows, **later.draw_rows},
            draws_outside_torch=self.draws_outside_torch or later.draws_outside_torch,
            changes_attributes=self.changes_attributes or later.changes_attributes,
            files=tuple(dict.fromkeys((*self.files, *later.files))),
            is_noisy=self.is_noisy or later.is_noisy,
        )

    @cached_property
    def has_reductions(self) -> bool:
        """Whether an output is a mean or a sum over the rows."""
        return any(output.placement in ("partial_mean", "partial_sum") for output in self.outputs)


@dataclass(frozen=True)
class CallResult:
    """What a call has returned and taught."""

    output: Any
    """For the script."""
    plan: ShardingPlan | None
    """For the calls that follow, if they can be sharded."""
    why_whole: WholeReason | None = None
    """Why they cannot be; None if they can, or if this call does not tell."""
    is_sharded: bool = True
    reading: BoundCall | None = None
    """The call as its arguments were read, where its plan is new."""
    is_compared: bool = False
    """Whether a planned call was compared with the whole one."""


def with_entries(whole: Structure, local: Structure, block: Block) -> Structure:
    """`whole`, the structure of what the whole forward returns, with each list as one leaf that
    has one entry for each row there, and in that for a block of the rows."""
    if whole == local or whole is None or local is None or whole.type is not local.type:
        return whole
    if whole.keys == local.keys:
        pairs = zip(whole.children, local.children, strict=True)
        return replace(whole, children=tuple(with_entries(*pair, block) for pair in pairs))
    is_list = whole.type in (list, tuple)
    has_row_each = (whole.keys, local.keys) == (block.total, block.count)
    return one_leaf(whole.type) if is_list and has_row_each else whole


def candidate_outputs(local: Tensor, whole: Tensor, block: Block) -> Iterator[OutputPlan]:
    """Plans by which `local` may become `whole`, by their shapes: the same on all ranks."""
    for dim in range(whole.dim() if local.dim() == whole.dim() else 0):
        local_shape, whole_shape = list(local.shape), list(whole.shape)
        rows, total = local_shape.pop(dim), whole_shape.pop(dim)
        if local_shape == whole_shape and rows * block.total == total * block.count:
            yield OutputPlan("shard", dim)
            if rows > block.count:
                yield OutputPlan("shard", dim, interleaved=True)
    if local.shape == whole.shape:
        if local.is_floating_point():
            yield OutputPlan("partial_mean")
        yield OutputPlan("partial_sum")
