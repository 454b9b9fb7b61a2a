"""Calls of which an output was zero whenever it was compared.

Zeros tell nothing of how the ranks' parts become the whole: a sum, a mean and rows have them alike.
"""

from __future__ import annotations

from typing import Any

from instep.distributed.numbers import on_any_rank
from instep.training.pytree import flatten
from instep.unedited.sharded_call.compare.equivalence import verify_plan
from instep.unedited.sharded_call.compare.snapshot import Snapshot
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.sharding_plan import ShardingPlan
from instep.unedited.sharded_call.run.execution import run_sharded
from instep.unedited.sharded_call.run.sharded_output import has_values
from instep.unedited.sharded_call.shards.shard_group import ShardGroup


def run_with_zeros(
    call: BoundCall, plan: ShardingPlan, group: ShardGroup
) -> tuple[ShardingPlan, Any, str]:
    """Make a planned call; if such an output is not zero any more, make it anew and compare it.

    Returns the same as `verify_plan`. Collective.
    """
    before = Snapshot(call.module, call.leaves)
    planned, output = run_sharded(call, plan, group)
    outputs, _ = flatten(output)
    is_proof = any(
        not how.has_values and has_values(out)
        for out, how in zip(outputs, planned.outputs, strict=True)
    )
    if not on_any_rank(is_proof, group.transport):
        return planned, output, ""
    before.restore()
    return verify_plan(call, planned, group, gradients=True)
