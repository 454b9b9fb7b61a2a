"""Whether a reduction over the rows makes a difference only later.

`x * (4 / x.norm()).clamp(max=1)` is `x` as long as the norm of the batch is small, so a part of the
batch is that of the whole one, until the weights have grown. So a forward on a part of the batch is
made once more with its reductions over rows multiplied, and truth values the other way round: what
it returns must not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from instep.distributed.communication.transport import Transport
from instep.distributed.numbers import on_any_rank
from instep.process.torch_private.tensors import tree_map_only
from instep.training.pytree import leaves_of
from instep.unedited.sharded_call.compare.checked_transport import attempt
from instep.unedited.sharded_call.compare.probes.dependencies import probe_forwards
from instep.unedited.sharded_call.compare.probes.row_operations import (
    OperationKind,
    RowOperations,
    multiplied,
)
from instep.unedited.sharded_call.compare.rounding import (
    LEAST_ERROR,
    finite_error,
    output_tolerance,
)
from instep.unedited.sharded_call.compare.whole.reference import Reference
from instep.unedited.sharded_call.plan.sharding_plan import ShardingPlan
from instep.unedited.sharded_call.run.argument_writes import run_whole
from instep.unedited.sharded_call.run.forward.local_forward import run_planned
from instep.unedited.sharded_call.shards.reductions import (
    CONDITIONS,
    EXTREMES,
    OTHER_REDUCTIONS,
    SUMS,
    Place,
    ReductionCall,
    replaced_reductions,
)
from instep.unedited.sharded_call.shards.shard_group import ShardGroup

T = TypeVar("T")

_FACTORS = ((2.0**16, 2.0**20), (2.0**-16, 2.0**-20))
"""By which reductions are multiplied: what differs by the first of a pair must differ by the
second, too."""
_NAN = ((math.nan,),)
"""As `_FACTORS`: what it is multiplied by later, a gate say, may be zero still."""


def depends_on_reductions(
    reference: Reference, plan: ShardingPlan, group: ShardGroup, operations: RowOperations
) -> bool:
    """Whether by this plan an output would be another if reductions over the rows were others, or
    what is computed for each two rows; `operations` may be known by now.

    An output that is itself a mean or a sum over rows may depend on sums and means. Those that the
    plan takes over all ranks are right. What fails or takes another branch proves nothing.
    Collective. Leaves another state behind.
    """
    has_own_sums = plan.sums_without_rows is None and not plan.has_reductions
    forward, transport = reference.forward, group.transport
    lengths = forward.reduction_lengths
    forwards = _ScaledForwards(reference, plan, group)
    any_size = _FACTORS + _NAN
    # Of a softmax of which the largest value is subtracted nothing is left with NaN.
    named = [(OTHER_REDUCTIONS, lengths, any_size), (EXTREMES, lengths, _FACTORS)]
    named += [(CONDITIONS, lengths, _FACTORS)]
    named += [(SUMS, forward.sum_lengths, any_size)] if has_own_sums else []
    if any(
        forwards.finds_dependency(partial(_scaled_calls, names, of_names), factors, of_names)
        for names, of_names, factors in named
    ):
        return True
    if on_any_rank(not operations.are_known, transport):
        forwards.note(operations)
    allowed = [OperationKind.SUM] if plan.has_reductions else []
    allowed += [OperationKind.WHOLE_NUMBERS] if not has_own_sums else []  # the count of all rows
    kinds = [kind for kind in OperationKind if kind not in allowed]
    found = operations.kinds()
    return any(
        forwards.finds_dependency(scale, any_size, kind in found)
        for kind in kinds
        for scale in [partial(_scaled_operations, operations, kind)]
    )


def branch_by_all_rows(operations: RowOperations, group: ShardGroup) -> str:
    """Say that the forward whose operations these are takes a branch by a value of all rows; "" if
    not. Collective."""
    place = operations.reads.first_branch() if operations.are_known else ""
    if not on_any_rank(bool(place), group.transport):
        return ""
    return f"it takes a branch by a value of the whole batch{place and f' ({place})'}"


_HasRows = Callable[[], bool]
"""Whether anything was multiplied."""
_Scale = Callable[[float, int], AbstractContextManager[_HasRows]]
"""Multiplies, inside, what goes over the rows, by a factor, in the forward of so many rows."""


class _ScaledForwards:
    """A plan, tried with results of reductions that are not the script's."""

    def __init__(self, reference: Reference, plan: ShardingPlan, group: ShardGroup) -> None:
        self._reference, self._plan, self._group = reference, plan, group
        total = plan.division.count_rows(reference.call.leaves) or 0
        self._rows = group.blocks(total)[0].count

    def note(self, operations: RowOperations) -> None:
        """Note the operations of the whole forward and of that of a part. Collective."""
        reference = self._reference

        def run(checked: Transport) -> None:
            reference.before.restore()
            with operations.noted(of_whole=True):
                run_whole(reference.call)
            reference.before.restore()
            with operations.noted(of_whole=False):
                run_planned(reference.call, self._plan, replace(self._group, transport=checked))

        self._attempt(run)

    def finds_dependency(
        self, scale: _Scale, factors: Sequence[Sequence[float]], is_due: object
    ) -> bool:
        """Whether outputs are clearly others with all factors of a row. `is_due`: whether there is
        anything to scale on this rank. Collective."""
        transport = self._group.transport
        if not on_any_rank(bool(is_due), transport):
            return False
        own = self._outputs(scale, 1.0)
        if own is None or not on_any_rank(own.has_rows, transport):
            return False
        for row in factors:
            others = ((factor, self._outputs(scale, factor)) for factor in row)
            # All ranks make both trials, or none the second.
            if all(
                other is not None
                and on_any_rank(other.differ(own, counts_nan=math.isnan(factor)), transport)
                for factor, other in others
            ):
                return True
        return False

    def _outputs(self, scale: _Scale, factor: float) -> _Outputs | None:
        """What the forward returns for this rank's rows, with this factor; None if it fails or
        takes another branch on any rank. Collective."""
        reference = self._reference

        def run(checked: Transport) -> _Outputs:
            reference.before.restore()
            group = replace(self._group, transport=checked)
            with scale(factor, self._rows) as has_rows:
                _, local, _ = run_planned(reference.call, self._plan, group)
            leaves = [leaf for parts in local for part in parts for leaf in leaves_of(part)]
            return _Outputs(leaves, has_rows())

        return self._attempt(run)

    def _attempt(self, run: Callable[[Transport], T]) -> T | None:
        """What it returns without gradients; None if it fails or takes another branch on any rank.
        Collective."""
        transport = self._group.transport
        on_gpu = self._reference.call.is_on_accelerator
        with probe_forwards(self._reference.call) as is_other:
            result, _ = attempt(run, transport, checks_indices=on_gpu)
            is_none = on_any_rank(result is None or is_other(), transport)
        return None if is_none else result


@contextmanager
def _scaled_calls(
    names: tuple[str, ...], whole_lengths: Mapping[Place, set[int]], factor: float, _: int
) -> Iterator[_HasRows]:
    """Multiply what the script's own reductions of these names return over the rows."""
    scaling = _Scaling(factor, whole_lengths)
    with replaced_reductions(scaling.run, names, on_all_threads=True):
        yield lambda: scaling.has_rows


@contextmanager
def _scaled_operations(
    operations: RowOperations, kind: OperationKind, factor: float, rows: int
) -> Iterator[_HasRows]:
    """Multiply what operations of this kind return."""
    with operations.scaled(kind, factor, rows):
        yield lambda: True


class _Scaling:
    """Multiplies what reductions over the rows return."""

    def __init__(self, factor: float, whole_lengths: Mapping[Place, set[int]]) -> None:
        self._factor = factor
        self._whole_lengths = whole_lengths
        """As of `noted_lengths`, in the whole forward."""
        self.has_rows = False
        """Whether one goes over the rows: over another number of them than in the whole forward."""

    def run(self, call: ReductionCall) -> Any:
        """As `replaced_reductions` asks for it."""
        lengths = self._whole_lengths.get(call.place)
        is_own = not lengths or not call.is_over_first_dim() or len(call.tensor) in lengths
        if is_own:
            return call.run()
        self.has_rows = True
        return tree_map_only(Tensor, self._scaled, call.run())

    def _scaled(self, result: Tensor) -> Tensor:
        if result.dtype is torch.bool and self._factor != 1:
            return ~result
        return multiplied(result, self._factor)


class _Outputs(NamedTuple):
    """What a forward returns for this rank's rows."""

    leaves: list[Any]
    has_rows: bool

    def differ(self, own: _Outputs, *, counts_nan: bool) -> bool:
        """Whether one of them is clearly another than the `own` one, or NaN, if that counts."""
        pairs = zip(self.leaves, own.leaves, strict=False)
        return any(
            _has_new_nan(one, other) if counts_nan else _is_other(one, other)
            for one, other in pairs
            if isinstance(one, Tensor) and isinstance(other, Tensor)
            if one.is_floating_point() and one.shape == other.shape
        )


def _is_other(one: Tensor, own: Tensor) -> bool:
    error = finite_error(one, own)
    return error is not None and error > max(LEAST_ERROR, 10 * output_tolerance(own))


def _has_new_nan(one: Tensor, own: Tensor) -> bool:
    return bool((one.isnan() & own.isfinite()).any())
