"""Whether a module's call may be sharded: the whole forward and the sharded one are run from the
same state, and their outputs, the state that they leave, and their gradients are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from instep.distributed.numbers import on_any_rank
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call.compare.call_comparison import (
    NOTHING_RIGHT,
    ONLY_GRADIENTS_DIFFER,
    USES_FOREIGN_LEAF,
    CallComparison,
)
from instep.unedited.sharded_call.compare.higher_precision import (
    compare_in_float64,
    compare_in_full_precision,
)
from instep.unedited.sharded_call.compare.rank_mismatch import first_mismatch, first_reason
from instep.unedited.sharded_call.compare.side_effects import observed
from instep.unedited.sharded_call.compare.snapshot import Snapshot
from instep.unedited.sharded_call.compare.whole.reference import Reference
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.division import (
    Division,
    candidate_divisions,
    has_layout_without_rows,
    has_other_lengths,
    is_entries,
)
from instep.unedited.sharded_call.plan.sharding_plan import CallResult, ShardingPlan
from instep.unedited.sharded_call.plan.whole_reasons import (
    FEW_ROWS,
    SHORT_FIRST,
    ReasonKind,
    WholeReason,
)
from instep.unedited.sharded_call.run.execution import run_sharded
from instep.unedited.sharded_call.run.forward.local_forward import gather_arguments
from instep.unedited.sharded_call.run.region import call_state
from instep.unedited.sharded_call.shards.batch_sums import RowSums
from instep.unedited.sharded_call.shards.shard_group import ShardGroup

_SPARSE = WholeReason(
    "where it is given a sparse tensor of whose layout no rows can be taken (of torch.sparse_coo "
    "they can)",
    ReasonKind.OF_ARGUMENTS,
)
_NO_BATCH = WholeReason("no batch among its arguments")
_KEEPS_TENSORS = WholeReason("its forward sets attributes to tensors", ReasonKind.KEEPS_TENSORS)
_MAX_READINGS = 3
_Search = Callable[[CallComparison, WholeReason | None, ShardGroup], CallResult]
_READS_COMPUTED = WholeReason(USES_FOREIGN_LEAF)
_RETURNS_OTHERS = WholeReason(
    "it returns something else than when its calls were first divided (another number of outputs, "
    "or others)"
)


def find_plan(call: BoundCall, group: ShardGroup, *, is_first: bool) -> CallResult:
    """Find a plan for calls like this one, by trying the candidates.

    Side effects are those of one forward. `is_first`: whether there was no call like it before.
    Collective.
    """
    comparison, why = _begin(call, group)
    if why is None and is_first:
        begins = comparison.reference.forward.begins_to_keep
        why = first_reason(_KEEPS_TENSORS if begins else None, group.transport)
    return _apart_from_script(comparison, why, group, _search)


def _apart_from_script(
    comparison: CallComparison, why: WholeReason | None, group: ShardGroup, search: _Search
) -> CallResult:
    """As `search`, unless `why` rules it out already, with arguments of which the script's own
    graph is no part where a backward would go on through it to what is compared: the script's hooks
    there, and its autograd functions, would be called once too often, and what it retains of
    gradients there would have those of the comparison. Collective."""
    reference, transport = comparison.reference, group.transport
    if why is not None or not on_any_rank(reference.uses_itself(), transport):
        return search(comparison, why, group)
    reference.release()
    reference.before.restore()
    with observed(is_silent=True):
        apart = CallComparison(comparison.call.without_graph(), group)
    result = replace(search(apart, None, group), output=None)
    if result.plan is None:
        reference.after.restore()
        return replace(result, output=reference.value())
    reference.before.restore()
    call = comparison.call if result.reading is None else comparison.call.read_like(result.reading)
    plan, output = run_sharded(call, result.plan, group)
    return replace(result, output=output, plan=plan, reading=result.reading and call)


def _search(comparison: CallComparison, why: WholeReason | None, group: ShardGroup) -> CallResult:
    """As `find_plan`, unless `why` rules it out already."""
    divisions = [
        (reading, division)
        for reading in _readings(comparison.call, group)
        for division in candidate_divisions(reading.leaves, at_least=group.size)
    ]
    if why is None:
        why = _why_not_to_try(comparison, group, has_divisions=bool(divisions))
    if why is not None:
        return CallResult(comparison.reference.value(), None, why, is_sharded=False)
    kinds_of_sums = _kinds_of_sums(comparison.reference, group)
    furthest, text = NOTHING_RIGHT, ""
    for reading, division in divisions:
        comparison.read_as(reading)
        for make_sums in kinds_of_sums:
            comparison.sums = make_sums()
            found, reason = _try(comparison, division, group)
            if found is not None:
                plan, output = found
                return CallResult(output, plan, reading=reading)
            is_read_so = any(map(is_entries, reading.leaves)) and furthest == NOTHING_RIGHT
            if comparison.sums is None and (
                comparison.progress > furthest or not text or is_read_so
            ):
                furthest, text = max(comparison.progress, furthest), reason
    why = _why_none_is_right(comparison, [call for call, _ in divisions], furthest, text, group)
    return CallResult(comparison.reference.value(), None, why, is_sharded=False)


def _why_not_to_try(
    comparison: CallComparison, group: ShardGroup, *, has_divisions: bool
) -> WholeReason | None:
    """What rules out all divisions before one is tried; None: the gradients of the whole forward
    are there to compare with. Collective."""
    if has_divisions:
        return _compute_gradients(comparison.reference, group)
    if any(map(has_layout_without_rows, comparison.call.leaves)):
        return _SPARSE
    return FEW_ROWS if comparison.call.rows < group.size else _NO_BATCH


def _kinds_of_sums(reference: Reference, group: ShardGroup) -> list[Callable[[], RowSums | None]]:
    """What to take the outputs of parts for, likely ones first: for those of their rows, or for
    terms of sums over all rows. Collective."""
    kinds: list[Callable[[], RowSums | None]] = [lambda: None]
    if not group.is_virtual and on_any_rank(bool(reference.forward.sum_lengths), group.transport):
        of_all = partial(RowSums, reference.forward.sum_lengths)
        kinds.insert(0 if reference.returns_scalar else 1, of_all)
        kinds.append(partial(of_all, only_floats=True))
    return kinds


def _why_none_is_right(
    comparison: CallComparison,
    readings: Sequence[BoundCall],
    furthest: tuple[int, int],
    text: str,
    group: ShardGroup,
) -> WholeReason:
    """Why each division that was tried, of these readings, differs from the whole call; `text` is
    that of the one that came `furthest`. Collective."""
    if all(reading.rows < group.size for reading in readings):
        return FEW_ROWS
    if furthest == NOTHING_RIGHT and comparison.call.rows < group.size:
        return FEW_ROWS  # a list is one of several tensors, not of samples
    changes_state = comparison.reference.forward.changes_state
    sets_up = on_any_rank(changes_state, group.transport)
    are_short = all(reading.has_short_first(group.size) for reading in readings)
    if furthest == NOTHING_RIGHT and are_short:
        return SHORT_FIRST
    counts = comparison.call.list_lengths() if group.is_virtual else []
    if furthest == NOTHING_RIGHT and any(count >= group.size for count in counts):
        text = "lists that have an entry for each sample are not divided with --bitwise"
    return WholeReason(text, ReasonKind.SETS_UP if sets_up else ReasonKind.LASTING)


def _readings(call: BoundCall, group: ShardGroup) -> list[BoundCall]:
    """The call as it is read, and in other ways, likely ones first: as if some lists had an entry
    for each sample, or as if none had."""
    if group.is_virtual:
        return [call]
    counts = [count for count in call.list_lengths() if count >= group.size]
    readings = map(call.by_entries, [*counts[:_MAX_READINGS], None])
    others = [reading for reading in readings if reading.structure != call.structure]
    are_ragged = any(has_other_lengths(leaf) for reading in others for leaf in reading.leaves)
    return [*others, call] if are_ragged else [call, *others]


def verify_plan(
    call: BoundCall,
    plan: ShardingPlan,
    group: ShardGroup,
    *,
    gradients: bool,
    is_number_new: bool = False,
) -> CallResult:
    """Make a planned call and compare it with the whole one once more, and their `gradients`.

    `is_number_new`: whether a number beside its rows has changed for the first time. Collective."""
    comparison, why = _begin(call.keeping(plan.kept), group)
    comparison.is_number_new = is_number_new
    if why is None and on_any_rank(comparison.reference.forward.kept != plan.kept, group.transport):
        why = _KEEPS_TENSORS if comparison.reference.forward.begins_to_keep else None
        why = first_reason(why, group.transport)
        result = _apart_from_script(comparison, why, group, _search)
        return replace(result, is_compared=True)
    verify = partial(_verify, plan, gradients=gradients)
    if gradients:
        return _apart_from_script(comparison, why, group, verify)
    return verify(comparison, why, group)


def _verify(
    plan: ShardingPlan,
    comparison: CallComparison,
    why: WholeReason | None,
    group: ShardGroup,
    *,
    gradients: bool,
) -> CallResult:
    """As `verify_plan`, unless `why` rules it out already."""
    comparison.stored, comparison.known_outputs = plan.stored, plan.outputs
    comparison.is_noisy = plan.is_noisy
    if why is None:
        is_changed = not comparison.reference.has_structure(plan.structure)
        why = first_reason(_RETURNS_OTHERS if is_changed else None, group.transport)
    if plan.sums_without_rows is not None:
        comparison.sums = RowSums(None, plan.sums_without_rows)
    if gradients and why is None:
        why = _compute_gradients(comparison.reference, group)
    if why is None:
        same, text = _try(comparison, plan.division, group)
        if same is not None:
            later, output = same
            return CallResult(output, plan.updated(later), is_compared=True)
        why = WholeReason(text)
    return CallResult(comparison.reference.value(), None, why, is_sharded=False, is_compared=True)


def _begin(call: BoundCall, group: ShardGroup) -> tuple[CallComparison, WholeReason | None]:
    """Make the whole call, and say what rules out sharding before it is tried. Collective."""
    mismatch = first_mismatch(call.module, call.leaves, group.transport)
    comparison = CallComparison(gather_arguments(call), group)
    if mismatch is not None:
        return comparison, mismatch
    joins_attributes = not (group.is_virtual or call_state.saves_attributes)
    why = comparison.reference.check_supported(joins_attributes=joins_attributes)
    return comparison, first_reason(why, group.transport)


def check_lasting_changes(call: BoundCall, before: Snapshot, group: ShardGroup) -> None:
    """Raise ShardedCallError on all ranks where forwards that do not count have changed on some
    of them, since `before`, what nothing sets back. Collective."""
    change = before.graph.find_lasting_change()
    if why := first_reason(WholeReason.of(change), group.transport):
        raise ShardedCallError(
            f"{type(call.module).__name__} was computed for parts of a batch, to see whether it "
            f"can be divided: for these, not for the whole batch, {why.text}, which nothing sets "
            "back. Run this script with --plain, or let the loop that calls it do that."
        )


def _try(
    comparison: CallComparison, division: Division, group: ShardGroup
) -> tuple[tuple[ShardingPlan, Any] | None, str]:
    """As `_try_precisions`, where no rank has changed by it what nothing sets back. Collective.
    Raises ShardedCallError."""
    found, why = _try_precisions(comparison, division, group)
    check_lasting_changes(comparison.call, comparison.reference.before, group)
    return found, why


def _try_precisions(
    comparison: CallComparison, division: Division, group: ShardGroup
) -> tuple[tuple[ShardingPlan, Any] | None, str]:
    """As `CallComparison.try_division`, first in full precision where the call's own is lower, and
    in float64 where nothing but gradients differ. Collective.
    """
    plan, why = compare_in_full_precision(comparison, division, group)
    if why:
        return None, why
    if plan is not None:
        comparison.accept_rounding(plan)
    found, why = comparison.try_division(division)
    if found is not None or plan is not None:
        return found, why
    # A rank may have found nothing wrong before another one did.
    if not on_any_rank(comparison.progress != ONLY_GRADIENTS_DIFFER, group.transport):
        plan = compare_in_float64(comparison, division, group)
        if plan is not None:
            comparison.accept_rounding(plan)
            found, why = comparison.try_division(division)
    return found, why


def _compute_gradients(reference: Reference, group: ShardGroup) -> WholeReason | None:
    """Compute those of the whole forward; says why that cannot be. Collective."""
    why = first_reason(_READS_COMPUTED if reference.reads_computed() else None, group.transport)
    if why is not None:
        return why
    try:
        reference.compute_gradients()
    except ShardedCallError as error:
        why = WholeReason(str(error))
    except RuntimeError as error:  # it has freed the graph of an output
        sentence = str(error).partition(". ")[0].rstrip(".")
        text = f"gradients of its outputs cannot be computed ({sentence})"
        why = WholeReason(text)
    return first_reason(why, group.transport)
