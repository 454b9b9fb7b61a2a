"""The plan of calls with one key, or why there is none, and which of the calls are compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch

from instep.process import settings
from instep.training.drift.comparison import is_compared_step
from instep.unedited.objects.branch_conditions import BranchConditions
from instep.unedited.sharded_call.plan.argument_values import ArgumentValues
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.call_tuner import CallTuner, gain
from instep.unedited.sharded_call.plan.compared_sizes import ComparedSizes
from instep.unedited.sharded_call.plan.control_flow import ControlFlow
from instep.unedited.sharded_call.plan.module_state import attribute_changes
from instep.unedited.sharded_call.plan.module_state.attribute_changes import AttributeChanges
from instep.unedited.sharded_call.plan.module_state.module_properties import is_compiled
from instep.unedited.sharded_call.plan.module_state.stored_parameters import MOVED
from instep.unedited.sharded_call.plan.sharding_plan import ShardingPlan
from instep.unedited.sharded_call.plan.whole_reasons import WholeReason
from instep.unedited.sharded_call.shards.shard_group import ShardGroup

_CALLS_TO_A_BRANCH = 2
"""So many calls after a condition has changed may be the first to take the branch."""
SAMPLED_CALLS = frozenset(10**k for k in range(1, 20))
"""Which of an entry's calls are compared with the whole forward."""


@dataclass(eq=False)
class CacheEntry:
    """The plan of a module's calls with one key, or why there is none."""

    key: tuple[Any, ...]
    plan: ShardingPlan | None = None
    why_whole: WholeReason | None = None
    is_temporary: bool = False
    """Whether the script makes such modules anew in each step: there is no time for trials."""
    has_parts: bool = True
    """Whether its parts are sharded where it is whole: not those of a language model that
    generates, which compute one token of each row, and not those inside of a compiled graph."""
    sizes: ComparedSizes = field(default_factory=ComparedSizes)
    values: ArgumentValues = field(default_factory=ArgumentValues)
    """What its calls get beside rows."""
    attributes: ref[AttributeChanges] | None = None
    """Of the module, once a call was divided. They are forgotten where it is not called."""
    attributes_due: int = 0
    """Up to which of their changes calls were compared."""
    trained: list[bool] = field(default_factory=list)
    """Which parameters required gradients in the last call."""
    is_in_doubt: bool = False
    """Whether other calls of the module turned out to depend on the whole batch."""
    hooks: tuple[int, ...] = ()
    """Those of libraries on its parts, at the last call."""
    flow: ControlFlow = field(default_factory=ControlFlow)
    """The branches that the forward took in calls that were compared."""
    conditions: BranchConditions | None = None
    """By which it may take others, where it may."""
    watched_until: int = 0
    """The last call that is to be watched because one of these has changed."""
    calls: int = 0
    last_compared: int = 1
    """The last call that was compared with the whole forward."""
    unproven: str = ""
    """See `divided_calls`: of a comparison that is to be made again."""
    tuners: dict[int, CallTuner] | None = field(
        default_factory=lambda: {} if settings.divides_by_time() else None
    )
    """Of calls of about one size; None: they are always sharded."""
    drift_steps: int = field(default_factory=lambda: int(settings.DRIFT_STEPS))
    """Of so many calls the ranks compare the arguments of one."""

    def drop_moved_plan(self) -> None:
        """Give the plan up if it counts on parameters in lists and objects which lie elsewhere."""
        if self.plan is not None and not all(each.is_current() for each in self.plan.stored):
            self.plan, self.why_whole = None, MOVED

    def tuner(self, call: BoundCall) -> CallTuner | None:
        """What chooses how this call is computed, if it can be sharded."""
        if self.plan is None or self.tuners is None:
            return None
        size = call.elements.bit_length()
        if size not in self.tuners:
            self.tuners[size] = CallTuner()
            gain.add(self.tuners[size])
        return self.tuners[size]

    def parts_tuner(self, call: BoundCall) -> CallTuner | None:
        """What chooses whether the parts of this call are sharded, if it is whole itself."""
        if self.tuners is None or self.is_temporary:
            return None
        size = ~call.elements.bit_length()
        return self.tuners.setdefault(size, CallTuner(begins_later=True))

    def is_new(self, call: BoundCall, size: int) -> bool:
        """Whether a call of these shapes and numbers is to be compared as the first one was.

        `size`: the number of shards.
        """
        is_in_doubt, self.is_in_doubt = self.is_in_doubt, False
        news = (
            is_in_doubt,
            self._has_new_values(call),
            self.sizes.add(call.leaves, call.rows, size),
            self._has_new_attributes(),
            self._has_other_trained(call),
        )
        return any(news)

    def _has_other_trained(self, call: BoundCall) -> bool:
        """Whether parameters were frozen or thawed since the last call."""
        if not torch.is_grad_enabled():
            return False
        trained = [
            parameter is not None and parameter.requires_grad
            for part in call.parts
            for parameter in part._parameters.values()
        ]
        before, self.trained = self.trained, trained
        return before not in ([], trained)

    def has_due_attributes(self) -> bool:
        """Whether attributes have changed in a way that calls for a comparison, or were
        forgotten."""
        if self.attributes is None:
            return False
        attributes = self.attributes()
        return attributes is None or attributes.due != self.attributes_due

    def _has_new_attributes(self) -> bool:
        has_due = self.has_due_attributes()
        if self.attributes is not None and (attributes := self.attributes()) is not None:
            self.attributes_due = attributes.due
        return has_due

    def finish(self, call: BoundCall) -> None:
        """After a call: what it has changed by itself is no change of the script's."""
        attributes = None if self.attributes is None else self.attributes()
        if attributes is None and self.plan is not None:
            attributes = attribute_changes.begin(call.module)
            self.attributes, self.attributes_due = ref(attributes), attributes.due
        if attributes is not None:
            if self.plan is not None:
                attributes.files.watch(self.plan.files)
            if self.hooks or call.has_objects:
                attributes.read_any()
            attributes.skip()

    def _has_new_values(self, call: BoundCall) -> bool:
        dims = () if self.plan is None else self.plan.division.dims
        return self.values.add(call, dims, self.calls)

    def is_sampled(self, plan: ShardingPlan) -> bool:
        """Whether this call's outputs are to be compared with those of the whole forward.

        The second to fourth are, too, where a mean over rows could be one over something else, and
        the second, fourth, eighth, 16th... where a forward changes attributes, by which a later one
        may do something else, or where an output was zero so far.
        """
        may_become_another = plan.changes_attributes or not plan.has_values
        return (
            self.calls in SAMPLED_CALLS
            or (plan.has_reductions and self.calls <= 4)
            or (may_become_another and self.calls.bit_count() == 1)
        )

    def is_watched(self, call: BoundCall, plan: ShardingPlan, group: ShardGroup) -> bool:
        """Whether this call's forward may take a branch that no compared call has taken, and it is
        to be seen whether it does."""
        if group.is_virtual or is_compiled(call.parts):
            return False
        if self.flow.may_change:
            if self.conditions is None:
                self.conditions = BranchConditions(call.parts)
            if self.conditions.may_be_others():
                self.watched_until = self.calls + _CALLS_TO_A_BRANCH
        return self.is_branch_near or self.flow.is_watched(
            self.calls, may_change=plan.draws_outside_torch
        )

    @property
    def is_branch_near(self) -> bool:
        """Whether a number was close to one at which this call's forward takes another branch."""
        return self.calls <= self.watched_until

    def is_checked(self) -> bool:
        """Whether the ranks are to compare the arguments of this call."""
        return is_compared_step(self.calls, self.drift_steps)

    def divided_calls(self) -> str:
        """What a comparison that fails in this call says of those before it; "" for none."""
        first, last = self.last_compared + 1, self.calls - 1
        if first > last:
            return ""
        which, they = f"calls {first} to {last} were", "they"
        if first == last:
            which, they = f"call {first} was", "it"
        return f" ({which} divided): what {they} returned may differ from one process already"
