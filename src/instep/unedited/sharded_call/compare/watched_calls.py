"""Calls that are made sharded and watched: what they do may call for a comparison after all.

- An output was zero, or not finite, whenever it was compared. Zeros and NaN tell nothing of how the
  ranks' parts become the whole: a sum, a mean and rows have them alike. Nor do gradients that are
  not finite.
- The forward may have another control flow than in the calls that were compared, on all ranks or
  for the rows of some, or fail for these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from instep.distributed.numbers import on_any_rank
from instep.training.pytree import flatten, versions
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call.compare.checked_transport import attempt
from instep.unedited.sharded_call.compare.equivalence import (
    check_lasting_changes,
    verify_plan,
)
from instep.unedited.sharded_call.compare.side_effects import observed
from instep.unedited.sharded_call.compare.snapshot import Snapshot
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.control_flow import ControlFlow, ForwardTrace
from instep.unedited.sharded_call.plan.sharding_plan import CallResult, ShardingPlan
from instep.unedited.sharded_call.run.argument_writes import ArgumentWatch, with_tensor_attributes
from instep.unedited.sharded_call.run.execution import run_sharded
from instep.unedited.sharded_call.run.forward.joined_outputs import leaves_of_output
from instep.unedited.sharded_call.run.sharded_output import is_zero
from instep.unedited.sharded_call.shards.shard_group import ShardGroup


def run_watched(
    call: BoundCall, plan: ShardingPlan, flow: ControlFlow, group: ShardGroup
) -> CallResult:
    """Make a planned call; if it shows anything new on any rank, make it anew and compare it.

    It does so, too, where it prints, writes files, or fails for the rows of some ranks.
    Collective. Raises ShardedCallError if it has changed tensors among its arguments in place.
    """
    before, seen = Snapshot(call), versions(call.tensors)
    watch = ArgumentWatch(call, call.args, call.kwargs)
    readings = None
    side_effects = observed(is_silent=True, is_lasting_error=True)
    with side_effects as effects, flow.traced(stops=True) as trace:
        found, _ = attempt(
            lambda checked: run_sharded(call, plan, replace(group, transport=checked)),
            group.transport,
            checks_indices=call.is_on_accelerator,
        )
    if found is not None:
        planned, output = found
        values = with_tensor_attributes(output, call.keeping(planned.kept))
        readings = _other_readings(trace, group)
        is_new = effects.first or trace.is_new or not flow.has_compared(readings)
        is_new = is_new or _has_first_values(planned, values)
        if not on_any_rank(bool(is_new), group.transport):
            effects.show_warnings()
            return CallResult(output, planned)
        plan = planned
    elif on_any_rank(versions(call.tensors) != seen, group.transport):
        raise ShardedCallError.changes_arguments(call.module)  # which nothing sets back
    effects.reset_warnings()
    before.restore()
    watch.restore_items()
    check_lasting_changes(call, before, group)
    result = compare_traced(call, plan, flow, group, gradients=True)
    if result.why_whole is None:
        flow.learn_readings(readings)
    return result


def _other_readings(trace: ForwardTrace, group: ShardGroup) -> int | None:
    """A checksum of what each rank has read; None where all have read the same. Collective."""
    transport, own = group.transport, trace.checksum
    ends = torch.tensor([own, -own], device=transport.control_device)
    transport.all_reduce(ends, "max").wait()
    if ends[0] == -ends[1]:
        return None
    total = torch.tensor([(transport.rank + 1) * own], device=transport.control_device)
    transport.all_reduce(total, "sum").wait()
    return int(total)


def _has_first_values(plan: ShardingPlan, output: Any) -> bool:
    """Whether an output is not zero that had no values whenever it was compared. What a forward has
    written into its arguments is not looked at."""
    outputs, _ = flatten(output, plan.structure)
    return len(outputs) == len(plan.outputs) and any(
        not (how.has_values or all(map(is_zero, leaves_of_output(out, how))))
        for out, how in zip(outputs, plan.outputs, strict=True)
    )


def compare_traced(
    call: BoundCall,
    plan: ShardingPlan,
    flow: ControlFlow,
    group: ShardGroup,
    *,
    gradients: bool,
    is_number_new: bool = False,
) -> CallResult:
    """As `verify_plan`, and remember the control flow if it is the same. Collective."""
    with flow.traced() as trace:
        result = verify_plan(call, plan, group, gradients=gradients, is_number_new=is_number_new)
    if result.why_whole is None:
        learn(trace, flow, group)
    return result


def learn(trace: ForwardTrace, flow: ControlFlow, group: ShardGroup) -> None:
    """Remember that with this control flow the sharded call is the same. Collective."""
    trace.learn()
    flow.may_change = on_any_rank(flow.may_branch(), group.transport)
