"""Whether a reduction over the rows makes a difference only later.

`x * (4 / x.norm()).clamp(max=1)` is `x` as long as the norm of the batch is small, so a part of the
batch is that of the whole one, until the weights have grown. So a forward on a part of the batch is
made once more with its reductions over rows multiplied, and truth values the other way round: what
it returns must not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.distributed.communication.transport import Transport
from instep.distributed.numbers import on_any_rank
from instep.process.torch_private.tensors import tree_map_only
from instep.training.pytree import leaves_of
from instep.unedited.sharded_call.compare.checked_transport import attempt
from instep.unedited.sharded_call.compare.probes.dependencies import autocast_cache_off
from instep.unedited.sharded_call.compare.rounding import (
    LEAST_ERROR,
    finite_error,
    output_tolerance,
)
from instep.unedited.sharded_call.compare.whole.reference import Reference
from instep.unedited.sharded_call.plan.control_flow import probe_flow
from instep.unedited.sharded_call.plan.module_state.module_properties import is_compiled
from instep.unedited.sharded_call.plan.sharding_plan import ShardingPlan
from instep.unedited.sharded_call.run.forward.local_forward import run_planned
from instep.unedited.sharded_call.shards.reductions import (
    CONDITIONS,
    OTHER_REDUCTIONS,
    SUMS,
    Place,
    ReductionCall,
    replaced_reductions,
)
from instep.unedited.sharded_call.shards.shard_group import ShardGroup

_FACTORS = ((2.0**16, 2.0**20), (2.0**-16, 2.0**-20))
"""By which reductions are multiplied: what differs by the first of a pair must differ by the
second, too."""


def depends_on_reductions(reference: Reference, plan: ShardingPlan, group: ShardGroup) -> bool:
    """Whether by this plan an output would be another if reductions over the rows were others.

    An output that is itself a mean or a sum over rows may depend on sums and means. Those that the
    plan takes over all ranks are right. What fails or takes another branch proves nothing.
    Collective. Leaves another state behind.
    """
    if is_compiled(reference.call.parts):  # it would be compiled anew
        return False
    forward = reference.forward
    has_own_sums = plan.sums_without_rows is None and not plan.has_reductions
    lengths = forward.reduction_lengths
    probes = [_Probe(OTHER_REDUCTIONS, lengths), _Probe(CONDITIONS, lengths)]
    probes += [_Probe(SUMS, forward.sum_lengths)] if has_own_sums else []
    return any(probe.finds_dependency(reference, plan, group) for probe in probes)


@dataclass(frozen=True)
class _Probe:
    """A trial with the reductions of some names multiplied."""

    names: tuple[str, ...]
    whole_lengths: Mapping[Place, set[int]]
    """As of `noted_lengths`, in the whole forward."""

    def finds_dependency(self, reference: Reference, plan: ShardingPlan, group: ShardGroup) -> bool:
        """Whether outputs are clearly others. Collective."""
        if not on_any_rank(bool(self.whole_lengths), group.transport):
            return False
        own = self._outputs(1.0, reference, plan, group)
        if own is None or not on_any_rank(own.has_rows, group.transport):
            return False
        for factors in _FACTORS:
            others = (self._outputs(factor, reference, plan, group) for factor in factors)
            # All ranks make both trials, or none the second.
            if all(
                other is not None and on_any_rank(other.differ(own), group.transport)
                for other in others
            ):
                return True
        return False

    def _outputs(
        self, factor: float, reference: Reference, plan: ShardingPlan, group: ShardGroup
    ) -> _Outputs | None:
        """What the forward returns for this rank's rows, with this factor; None if it fails or
        takes another branch on any rank. Collective."""

        def run(checked: Transport) -> _Outputs:
            reference.before.restore()
            scaling = _Scaling(factor, self.whole_lengths)
            with replaced_reductions(scaling.run, self.names, on_all_threads=True):
                _, local, _ = run_planned(reference.call, plan, replace(group, transport=checked))
            leaves = [leaf for parts in local for part in parts for leaf in leaves_of(part)]
            return _Outputs(leaves, scaling.has_rows)

        with probe_flow() as is_other, torch.no_grad(), autocast_cache_off():
            on_gpu = reference.call.is_on_accelerator
            outputs, _ = attempt(run, group.transport, checks_indices=on_gpu)
            is_none = on_any_rank(outputs is None or is_other(), group.transport)
        return None if is_none else outputs


class _Scaling:
    """Multiplies what reductions over the rows return."""

    def __init__(self, factor: float, whole_lengths: Mapping[Place, set[int]]) -> None:
        self._factor, self._whole_lengths = factor, whole_lengths
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
        return result * self._factor if result.is_floating_point() else result


class _Outputs(NamedTuple):
    """What a forward returns for this rank's rows."""

    leaves: list[Any]
    has_rows: bool

    def differ(self, others: _Outputs) -> bool:
        """Whether one of them is clearly another."""
        pairs = zip(self.leaves, others.leaves, strict=False)
        return any(
            (error := finite_error(one, other)) is not None
            and error > max(LEAST_ERROR, 10 * output_tolerance(other))
            for one, other in pairs
            if isinstance(one, Tensor) and isinstance(other, Tensor)
            if one.is_floating_point() and one.shape == other.shape
        )
