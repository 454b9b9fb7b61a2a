"""The module runs on the rows of each of this rank's shards."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.training.pytree import Structure, flatten, unflatten, versions
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.division import Division, is_entries
from instep.unedited.sharded_call.plan.module_state.stored_parameters import StoredParameter
from instep.unedited.sharded_call.plan.sharding_plan import ShardingPlan
from instep.unedited.sharded_call.run.argument_writes import ArgumentWatch
from instep.unedited.sharded_call.run.forward.joined_outputs import LocalOutputs
from instep.unedited.sharded_call.run.grad_sums import alias_parameters
from instep.unedited.sharded_call.run.mappings import (
    copy_to_region,
    pass_to_region,
    scatter_entries,
    scatter_to_region,
)
from instep.unedited.sharded_call.run.random_numbers import DrawRowDims
from instep.unedited.sharded_call.run.region import Region
from instep.unedited.sharded_call.run.sharded_output import ShardedOutput
from instep.unedited.sharded_call.shards.batch_sums import RowSums
from instep.unedited.sharded_call.shards.module_tables import ModuleTables
from instep.unedited.sharded_call.shards.shard_group import ShardGroup
from instep.unedited.sharded_call.shards.shard_threads import (
    BranchError,
    ShardThreads,
    next_sequence_number,
)


def run_planned(
    call: BoundCall, plan: ShardingPlan, group: ShardGroup
) -> tuple[Region, LocalOutputs, Structure]:
    """As `run_local`, with the plan's division and draws."""
    return run_local(
        call,
        plan.division,
        group,
        is_random=plan.is_random,
        row_dims=DrawRowDims(found=plan.draw_rows),
        stored=plan.stored,
        sums=None if plan.sums_without_rows is None else RowSums(None, plan.sums_without_rows),
        like=plan.structure,
        notes_given=any(how.given is not None for how in plan.outputs),
    )


def run_local(
    call: BoundCall,
    division: Division,
    group: ShardGroup,
    *,
    is_random: bool,
    row_dims: DrawRowDims,
    stored: Sequence[StoredParameter],
    sums: RowSums | None,
    like: Structure = None,
    notes_given: bool = True,
) -> tuple[Region, LocalOutputs, Structure]:
    """Call the module with the rows of each of this rank's shards; returns its outputs, flat, and
    their structure. What is one leaf of `like` is one leaf of it.

    Raises ShardedCallError where it changes its arguments otherwise than by items of dicts: the
    script would not see it.
    """
    total = division.count_rows(call.leaves)
    assert total is not None
    region = Region(group.blocks(total), division, group, is_random, row_dims, sums)
    region.gradients.module = weakref.ref(call.module)
    if len(region.blocks) == 1:
        region.gradients.block = region.blocks[0]
    by_leaf = [
        _local_leaf(leaf, dim, region) for leaf, dim in zip(call.leaves, division.dims, strict=True)
    ]
    for place, parts in division.slices(call.leaves, region.blocks).items():
        by_leaf[place] = parts
    if torch.is_grad_enabled():
        region.inputs = [x for x in call.tensors if x.requires_grad]
    before = versions(call.tensors)
    shards = [_ShardForward(call, leaves, region, like) for leaves in zip(*by_leaf, strict=True)]
    with region:
        tables = _show_aliases(call.parts, region, stored)
        try:
            if len(shards) == 1:
                first = next_sequence_number()
                shards[0].run()
                region.nodes = range(first, next_sequence_number())
            else:
                _run_in_threads(shards, region, tables)
            if notes_given:
                region.leaves = [*shards[0].leaves]
                region.given = call.given(region.leaves)
            region.new_parameter = tables.find_new_parameter()
            if torch.is_grad_enabled():
                region.trained_parameter = tables.find_trained_parameter()
        finally:
            tables.restore()
    if before != versions(call.tensors):
        raise ShardedCallError.changes_arguments(call.module)
    structures = [shard.structure for shard in shards]
    if structures.count(structures[0]) != len(structures):
        raise ShardedCallError("its outputs have another structure for a part of the batch")
    outputs = list(zip(*[shard.outputs for shard in shards], strict=True))
    return region, outputs, structures[0]


class _ShardForward:
    """The forward for one shard."""

    def __init__(
        self, call: BoundCall, leaves: Sequence[Any], region: Region, like: Structure
    ) -> None:
        self._call, self._region, self._like, self.leaves = call, region, like, leaves
        self._arguments = unflatten(list(leaves), call.structure)
        self.outputs: list[Any] = []
        self.structure: Structure | None = None

    def run(self) -> None:
        args, kwargs = self._arguments
        watch = ArgumentWatch(self._call, args, kwargs)
        with self._region.entered_by_shard():
            output = self._call.run(args, kwargs)
        if watch.has_other_changes():
            raise ShardedCallError.changes_arguments(self._call.module)
        self.outputs, self.structure = flatten(watch.result(output), self._like)


def _run_in_threads(shards: Sequence[_ShardForward], region: Region, tables: ModuleTables) -> None:
    region.threads = ShardThreads(len(shards), tables.show)
    try:
        region.threads.run([shard.run for shard in shards])
    except BranchError as error:
        raise ShardedCallError(str(error)) from None
    finally:
        region.threads = None


def _local_leaf(leaf: Any, dim: int | None, region: Region) -> Sequence[Any]:
    """An argument as each of this rank's shards gets it."""
    blocks = region.blocks
    if isinstance(leaf, ShardedOutput):
        if dim == 0 and leaf.is_on_ranks() and leaf.block == blocks[0]:
            return [pass_to_region(leaf.local)]
        leaf = leaf.full_tensor()
    if is_entries(leaf):
        whole = [_gathered(entry) for entry in leaf]
        return [type(leaf)(scatter_entries(whole, block, region.group)) for block in blocks]
    if dim is not None and not isinstance(leaf, Tensor):
        rows = [slice(block.start, block.stop) for block in blocks]
        if not dim:
            return [leaf[each] for each in rows]
        return [np.ascontiguousarray(leaf[:, each]) for each in rows]
    if dim is not None:
        return scatter_to_region(leaf, blocks, dim, region.group)
    if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
        return copy_to_region(leaf, [1] * len(blocks), region.group)
    return [leaf] * len(blocks)


def _show_aliases(
    parts: Sequence[nn.Module], region: Region, stored: Sequence[StoredParameter]
) -> ModuleTables:
    """Let aliases stand in for the parameters of a module's parts (see `grad_sums`), until the
    tables are restored."""
    tables = ModuleTables(parts, len(region.blocks), [each.place for each in stored])
    parameters = tables.trained_parameters() if torch.is_grad_enabled() else []
    if parameters:
        aliases = alias_parameters(parameters, region.gradients, region.group)
        tables.replace(parameters, aliases)
    tables.show(0)
    return tables


def gather_arguments(call: BoundCall) -> BoundCall:
    """The call with whole tensors for arguments that are sharded. Collective."""
    return call.map_arguments(_gathered)


def _gathered(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, ShardedOutput) else value
