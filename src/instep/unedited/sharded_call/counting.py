"""How many module calls were sharded, and how many rows went through them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from instep.unedited.sharded_call.one_process.fallback import current_fallback
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.division import shapes_of
from instep.unedited.sharded_call.plan.sharding_plan import ShardingPlan
from instep.unedited.sharded_call.run.backward import start_work
from instep.unedited.sharded_call.run.region import call_state
from instep.unedited.sharded_call.run.whole_state import note_whole_call
from instep.unedited.sharded_call.shards.shard_group import ShardGroup


@dataclass
class CallCounts:
    """This rank's module calls so far."""

    sharded: int = 0
    """Calls of which it computed its own rows."""
    whole: int = 0
    """Calls that every rank computed whole."""
    samples: int = 0
    """Rows that went through this rank's modules with gradients enabled."""

    def reset(self) -> None:
        """Count from zero."""
        self.sharded = self.whole = self.samples = 0

    def add_sharded(self, call: BoundCall, plan: ShardingPlan, group: ShardGroup) -> None:
        """Count a call of which this rank has computed its own rows."""
        self.sharded += 1
        start_work()
        if (fallback := current_fallback()) is not None:
            fallback.add_divided()
        blocks = group.blocks(count_batch(call, plan))
        self._add_samples(blocks[-1].stop - blocks[0].start)

    def add_whole(self, call: BoundCall) -> None:
        """Count a call that every rank computes whole."""
        self.whole += 1
        if call.is_on_accelerator:
            note_whole_call(call.module)
        self._add_samples(count_batch(call, None))

    def _add_samples(self, rows: int) -> None:
        if torch.is_grad_enabled() and not call_state.whole_depth:
            self.samples += rows


call_counts = CallCounts()


def count_batch(call: BoundCall, plan: ShardingPlan | None) -> int:
    """How many rows this batch has; 0 where it cannot be said."""
    if plan is not None:
        return plan.division.count_rows(call.leaves) or 0
    sizes = [max(shape[:2]) for shape in shapes_of(call.leaves) if shape]
    return max([call.rows, *call.list_lengths(), *sizes])
