"""How each output of a sharded call becomes that of the whole forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor

from instep.training.pytree import is_column
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call.compare.probes.dependencies import detached
from instep.unedited.sharded_call.compare.rounding import is_near
from instep.unedited.sharded_call.compare.tolerances import Tolerances
from instep.unedited.sharded_call.compare.whole.reference import Reference
from instep.unedited.sharded_call.plan.sharding_plan import OutputPlan, candidate_outputs
from instep.unedited.sharded_call.run.argument_writes import Unset
from instep.unedited.sharded_call.run.forward.joined_outputs import join_output, leaves_of_output
from instep.unedited.sharded_call.run.mappings import memory_order
from instep.unedited.sharded_call.run.region import Region
from instep.unedited.sharded_call.run.tensor_subclasses import (
    has_attributes_of,
    is_equal,
    is_subclass,
)


class OutputPlanner:
    """Plans the outputs of one sharded forward.

    Args:
        reference: the whole forward.
        tolerances: how far its outputs may be off.
        known: how they were joined in earlier calls; empty if there were none.
        region: the sharded call.
        is_proof: whether its arguments and gradients are such that they tell rows apart.
    """

    def __init__(
        self,
        reference: Reference,
        tolerances: Tolerances,
        known: tuple[OutputPlan, ...],
        region: Region,
        *,
        is_proof: bool,
    ) -> None:
        self._reference, self._tolerances = reference, tolerances
        self._known, self._region, self._is_proof = known, region, is_proof

    def plan_output(self, parts: Sequence[Any], k: int, *, in_cache: bool) -> OutputPlan:
        """How the ranks' `k`-th outputs become that of the whole forward. Raises
        ShardedCallError."""
        whole, local = self._reference.outputs[k], parts[0]
        if isinstance(whole, Tensor) and isinstance(local, Tensor):
            return self._plan_tensor(parts, k, in_cache=in_cache)
        if isinstance(whole, Unset) and isinstance(local, Unset) and self._known:
            return self._known[k]
        if is_column(whole) and is_column(local) and _is_concatenated(parts, whole, self._region):
            return OutputPlan("shard")
        if any(type(part) is not type(whole) or not is_equal(part, whole) for part in parts):
            raise ShardedCallError(f"it returns a {type(whole).__name__} that depends on the rows")
        known = self._known[k].numbers if self._known else frozenset()
        is_number = isinstance(whole, int | float | complex)
        return OutputPlan("replicate", numbers=known | {repr(whole)} if is_number else known)

    def _plan_tensor(self, parts: Sequence[Tensor], k: int, *, in_cache: bool) -> OutputPlan:
        """As `plan_output`, where the whole forward and this rank's return tensors."""
        whole, local = self._reference.outputs[k], parts[0]
        if is_subclass(whole) and not has_attributes_of(whole, local):
            raise ShardedCallError(
                f"it returns a {type(whole).__name__} whose attributes depend on the rows"
            )
        if in_cache and not whole.dim() and not whole.is_floating_point() and local.equal(whole):
            return OutputPlan("replicate")  # the length of a window, say; as a plain number would
        had_values = self._is_proof and _has_values(whole)
        known = self._known[k] if self._known else None
        candidates = list(candidate_outputs(local, whole, self._region.blocks[0]))
        if known is not None:  # it is kept as long as it can be, and replaced if nothing proves it
            like_known = [
                each for each in candidates if each == replace(known, is_lazy=False, given=None)
            ]
            candidates = like_known + [each for each in candidates if not known.has_values]
            had_values |= known.has_values
            if self._tolerances.is_proven:
                candidates = like_known
        for plan in candidates:
            joined = join_output(detached(parts), plan, self._region)
            if plan.placement == "shard" or self._tolerances.is_proven:
                matches = self._tolerances.matches_output(k, joined)
            else:  # a wrong mean may be near the right one
                matches = is_near(joined, whole)
            if matches:
                return replace(plan, has_values=had_values, order=memory_order(whole))
        count = len(self._reference.outputs)
        which = f" {k + 1} of {count}" if count > 1 else ""
        shape = f"a tensor of shape {list(whole.shape)}"
        raise ShardedCallError(f"its output{which}, {shape}, is not that of the whole batch")

    def plan_entries(self, parts: Sequence[Any], k: int, count: int) -> OutputPlan:
        """As `plan_output`, for a list with one entry for each row, and `count` leaves from the
        `k`-th output on."""
        plan = OutputPlan("entries", has_values=False)
        leaves = leaves_of_output(join_output(detached(parts), plan, self._region), plan)
        whole = self._reference.outputs[k : k + count]
        if len(leaves) != count:
            raise ShardedCallError("the entries of a list that it returns depend on the others")
        for place, (own, of_whole) in enumerate(zip(leaves, whole, strict=True), start=k):
            if isinstance(of_whole, Tensor) and isinstance(own, Tensor):
                has_shape = own.shape == of_whole.shape
                is_same = has_shape and self._tolerances.matches_output(place, own)
            else:
                is_same = type(own) is type(of_whole) and is_equal(own, of_whole)
            if not is_same:
                raise ShardedCallError("a list that it returns is not that of the whole batch")
        values = any(isinstance(x, Tensor) and _has_values(x) for x in whole)
        return replace(plan, has_values=self._is_proof and values)


def _has_values(whole: Tensor) -> bool:
    """Whether there is a finite number other than zero in it."""
    return bool(whole.isfinite().logical_and(whole).any())


def _is_concatenated(parts: Sequence[Any], whole: Any, region: Region) -> bool:
    """Whether all shards' lists, one after the other, are the whole one. Collective."""
    if len(whole) != region.blocks[0].total:
        return False
    lists = region.group.transport.all_gather_object(list(chain(*parts)))
    return type(parts[0]) is type(whole) and whole == type(whole)(chain(*lists))
