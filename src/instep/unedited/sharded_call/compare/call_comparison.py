"""One call: its whole forward, and sharded ones that are compared with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from instep.distributed.numbers import on_any_rank
from instep.training.pytree import flatten, leaves_in_caches, leaves_of, unflatten
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call.compare.checked_transport import attempt
from instep.unedited.sharded_call.compare.output_planner import OutputPlanner
from instep.unedited.sharded_call.compare.probes.dependencies import (
    COUPLED,
    depends_on_numbers,
    find_dependency,
    holds_for_zeros,
    note_eager_forward,
)
from instep.unedited.sharded_call.compare.probes.row_operations import RowOperations
from instep.unedited.sharded_call.compare.probes.unused_reductions import (
    branch_by_all_rows,
    depends_on_reductions,
)
from instep.unedited.sharded_call.compare.rounding import PERTURBATIONS, perturbed
from instep.unedited.sharded_call.compare.side_effects import observed
from instep.unedited.sharded_call.compare.snapshot import DRAWS_OUTSIDE_TORCH, Snapshot
from instep.unedited.sharded_call.compare.tolerances import Tolerances
from instep.unedited.sharded_call.compare.whole.reference import Reference
from instep.unedited.sharded_call.compare.whole.whole_gradients import StatePair
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.control_flow import floats_read, stop_at_branches
from instep.unedited.sharded_call.plan.division import Division, is_entries
from instep.unedited.sharded_call.plan.module_state.module_properties import is_compiled
from instep.unedited.sharded_call.plan.module_state.stored_parameters import (
    StoredParameter,
    find_stored_parameters,
)
from instep.unedited.sharded_call.plan.sharding_plan import OutputPlan, ShardingPlan, with_entries
from instep.unedited.sharded_call.run.argument_writes import write_back
from instep.unedited.sharded_call.run.forward.joined_outputs import (
    LocalOutputs,
    given_back,
    join_outputs,
    leaves_of_output,
    with_given,
)
from instep.unedited.sharded_call.run.forward.local_forward import run_local
from instep.unedited.sharded_call.run.random_numbers import DrawRowDims
from instep.unedited.sharded_call.run.region import Region, find_leaves, tag_outputs
from instep.unedited.sharded_call.shards.batch_sums import RowSums
from instep.unedited.sharded_call.shards.shard_group import ShardGroup
from instep.unedited.sharded_call.shards.shard_threads import next_sequence_number

USES_FOREIGN_LEAF = "its forward uses a tensor from outside that requires a gradient"
_READS_FLOATS = "its forward reads a float from a tensor (as by item) that depends on the rows"
_BY_NUMBERS = "its rows depend on each other where numbers among its arguments are others"
_FLOAT_TOLERANCE = 1e-3
_HAS_RUN, _HAS_OUTPUTS, _HAS_STATE, _HAS_GRADIENTS = range(1, 5)
"""How far a sharded call was the same as the whole one."""
NOTHING_RIGHT = (_HAS_RUN, 0)
"""The progress of a sharded call whose first output is not that of the whole one."""
ONLY_GRADIENTS_DIFFER = (_HAS_STATE, 0)
"""That of one whose outputs and state are those of the whole one, but not its gradients."""


class CallComparison:
    """A call, made whole once, and then sharded until it is the same or no reason is left why it
    should be."""

    def __init__(self, call: BoundCall, group: ShardGroup) -> None:
        self._group = group
        self.reference = Reference(call)
        self.call = self.reference.call
        self._tolerances = Tolerances(self.reference)
        self.sums: RowSums | None = None
        """Which of its sums are to be those of the whole batch when it is sharded; None: none."""
        self.known_outputs: tuple[OutputPlan, ...] = ()
        """How they were joined in earlier calls."""
        self.is_noisy = False
        """Whether earlier calls were the same only up to what rounding does to them."""
        self.is_number_new = False
        """Whether a number beside its rows has changed for the first time."""
        self.stored: tuple[StoredParameter, ...] | None = None
        """The places beside its own tables where aliases stand in for its parameters; None until
        they are looked for."""
        self._structure = self.reference.structure
        """Of what it returns, with lists that have one entry for each row as one leaf."""
        self._is_proof = False
        """Whether its arguments and gradients are such that they tell rows apart."""
        self._has_foreign_leaf = False
        """Whether a sharded call used a tensor from outside that requires a gradient."""
        self._floats: list[float] = []
        """What the last sharded call has read on this rank (see `floats_read`)."""
        self.progress = (0, 0)
        """How far the last sharded call was the same: `_HAS_RUN` and so on, and of a call that has
        run, how many of its outputs were right."""

    def read_as(self, call: BoundCall) -> None:
        """Divide the arguments as they are read in this one of the same calls."""
        self.call = self.reference.call = call.keeping(self.call.kept)

    def accept_rounding(self, plan: ShardingPlan) -> None:
        """With this plan it is the same in a higher precision; its own may round as it does."""
        self.known_outputs, self._tolerances.is_proven = plan.outputs, True

    def try_division(self, division: Division) -> tuple[tuple[ShardingPlan, Any] | None, str]:
        """The plan and what the call returns; or why not, and all is as the whole forward left it.

        Collective.
        """
        self._division = division
        if self.reference.forward.is_random and not self.reference.drawn:
            self.reference.note_draws()  # in a part of the batch another length may equal its rows
        if self.is_noisy and not self._tolerances.have_noise:
            self._tolerances.measure_noise()  # the first attempt would end in this
        while True:
            self.reference.before.restore()
            found, why = self._attempt()
            if found is not None:
                plan, joined = found
                return (plan, write_back(unflatten(joined, plan.structure), self.call)), ""
            if not self._has_learned():
                self.reference.after.restore()
                return None, why

    def _attempt(self) -> tuple[tuple[ShardingPlan, list[Any]] | None, str]:
        """The plan and the joined outputs, if all ranks have found the same as the whole
        forward."""
        has_lasting = self.reference.before.graph.has_lasting
        stopping = stop_at_branches() if has_lasting else nullcontext()
        with observed(is_silent=True), stopping:
            return attempt(
                lambda checked: self._compare(replace(self._group, transport=checked)),
                self._group.transport,
                checks_indices=self.call.is_on_accelerator,
            )

    def _has_learned(self) -> bool:
        """Whether more is known of the call now by which a difference may be explained."""
        transport, tolerances = self._group.transport, self._tolerances
        if self.stored is None and on_any_rank(self._has_foreign_leaf, transport):
            self.stored = find_stored_parameters(self.call.module)
            if self.stored:
                return True
        if on_any_rank(tolerances.needs_noise, transport):
            tolerances.measure_noise()
            return True
        if on_any_rank(tolerances.needs_sums, transport):
            tolerances.measure_sums()
            return True
        if not tolerances.flips and on_any_rank(tolerances.may_flip, transport):
            tolerances.flips = self._is_same_in_another_rounding()
            return tolerances.flips
        return False

    def _is_same_in_another_rounding(self) -> bool:
        """Whether the sharded call has the gradients of the whole one if its parameters are one
        rounding error away. Units that flip do not flip in each rounding; a wrong sum is always
        wrong."""
        for seed in range(PERTURBATIONS, 2 * PERTURBATIONS):  # not those that tell the noise
            self.reference.before.restore()
            with perturbed(self.call.module, seed):
                found, _ = self._attempt()
            if found is not None:
                return True
        return False

    def _compare(self, group: ShardGroup) -> tuple[ShardingPlan, list[Any]]:
        """Run the call sharded. Raises ShardedCallError if it is not the same."""
        call, reference = self.call, self.reference
        gradients = reference.gradients
        self.progress = (0, 0)
        has_different_rows = self._division.has_different_rows(call.leaves)
        self._is_proof = has_different_rows and (gradients is None or gradients.are_finite())
        region, local, start = self._run(group)
        after = Snapshot(call)
        why = self._tolerances.find_difference(after, StatePair(reference.before, reference.after))
        why = why or self._find_foreign_leaf(local, start) or self._find_other_floats()
        outputs = self._plan_outputs(local, region, why)
        self.progress = (_HAS_OUTPUTS, 0)
        if why:
            raise ShardedCallError(why)
        self.progress = ONLY_GRADIENTS_DIFFER
        plan = self._make_plan(outputs, region)
        tag_outputs(chain(*local), region)
        pairs = zip(join_outputs(local, plan, region), plan.outputs, strict=True)
        flat = [leaf for joined, how in pairs for leaf in leaves_of_output(joined, how)]
        if not self._tolerances.matches_gradients(flat):
            raise ShardedCallError("its gradients are not those of the whole batch")
        if gradients is not None and gradients.own_backward and gradients.last_backward:
            left = gradients.last_backward.after
            if why := self._tolerances.find_difference(left, gradients.own_backward):
                raise ShardedCallError(f"in backward {why}")
        self.progress = (_HAS_GRADIENTS, 0)
        joined = with_given(join_outputs(local, plan, region), local, plan, region, call)
        is_open = plan.has_reductions and not self._tolerances.is_proven
        if is_open and not holds_for_zeros(reference, plan, group):
            raise ShardedCallError("it divides by something else than its rows")
        is_first = not (self.known_outputs or self._tolerances.is_proven)
        operations = RowOperations()
        if is_first:
            note_eager_forward(reference, group)
        if is_first and (why := find_dependency(reference, plan, group, operations)):
            raise ShardedCallError(why)
        if is_first and depends_on_reductions(reference, plan, group, operations):
            raise ShardedCallError(COUPLED)
        if is_first and (why := branch_by_all_rows(operations, group)):
            raise ShardedCallError(why)
        if self.is_number_new and depends_on_numbers(reference, plan, group):
            raise ShardedCallError(_BY_NUMBERS)
        after.restore()  # what was computed since has left traces
        return plan, joined

    def _run(self, group: ShardGroup) -> tuple[Region, LocalOutputs, int]:
        """The forward on this rank's rows, its outputs, and the number of its first autograd node.

        Raises ShardedCallError if it prints, say, or returns another structure than the whole one.
        """
        call, reference = self.call, self.reference
        if group.is_virtual and reference.forward.draws_outside_torch:
            raise ShardedCallError(DRAWS_OUTSIDE_TORCH)  # its shards would draw one by one
        run = partial(
            run_local,
            call,
            self._division,
            group,
            is_random=reference.forward.is_random,
            row_dims=DrawRowDims(reference.drawn),
            stored=self.stored or (),
            sums=self.sums,
        )
        compiles = is_compiled(call.parts)  # which logs what it compiles
        if compiles and call.is_on_accelerator:
            with torch.compiler.set_stance("force_eager"):  # of what is fused no indices are seen
                run()
            reference.before.restore()
        start = next_sequence_number()
        with observed(is_silent=True, is_lasting_error=not compiles) as effects:
            region, local, structure = run()
            self._floats = floats_read()
        if effects.first is not None and not compiles:
            raise ShardedCallError(f"{effects.first.text} for a part of the batch")
        self._structure = reference.structure
        if structure != reference.structure and not group.is_virtual:
            self._structure = with_entries(reference.structure, structure, region.blocks[0])
            outputs, structure = flatten(
                unflatten([parts[0] for parts in local], structure), self._structure
            )
            local = [(output,) for output in outputs]
        if structure != self._structure:
            raise ShardedCallError("its outputs have another structure for a part of the batch")
        return region, local, 0 if group.is_virtual else start  # threads of shards begin with 0

    def _find_foreign_leaf(self, local: LocalOutputs, start: int) -> str:
        """Say that the outputs, whose first node has the number `start`, were computed from a
        tensor from outside; "" if not."""
        own = list(chain(*local))
        self._has_foreign_leaf = (self._group.is_virtual and self.reference.uses_older()) or (
            find_leaves(own, start) != []  # then the leaves are looked at in each call
            if self.stored
            else _uses_foreign_leaf(own, start, self.reference)
        )
        if not self._has_foreign_leaf:
            return ""
        return USES_FOREIGN_LEAF

    def _find_other_floats(self) -> str:
        """Say that the forward has read a float from a tensor that the whole one has not; "" if
        not. Nothing else tells what it does by them: how often a loop repeats, say."""
        whole = self.reference.forward.floats
        are_known = all(any(map(partial(_is_close, own), whole)) for own in self._floats)
        return "" if are_known or self._tolerances.is_proven else _READS_FLOATS

    def _plan_outputs(
        self, local: LocalOutputs, region: Region, why: str
    ) -> tuple[OutputPlan, ...]:
        """How each becomes that of the whole forward. Raises ShardedCallError, which says `why` the
        call is not the same if that is known."""
        reference = self.reference
        in_caches = leaves_in_caches(reference.structure)  # of which nobody reads most
        # Joined at once, an output would be no part of the graph of another one. Tensors that are
        # kept may be read by nobody, either.
        first_kept = len(reference.outputs) - reference.count_kept
        planner = OutputPlanner(
            reference, self._tolerances, self.known_outputs, region, is_proof=self._is_proof
        )
        outputs: tuple[OutputPlan, ...] = ()
        k = 0
        for parts, count in zip(local, self._count_leaves(), strict=True):
            self.progress = _HAS_RUN, k
            try:
                if count is None:
                    plan = planner.plan_output(parts, k, in_cache=in_caches[k])
                else:
                    plan = planner.plan_entries(parts, k, count)
            except ShardedCallError as error:
                raise ShardedCallError(why or str(error)) from None
            is_lazy = in_caches[k] or k >= first_kept or reference.used_by_others[k]
            plan = replace(plan, is_lazy=is_lazy)
            if count is None:
                plan = given_back(plan, reference.outputs[k], self.call)
            outputs += (plan,)
            k += 1 if count is None else count
        return outputs

    def _count_leaves(self) -> list[int | None]:
        """The number of leaves of each output that is a list with one entry for each row; None for
        others."""
        reference = self.reference
        whole = unflatten(reference.outputs, reference.structure)
        outputs, _ = flatten(whole, self._structure)
        return [len(leaves_of(out)) if is_entries(out) else None for out in outputs]

    def _make_plan(self, outputs: tuple[OutputPlan, ...], region: Region) -> ShardingPlan:
        """Collective. Raises ShardedCallError where ranks add up over rows in other places."""
        reference = self.reference
        forward = reference.forward
        generators = tuple(reference.before.graph.generators)
        return ShardingPlan(
            division=region.division,
            outputs=outputs,
            structure=self._structure,
            is_random=forward.is_random or bool(generators),  # its own may begin to draw later
            generators=generators,
            draw_rows=region.row_dims.found,
            draws_outside_torch=forward.draws_outside_torch,
            changes_attributes=forward.changes_attributes,
            stored=self.stored or (),
            kept=self.call.kept,
            sums_without_rows=(
                self.sums.same_places(region.group.transport) if self.sums else None
            ),
            files=forward.files,
            is_noisy=self._tolerances.have_noise,
        )


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_FLOAT_TOLERANCE) or (a != a and b != b)


def _uses_foreign_leaf(outputs: Sequence[Any], start: int, reference: Reference) -> bool:
    """Whether these were computed from something that requires a gradient and is neither an
    argument nor a parameter of the module, nor made by the forward, another one each time."""
    leaves = find_leaves(outputs, start)
    if not leaves:
        return leaves is None
    call = reference.call
    known = {id(t) for t in (*nn.Module.parameters(call.module), *call.tensors)}
    others = {id(leaf) for leaf in reference.leaves()} - known
    return len(leaves) != len(others) or any(id(leaf) in others | known for leaf in leaves)
