"""The outermost call of a module: sharded where that is the same, else whole, or its parts are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from instep.distributed.identity.torch_devices import is_capturing_graph
from instep.distributed.numbers import on_any_rank
from instep.unedited.sharded_call import own_forward
from instep.unedited.sharded_call.compare.call_comparison import USES_FOREIGN_LEAF
from instep.unedited.sharded_call.compare.equivalence import find_plan
from instep.unedited.sharded_call.compare.rank_mismatch import arguments_mismatch
from instep.unedited.sharded_call.compare.watched_calls import compare_traced, learn, run_watched
from instep.unedited.sharded_call.counting import call_counts, count_batch
from instep.unedited.sharded_call.plan import plan_cache, whole_calls
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.cache_entry import CacheEntry
from instep.unedited.sharded_call.plan.call_tuner import CallTuner
from instep.unedited.sharded_call.plan.compared_sizes import MAX_COMPARED
from instep.unedited.sharded_call.plan.control_flow import WATCHED_CALLS
from instep.unedited.sharded_call.plan.module_state import temporary_modules
from instep.unedited.sharded_call.plan.module_state.module_properties import (
    caches_weights,
    find_gpu_state,
    find_hooks,
    find_observer,
    find_scripted_state,
    is_compiled,
    is_lazy,
)
from instep.unedited.sharded_call.plan.sharding_plan import CallResult
from instep.unedited.sharded_call.plan.whole_calls import WholeCall, decision_counts
from instep.unedited.sharded_call.plan.whole_reasons import (
    FEW_ROWS,
    NO_ROWS,
    OTHER_ROWS,
    ReasonKind,
    WholeReason,
)
from instep.unedited.sharded_call.run.argument_writes import attributes_with_graphs
from instep.unedited.sharded_call.run.execution import run_sharded
from instep.unedited.sharded_call.run.region import call_state
from instep.unedited.sharded_call.run.timed_calls import run_timed, time_run
from instep.unedited.sharded_call.run.whole_state import note_changed_parameters
from instep.unedited.sharded_call.shards.shard_group import ShardGroup
from instep.unedited.sharded_call.whole_report import report_whole

_FIRST_CALLS = 3
_OF_PARAMETERS = (ReasonKind.CHANGES_PARAMETERS, ReasonKind.MOVES_PARAMETERS)
_IN_FIRST_CALL = (
    *_OF_PARAMETERS,
    ReasonKind.SIDE_EFFECT,
    ReasonKind.FREEZES,
    ReasonKind.UNLIKE_BUFFERS,
    ReasonKind.SETS_UP,
    ReasonKind.KEEPS_TENSORS,
)
"""What many do in their first call only."""
_CALLS_WITH_ZEROS = 64
"""So many calls of which an output was zero so far are made anew where it no longer is."""
_CHECKPOINTED = WholeReason(
    "torch.utils.checkpoint(use_reentrant=False) calls it outside of a divided call, and must find "
    "the same tensors again"
)
_CAPTURED = WholeReason("a CUDA graph captures it, which is replayed without Python")
_CACHED = WholeReason(
    "where torch.nn.utils.parametrize.cached() keeps its weights for more than one call; other "
    "calls are not affected",
    ReasonKind.OF_ARGUMENTS,
)


def call_outermost(call: BoundCall, group: ShardGroup) -> Any:
    """Plan the call, compare it with the whole one where that is due, and run it. Collective."""
    decision_counts.undecided += 1
    if why := _find_obstacle(call):
        report_whole(call.module, why)
        return _run_whole(call)
    call = plan_cache.read(call)
    entry = plan_cache.lookup(call, group)
    entry.calls += 1
    entry.drop_moved_plan()
    hooked, hooks = find_hooks(call.module, call.parts)
    if entry.plan is None and entry.why_whole is None:
        state = find_gpu_state(call.parts) or find_scripted_state(call.parts)
        entry.why_whole = WholeReason.of(state)
    if why := entry.why_whole or WholeReason.of(hooked):
        report_whole(call.module, why)
        call_counts.add_whole(call)
        return _run_parts_or_whole(call, entry, group)
    if (rows := count_batch(call, entry.plan)) < group.size:
        without = OTHER_ROWS if entry.plan else NO_ROWS
        report_whole(call.module, FEW_ROWS if rows else without)
        _remember_whole(call, None, by_parts=False)
        return _run_whole(call)
    tuner = entry.tuner(call)
    if tuner is not None and tuner.has_chosen_whole:  # so have its parts
        tuner.count(call.elements, sharded=False)
        _remember_whole(call, tuner, by_parts=False)
        return _run_whole(call)
    if entry.plan is None and is_lazy(call.module):  # as nn.LazyLinear before its first call
        return _run_whole(call)
    result = _run_planned(call, entry, tuner, group, hooks)
    _note_result(call, entry, result, tuner, group)
    return result.output


def _note_result(
    call: BoundCall,
    entry: CacheEntry,
    result: CallResult,
    tuner: CallTuner | None,
    group: ShardGroup,
) -> None:
    """Remember for later calls what this one has come to, count it, and report a new reason."""
    if result.reading is not None and result.reading.structure != call.structure:
        call = result.reading
        plan_cache.note_reading(entry, call, group)
    entry.plan, entry.why_whole = result.plan, result.why_whole
    if result.why_whole is not None:
        plan_cache.compare_others(entry, call.module)
        report_whole(call.module, result.why_whole)
    elif tuner is not None:
        tuner.count(call.elements, sharded=result.is_sharded)
    if entry.plan is not None and result.is_sharded:
        call_counts.add_sharded(call, entry.plan, group)
    else:
        call_counts.add_whole(call)
    entry.finish(call)


def _find_obstacle(call: BoundCall) -> WholeReason | None:
    """What rules out sharding this call, whatever its module computes; None if nothing does."""
    if call_state.is_checkpointed:
        return _CHECKPOINTED
    if is_capturing_graph():
        return _CAPTURED
    if observer := find_observer():
        return WholeReason(
            f"where {observer}, which must be those of whole batches; other calls are not affected",
            ReasonKind.OF_ARGUMENTS,
        )
    return _CACHED if caches_weights(call.parts) else None


def _run_planned(
    call: BoundCall,
    entry: CacheEntry,
    tuner: CallTuner | None,
    group: ShardGroup,
    hooks: tuple[int, ...],
) -> CallResult:
    """Make a call that may be sharded, and learn whether those that follow may be."""
    plan = entry.plan
    is_new = entry.is_new(call, group.size) or hooks != entry.hooks
    if entry.values.are_of_objects:
        is_new = on_any_rank(is_new, group.transport)
    entry.hooks = hooks
    is_timed = tuner is not None and tuner.is_due
    if plan is None or is_new or is_timed:
        decision_counts.trials += 1
    if plan is None:
        return _find_plan(call, entry, group)
    if graphs := attributes_with_graphs(call, plan.kept) - plan.with_graphs:
        is_new, plan = True, replace(plan, with_graphs=plan.with_graphs | graphs)
    if is_new or entry.is_sampled(plan):
        gradients = is_new or not plan.has_values
        is_number_new = is_new and entry.values.has_first_change
        result = compare_traced(
            call, plan, entry.flow, group, gradients=gradients, is_number_new=is_number_new
        )
        if graphs and result.why_whole and result.why_whole.text == USES_FOREIGN_LEAF:
            entry.last_compared = entry.calls - 1  # no call before this one could use these graphs
        return _conclude(entry, call.module, result)
    if entry.is_checked() and (mismatch := arguments_mismatch(call.leaves, group.transport)):
        why = WholeReason(mismatch + entry.divided_calls())
        return CallResult(call.run_whole(), None, why, is_sharded=False)
    had_zeros = not plan.has_values and entry.calls <= _CALLS_WITH_ZEROS
    is_watched = had_zeros or entry.is_watched(call, plan, group)
    if tuner is not None and is_timed and not entry.is_branch_near:
        return run_timed(call, plan, tuner, group)  # not watched, which takes longer
    if is_watched:
        decision_counts.watched += entry.calls <= WATCHED_CALLS
        return _conclude(entry, call.module, run_watched(call, plan, entry.flow, group))
    plan, output = run_sharded(call, plan, group)
    return CallResult(output, plan)


def _conclude(entry: CacheEntry, module: nn.Module, result: CallResult) -> CallResult:
    """What a call that had a plan comes to, if it was compared."""
    if not result.is_compared:
        return result
    _note_changes(module, result.why_whole)
    if result.why_whole and result.why_whole.kind is ReasonKind.MOVES_PARAMETERS:
        entry.unproven = entry.divided_calls()
        return replace(result, plan=None, why_whole=None)  # the next call is compared in its place
    why = result.why_whole and result.why_whole.followed_by(entry.divided_calls())
    entry.last_compared = entry.calls
    return replace(result, why_whole=why)


def _find_plan(call: BoundCall, entry: CacheEntry, group: ShardGroup) -> CallResult:
    """Make the first call with this key, or one of the next where the first ones do not tell."""
    with entry.flow.traced() as trace:
        result = find_plan(call, group, is_first=entry.calls == 1)
    _note_changes(call.module, result.why_whole)
    why = result.why_whole and result.why_whole.followed_by(entry.unproven)
    entry.unproven, entry.last_compared = "", entry.calls
    if why is None:
        learn(trace, entry.flow, group)
    elif why.kind is ReasonKind.MAKES_PART and entry.calls <= MAX_COMPARED:
        report_whole(call.module, why.followed_by(" in this call"))  # they are made by now
        return replace(result, why_whole=None)
    elif why.kind in _IN_FIRST_CALL and entry.calls < _FIRST_CALLS:
        return replace(result, why_whole=None)
    if why != FEW_ROWS:
        temporary_modules.note(call.module, why)
    if result.plan is not None and result.plan.sums_without_rows is not None:
        plan_cache.compare_others(entry, call.module)
    return replace(result, why_whole=why)


def _note_changes(module: nn.Module, why: WholeReason | None) -> None:
    """Remember whether a comparison has found that a forward changes parameters."""
    if why is not None and why.kind in _OF_PARAMETERS:
        note_changed_parameters(module)


def _run_parts_or_whole(call: BoundCall, entry: CacheEntry, group: ShardGroup) -> Any:
    """Make a call that is not sharded itself; its parts are, if it has some and they gain."""
    tuner = None if call_state.whole_depth else entry.parts_tuner(call)
    if entry.has_parts and tuner is not None:
        return _run_by_cost(call, tuner, group, is_for_good=entry.why_whole is not None)
    if entry.why_whole is not None:
        _remember_whole(call, None, by_parts=entry.has_parts)
    return _run_by_parts(call) if entry.has_parts else call.run_whole()


def _run_by_cost(call: BoundCall, tuner: CallTuner, group: ShardGroup, *, is_for_good: bool) -> Any:
    """Shard the parts of a call that is whole, or not, by what takes less time.

    What a part costs is known only in part where its rows stay on their ranks: joining them may
    be left to what follows. So when all parts have decided, the whole call is timed both ways.
    """
    if tuner.has_chosen_whole:
        tuner.count(call.elements, sharded=False)
        if is_for_good:
            _remember_whole(call, tuner, by_parts=False)
        return call.run_whole()

    def run(by_parts: bool) -> Any:
        return _run_by_parts(call) if by_parts else call.run_whole()

    if tuner.begins_later:
        undecided, trials = decision_counts.undecided, decision_counts.trials
        output = _run_by_parts(call)
        if is_for_good and decision_counts.undecided == undecided:  # no part is ever sharded
            _remember_whole(call, None, by_parts=False)
        tuner.begins_later = decision_counts.trials > trials
        return output
    if tuner.is_due:
        output, is_sharded = time_run(call, tuner, group.transport, run)
    else:
        output, is_sharded = _run_by_parts(call), True
    tuner.count(call.elements, sharded=is_sharded)
    return output


def _run_whole(call: BoundCall) -> Any:
    call_counts.add_whole(call)
    return call.run_whole()


def _remember_whole(call: BoundCall, tuner: CallTuner | None, *, by_parts: bool) -> None:
    if is_compiled(call.parts):
        return
    rows = count_batch(call, None) if torch.is_grad_enabled() else 0
    known = WholeCall(rows, call.elements, tuner, by_parts, call.is_on_accelerator)
    whole_calls.add(call.module, call.args, call.kwargs, known)


def _run_by_parts(call: BoundCall) -> Any:
    with sharding_parts(call.module):
        return call.run_whole()


@contextmanager
def sharding_parts(module: nn.Module) -> Iterator[None]:
    """Inside, in a whole call of this module, calls of its parts are sharded."""
    with call_state.calling_parts(), own_forward.as_calls(module):
        yield
