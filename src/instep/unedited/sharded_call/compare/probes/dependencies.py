"""Whether a plan that holds for a call's arguments also holds for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.transport import Transport
from instep.distributed.numbers import on_any_rank
from instep.training.blocks import Block
from instep.training.pytree import flatten, leaves_of, unflatten
from instep.unedited.errors import ShardedCallError
from instep.unedited.objects.script_code import names_in
from instep.unedited.sharded_call.compare.checked_transport import attempt
from instep.unedited.sharded_call.compare.probes.changed_leaves import (
    keep_beginnings,
    keep_half,
    mapped,
    with_all_labels,
    with_large_ends,
    with_large_labels,
    with_nan,
    with_one_label,
    with_other_numbers,
    with_other_values,
    with_small_labels,
    zeroed,
)
from instep.unedited.sharded_call.compare.probes.row_operations import RowOperations
from instep.unedited.sharded_call.compare.rounding import (
    LEAST_ERROR,
    NOISE_FACTOR,
    PERTURBATIONS,
    finite_error,
    is_near,
    output_tolerance,
    perturbed,
)
from instep.unedited.sharded_call.compare.side_effects import observed
from instep.unedited.sharded_call.compare.whole.reference import Reference
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.control_flow import probe_flow
from instep.unedited.sharded_call.plan.division import is_entries
from instep.unedited.sharded_call.plan.module_state.module_properties import is_compiled
from instep.unedited.sharded_call.plan.sharding_plan import OutputPlan, ShardingPlan
from instep.unedited.sharded_call.run.argument_writes import run_whole
from instep.unedited.sharded_call.run.forward.joined_outputs import join_output
from instep.unedited.sharded_call.run.forward.local_forward import run_planned
from instep.unedited.sharded_call.run.region import Region
from instep.unedited.sharded_call.run.tensor_subclasses import as_plain
from instep.unedited.sharded_call.shards.reductions import noted_lengths
from instep.unedited.sharded_call.shards.shard_group import ShardGroup

_FACTORS = ((8.0, -8.0), (8.0, 0.125))
"""By which floats of one row after the other are multiplied; the second where the first ones prove
nothing."""
_OF_ENDS = (2.0**16, -(2.0**16))
"""By which floats of two rows are multiplied."""
_NUMBERS = (8.0, -8.0)
"""By which numbers beside rows are multiplied."""
_OF_NAN = frozenset(("isnan", "isfinite", "isinf", "nan_to_num", "nanmean", "nansum", "nanmedian"))

_Change = Callable[[BoundCall, Sequence[int | None], int], BoundCall]
"""Gives the rows of a call other values, in one of two ways."""
_SHAPES = "the shape of what it returns depends on the values in its rows"
COUPLED = "its rows depend on each other where their values are others"


def holds_for_zeros(reference: Reference, plan: ShardingPlan, group: ShardGroup) -> bool:
    """Whether a plan with means or sums over rows also holds for other arguments. Collective.

    A mean over kept tokens looks like one over rows as long as all are kept. So about half of the
    arguments' elements are set to zero, which is as good a class, token or mask as any; or, where
    the whole forward refuses that, the ends of its rows.
    """
    generator = torch.Generator().manual_seed(0)
    call, before = reference.call, reference.before
    probes = [(keep_half, False), (keep_beginnings, False)]
    probes += [(keep_half, True)] if any(map(is_entries, call.leaves)) else []
    for kept, is_of_integers in probes:
        leaves = [
            zeroed(leaf, dim, kept, generator, only_integers=is_of_integers)
            for leaf, dim in zip(call.leaves, plan.division.dims, strict=True)
        ]
        other = call.with_leaves(leaves)
        before.restore()
        try:
            wholes, structure = flatten(_values_of(other, reference), plan.structure)
            break
        except Exception:  # of the script's forward
            if (kept, is_of_integers) == probes[-1]:
                raise
    before.restore()
    region, local, local_structure = run_planned(other, plan, group)
    return structure == local_structure and all(
        joined.shape == whole.shape and is_near(joined, whole)
        for parts, how, whole in zip(local, plan.outputs, wholes, strict=True)
        for joined, whole in _tensor_pairs(parts, how, whole, region)
    )


def _values_of(call: BoundCall, reference: Reference) -> Any:
    """What the whole forward returns for the arguments of `call`, from the state before it."""
    if reference.is_released and call.module.training:  # save another graph's memory
        with suppress(RuntimeError), torch.no_grad(), autocast_cache_off():
            return run_whole(call)  # which may compute gradients itself
        reference.before.restore()
    return run_whole(call)


def find_dependency(
    reference: Reference, plan: ShardingPlan, group: ShardGroup, operations: RowOperations
) -> str:
    """Say how, by this plan, the outputs are clearly others for arguments of other values; "" if
    they are not. Notes the forward's `operations`.

    A condition for each element, as of `torch.where`, may have a side that no row of the script's
    first batches meets, and a term of the whole batch there. So floats are multiplied, of each row
    one set to zero, and the ends of rows of whole numbers and masks, too; where the forward names
    NaN, some floats are. Rows may also depend on each other where they have the same whole number,
    a label: so all rows get that of one. Or only where they have a label that none of them has yet,
    or a weight or mask that is still zero: so they get all labels up to the largest, and ones. Or
    by the largest number of the batch, which is the same in all parts so far: so a half of it gets
    smaller ones. What fails, is not finite or takes another branch with such arguments proves
    nothing; values that differ must differ twice. Collective. Leaves another state behind.
    """
    call, division = reference.call, plan.division
    dims = [None if k == division.offsets else dim for k, dim in enumerate(division.dims)]
    found: str | None = None
    for factors in _FACTORS:
        others = (with_other_values(call, dims, factors, seed) for seed in range(2))
        found = _find_difference(reference, plan, group, others, operations)
        if found is not None:
            break
    if found:
        return found
    count = division.count_rows(call.leaves) or 0
    for factor in _OF_ENDS:
        of_others = partial(_error_between_ends, count)
        others = (with_large_ends(call, dims, seed, factor=factor) for seed in range(2))
        if _find_difference(reference, plan, group, others, error=of_others) == COUPLED:
            return COUPLED
    kinds: list[tuple[tuple[int, int], list[_Change]]] = [
        ((0, -1), [with_one_label]),
        ((0, 1), [with_large_labels, with_all_labels]),  # large ones may be out of range
        ((0, 1), [with_small_labels]),
    ]
    if _names_nan(reference):
        kinds.append(((0, 1), [with_nan]))
    for numbers, changes in kinds:
        for change in changes:
            others = (change(call, dims, number) for number in numbers)
            unknown = None if operations.are_known else operations
            found = _find_difference(reference, plan, group, others, unknown)
            if found == COUPLED:
                return COUPLED
            if found == "":
                break
    return ""


def depends_on_numbers(reference: Reference, plan: ShardingPlan, group: ShardGroup) -> bool:
    """Whether by this plan the outputs are clearly others where the call gets other numbers beside
    its rows: a weight of what goes over the rows may be zero still. As `find_dependency`."""
    call, dims = reference.call, plan.division.dims
    return any(
        _find_difference(
            reference,
            plan,
            group,
            (with_other_numbers(call, dims, seed, factor=factor) for seed in range(2)),
        )
        == COUPLED
        for factor in _NUMBERS
    )


def _find_difference(
    reference: Reference,
    plan: ShardingPlan,
    group: ShardGroup,
    others: Iterator[BoundCall],
    operations: RowOperations | None = None,
    error: _Error = finite_error,
) -> str | None:
    """As `find_dependency`, for the first of these calls; the next one confirms that rows depend on
    each other. None where it proves nothing. Collective."""
    found = _try_other(next(others), reference, plan, group, operations, error)
    if found == COUPLED:
        found = _try_other(next(others), reference, plan, group, None, error) or ""
    return found


def _try_other(
    other: BoundCall,
    reference: Reference,
    plan: ShardingPlan,
    group: ShardGroup,
    operations: RowOperations | None,
    error: _Error,
) -> str | None:
    call = reference.call
    if all(leaf is own for leaf, own in zip(other.leaves, call.leaves, strict=True)):
        return None
    with probe_forwards(call) as is_other:
        found, _ = attempt(
            lambda checked: _probe(
                other, reference, plan, replace(group, transport=checked), operations, error
            ),
            group.transport,
            checks_indices=call.is_on_accelerator,
        )
        if on_any_rank(found is None or is_other(), group.transport):
            return None
    if on_any_rank(found == _SHAPES, group.transport):
        return _SHAPES
    return COUPLED if on_any_rank(found == COUPLED, group.transport) else ""


def _probe(
    call: BoundCall,
    reference: Reference,
    plan: ShardingPlan,
    group: ShardGroup,
    operations: RowOperations | None,
    error_of: _Error,
) -> str | None:
    """Say in what outputs differ by more than rounding; None if none of them is finite.

    Raises ShardedCallError if they have another structure, and whatever the forward raises.
    """
    reference.before.restore()
    with operations.noted(of_whole=True) if operations else nullcontext():
        wholes, structure = flatten(run_whole(call), plan.structure)
    reference.before.restore()
    with operations.noted(of_whole=False) if operations else nullcontext():
        region, local, local_structure = run_planned(call, plan, group)
    if structure != local_structure:
        raise ShardedCallError("its outputs have another structure for a part of the batch")
    outputs = [
        (k, parts, how, whole)
        for k, (parts, how, whole) in enumerate(zip(local, plan.outputs, wholes, strict=True))
        if isinstance(whole, Tensor)
    ]
    first, _ = flatten(unflatten(reference.outputs, reference.structure), plan.structure)
    has_other_shapes = any(whole.shape != first[k].shape for k, _, _, whole in outputs)
    fit = all(
        _fits(part, whole, how, block)
        for _, parts, how, whole in outputs
        for part, block in zip(parts, region.blocks, strict=True)
    )
    if on_any_rank(has_other_shapes or not fit, group.transport):
        return _SHAPES
    errors = {}
    for k, parts, how, whole in outputs:
        joined = as_plain(join_output(detached(parts), how, region))
        if not whole.is_floating_point():
            continue
        if (error := _measure(error_of, joined, whole, how)) is not None:
            errors[k] = error
    if not errors:
        return None
    far = {
        k: error
        for k, error in errors.items()
        if error > max(LEAST_ERROR, 10 * output_tolerance(wholes[k]))
    }
    for seed in range(PERTURBATIONS if far else 0):
        reference.before.restore()
        with perturbed(call.module, seed):
            again = leaves_of(run_whole(call))
        noises = {k: _measure(error_of, again[k], wholes[k], plan.outputs[k]) or 0.0 for k in far}
        far = {k: error for k, error in far.items() if error > NOISE_FACTOR * noises[k]}
    return COUPLED if far else ""


_Error = Callable[[Tensor, Tensor], float | None]
"""How far an output is off; with rows these are in the first dimension."""


def _measure(error: _Error, actual: Tensor, whole: Tensor, how: OutputPlan) -> float | None:
    if how.placement != "shard":
        return finite_error(actual, whole)
    return error(actual.movedim(how.dim, 0), whole.movedim(how.dim, 0))


def _error_between_ends(count: int, actual: Tensor, whole: Tensor) -> float | None:
    """How far the row is off that is farthest, of so many rows but for the first and the last one:
    relative to its own norm, or to that of most."""
    if actual.shape != whole.shape:
        return finite_error(actual, whole)
    of_each = len(whole) // max(1, count)
    actual, whole = (x[of_each : len(x) - of_each] for x in (actual, whole))
    if not len(whole):
        return None
    own, other = actual.reshape(len(whole), -1).double(), whole.reshape(len(whole), -1).double()
    finite = (own.isfinite() & other.isfinite()).all(1)
    if not finite.any():
        return None
    norms = other[finite].norm(dim=1)
    floors = norms.clamp(min=float(norms.median()))
    differences = (own - other)[finite].norm(dim=1)
    ratios = torch.where(differences > 0, differences / floors, 0.0)
    return float(ratios.max())


def _fits(part: Tensor, whole: Tensor, how: OutputPlan, block: Block) -> bool:
    """Whether a shard's output has its share of the rows of the whole one."""
    if how.placement != "shard":
        return part.shape == whole.shape
    shape, others = list(part.shape), list(whole.shape)
    return len(shape) == len(others) and (
        shape.pop(how.dim) * block.total == others.pop(how.dim) * block.count and shape == others
    )


def _names_nan(reference: Reference) -> bool:
    """Whether functions that the forward leads to tell NaN from numbers."""
    functions = reference.before.graph.functions
    return any(not _OF_NAN.isdisjoint(names_in(each.__code__)) for each in functions)


def _tensor_pairs(
    parts: Sequence[Any], how: OutputPlan, whole: Any, region: Region
) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of a joined output and of the whole one, if they are as many."""
    if isinstance(whole, Tensor):
        yield join_output(detached(parts), how, region), whole
    elif how.placement == "entries":
        joined, wholes = leaves_of(join_output(detached(parts), how, region)), leaves_of(whole)
        for one, other in zip(joined, wholes, strict=True):
            if isinstance(one, Tensor) and isinstance(other, Tensor):
                yield one, other


def detached(parts: Sequence[Any]) -> list[Any]:
    """These parts of an output, tensors or lists with one entry for each row, without graphs."""
    return [
        mapped(part, lambda x, _: x.detach()) if is_entries(part) else part.detach()
        for part in parts
    ]


def note_eager_forward(reference: Reference, group: ShardGroup) -> None:
    """Run a compiled module's forward once as it is written, so that its branches are known to the
    trials, which do that, and the reductions that it computes. Collective."""
    if not is_compiled(reference.call.parts):
        return

    def run(_: Transport) -> None:
        reference.before.restore()
        run_whole(reference.call)

    forward = reference.forward
    with (
        _forwards_without_effects(reference.call),
        noted_lengths(forward.sum_lengths, forward.reduction_lengths),
    ):
        attempt(run, group.transport)


@contextmanager
def probe_forwards(call: BoundCall) -> Iterator[Callable[[], bool]]:
    """Inside, forwards are made that do not count, without gradients, and nothing is left of them;
    yields whether they have come to a branch that no other one has taken."""
    with probe_flow() as is_other, _forwards_without_effects(call):
        yield is_other


@contextmanager
def _forwards_without_effects(call: BoundCall) -> Iterator[None]:
    """Inside, forwards leave nothing; those of compiled modules run as they are written, since they
    would be compiled anew for other values."""
    is_eager = is_compiled(call.parts)
    stance = torch.compiler.set_stance("force_eager") if is_eager else nullcontext()
    quiet = observed(is_silent=True, is_lasting_error=True)
    with torch.no_grad(), autocast_cache_off(), quiet, stance:
        yield


@contextmanager
def autocast_cache_off() -> Iterator[None]:
    """Inside, autocast casts parameters anew, and keeps nothing of it: a parameter that was cast
    where gradients are off would have none in the script's next call."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
