"""A sharded call as planned: the module runs on the rows of this rank's shards, and the outputs are
joined."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.distributed.communication.transport import Transport
from instep.distributed.errors import DisagreementError
from instep.distributed.flight_record.recorder import recorder
from instep.distributed.numbers import gather_values
from instep.errors import CollectiveError
from instep.training.pytree import Structure, flatten, leaves_of, unflatten, versions
from instep.training.random_streams import RNGStates
from instep.unedited.errors import MismatchError, ShardedCallError
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.division import Division, is_entries
from instep.unedited.sharded_call.plan.sharding_plan import OutputPlan, ShardingPlan
from instep.unedited.sharded_call.plan.stored_parameters import StoredParameter
from instep.unedited.sharded_call.run import sharded_output
from instep.unedited.sharded_call.run.argument_writes import ArgumentWatch, Unset, write_back
from instep.unedited.sharded_call.run.grad_sums import alias_parameters
from instep.unedited.sharded_call.run.mappings import (
    copy_to_region,
    gather_entries,
    gather_from_region,
    pass_to_region,
    reduce_from_region,
    scatter_entries,
    scatter_to_region,
)
from instep.unedited.sharded_call.run.random_numbers import DrawRowDims, TorchGeneratorStates
from instep.unedited.sharded_call.run.region import Region, find_leaves, tag_outputs
from instep.unedited.sharded_call.run.sharded_output import ShardedOutput
from instep.unedited.sharded_call.run.tensor_subclasses import (
    as_plain,
    is_subclass,
    with_attributes_of,
)
from instep.unedited.sharded_call.shards.batch_sums import RowSums
from instep.unedited.sharded_call.shards.module_tables import ModuleTables
from instep.unedited.sharded_call.shards.shard_group import ShardGroup
from instep.unedited.sharded_call.shards.shard_threads import (
    BranchError,
    ShardThreads,
    next_sequence_number,
)

LocalOutputs = list[tuple[Any, ...]]
"""Of each output of a module, that of each of this rank's shards."""


def run_sharded(call: BoundCall, plan: ShardingPlan, group: ShardGroup) -> tuple[ShardingPlan, Any]:
    """Make the call as planned; returns the plan for the next call, and this one's output.

    Collective. Raises ShardedCallError.
    """
    try:
        return _run_sharded(call, plan, group)
    except DisagreementError as error:
        error.add_note(
            f"This was in a divided call of {type(call.module).__name__}. If a branch, a loop or "
            "the shape of an output depends on what is in its rows, and did not when its calls "
            "were first divided, run this script with --plain."
        )
        raise


class _StateBefore:
    """What a sharded forward may change, as it was before."""

    def __init__(self, call: BoundCall, plan: ShardingPlan) -> None:
        self._call, self._generators = call, plan.generators
        self._torch = TorchGeneratorStates(plan.generators)
        self._others = RNGStates.capture() if plan.draws_outside_torch else None
        self._buffers, self._arguments = _buffer_versions(call.parts), versions(call.tensors)

    def has_same_generators(self) -> bool:
        return self._torch.same(TorchGeneratorStates(self._generators))

    def has_same_buffers(self) -> bool:
        return self._buffers == _buffer_versions(self._call.parts)

    def has_same_arguments(self) -> bool:
        return self._arguments == versions(self._call.tensors)

    def restore(self, began: str = "", instead: str = "") -> None:
        """Set the generators back. ShardedCallError, with what the forward `began` to do and what
        to do `instead`, if it has changed buffers."""
        if not self.has_same_buffers():
            raise ShardedCallError(
                f"{type(self._call.module).__name__} began to {began}, and has changed its buffers "
                f"meanwhile. Run this script with --plain, or {instead}."
            )
        if self._others is not None:
            self._others.restore()
        self._torch.restore()


def _buffer_versions(parts: Sequence[nn.Module]) -> list[int]:
    return versions(buffer for part in parts for buffer in part._buffers.values())


def _run_sharded(
    call: BoundCall, plan: ShardingPlan, group: ShardGroup
) -> tuple[ShardingPlan, Any]:
    call, name = replace(call, kept=plan.kept), type(call.module).__name__
    before = _StateBefore(call, plan)
    start = 0 if group.is_virtual or not plan.stored else next_sequence_number()
    found = _run_unless_all_fail(call, plan, group, before)
    if found is None:  # the script's own exception tells of the whole batch
        before.restore()
        return plan, call.run_whole()
    region, local, structure = found
    if region.trained_parameter:  # which has no alias
        began = f"train its parameter {region.trained_parameter} in its forward"
        before.restore(began, "set requires_grad before the call")
        return plan, call.run_whole()
    if not (plan.is_random or before.has_same_generators()):
        before.restore(
            "draw random numbers in its forward, which it did not before",
            "let it draw from the first call on (a dropout of 1e-9, say)",
        )
        return _run_sharded(call, replace(plan, is_random=True), group)
    if plan.draws_outside_torch:
        _check_draws(name, group)
    _check_outputs(name, plan, local, structure, start)
    if region.new_parameter:
        raise ShardedCallError(
            f"{name} began to make its parameter {region.new_parameter} anew in its forward. Run "
            "this script with --plain, or change the parameter that is there."
        )
    joined = join_outputs(local, plan, region)
    tag_outputs(chain(*local), region)
    return plan, write_back(unflatten(joined, structure), call)


def _run_unless_all_fail(
    call: BoundCall, plan: ShardingPlan, group: ShardGroup, before: _StateBefore
) -> tuple[Region, LocalOutputs, Structure] | None:
    """As `run_planned`; None if it raises on all ranks and can run again. Collective."""
    try:
        return run_planned(call, plan, group)
    except (CollectiveError, MismatchError):  # the others have one, too
        raise
    except Exception as error:
        name = type(call.module).__name__
        is_of_all = wait_for_same_error(error, f"forward of {name}", group.transport)
        is_as_before = before.has_same_buffers() and before.has_same_arguments()
        if not (is_of_all and is_as_before) or isinstance(error, ShardedCallError):
            raise
        return None


def _check_outputs(
    name: str, plan: ShardingPlan, local: LocalOutputs, structure: Structure, start: int
) -> None:
    """Raise ShardedCallError where the plan does not fit these outputs.

    `start`: the number of the forward's first autograd node.
    """
    if structure != plan.structure:
        raise ShardedCallError(
            f"{name} returns something else than when its calls were first divided (another "
            "number of outputs, or others). Run this script with --plain, or keep what it returns "
            "the same for the same kind of arguments."
        )
    if plan.stored and find_leaves(chain(*local), start) != []:
        raise ShardedCallError(
            f"{name} began to use a parameter from an object or list that it did not use when its "
            "calls were first divided. Run this script with --plain, or let its forward read "
            "parameters from attributes of modules."
        )


def wait_for_same_error(error: Exception, where: str, transport: Transport) -> bool:
    """Let the other ranks, where they come to another collective, report that they disagree;
    returns whether all of them have an error here.

    A script that goes on after an error of one rank's rows alone would join the sums of this rank
    with those of other steps: the error is named in what such a rank is said to do. Collective.
    """
    recorder.detail = f"{type(error).__name__} in {where}"
    try:
        transport.barrier()
    except Exception as disagreement:  # of torch's, too, where a peer has gone
        error.add_note(f"Not all ranks have this error in {where}: {disagreement}")
        return False
    recorder.detail = ""
    return True


def _check_draws(name: str, group: ShardGroup) -> None:
    """Raise ShardedCallError on all ranks unless all drew the same outside of torch. Collective."""
    by_rank = gather_values(RNGStates.capture().sums(), group.transport)
    if any(row != by_rank[0] for row in by_rank):
        raise ShardedCallError(
            f"The forward of {name} has drawn otherwise from numpy's or Python's random numbers "
            "for some of its rows than for others. Run this script with --plain, or let it draw "
            "as often whatever its rows are."
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
    with region.entered(), _aliased_parameters(call.parts, region, stored) as tables:
        if len(shards) == 1:
            first = next_sequence_number()
            shards[0].run()
            region.nodes = range(first, next_sequence_number())
        else:
            _run_in_threads(shards, region, tables)
        region.new_parameter = tables.find_new_parameter()
        if torch.is_grad_enabled():
            region.trained_parameter = tables.find_trained_parameter()
    if before != versions(call.tensors):
        raise ShardedCallError.changes_arguments(call.module)
    structures = [shard.structure for shard in shards]
    if any(structure != structures[0] for structure in structures):
        raise ShardedCallError("its outputs have another structure for a part of the batch")
    outputs = list(zip(*(shard.outputs for shard in shards), strict=True))
    return region, outputs, structures[0]


class _ShardForward:
    """The forward for one shard."""

    def __init__(
        self, call: BoundCall, leaves: Sequence[Any], region: Region, like: Structure
    ) -> None:
        self._call, self._region, self._like = call, region, like
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


@contextmanager
def _aliased_parameters(
    parts: Sequence[nn.Module], region: Region, stored: Sequence[StoredParameter]
) -> Iterator[ModuleTables]:
    """Inside, aliases stand in for the parameters of a module's parts (see `grad_sums`)."""
    tables = ModuleTables(parts, len(region.blocks), [each.place for each in stored])
    parameters = tables.trained_parameters() if torch.is_grad_enabled() else []
    if parameters:
        aliases = alias_parameters(parameters, region.gradients, region.group)
        tables.replace(parameters, aliases)
    tables.show(0)
    try:
        yield tables
    finally:
        tables.restore()


def join_outputs(local: LocalOutputs, plan: ShardingPlan, region: Region) -> list[Any]:
    """The outputs of the call, from those of this rank's shards. Collective as `join_output`."""
    return [join_output(*pair, region) for pair in zip(local, plan.outputs, strict=True)]


def join_output(parts: Sequence[Any], plan: OutputPlan, region: Region) -> Any:
    """The script's output, from those of this rank's shards. Collective, unless it stays there."""
    blocks, group, dim, local = region.blocks, region.group, plan.dim, parts[0]
    if plan.placement == "replicate" or isinstance(local, Unset):
        return local
    if is_subclass(local):  # the script may read its attributes: it does not stay sharded
        joined = join_output(list(map(as_plain, parts)), plan, region)
        whole = joined.full_tensor() if isinstance(joined, ShardedOutput) else joined
        return with_attributes_of(local, whole)
    if plan.placement == "entries":
        return type(local)(gather_entries(list(chain(*parts)), group))
    if plan.placement != "shard":
        is_mean = plan.placement == "partial_mean"
        return reduce_from_region(parts, [b.fraction if is_mean else 1 for b in blocks], group)
    if plan.interleaved:
        rows = [x.unflatten(dim, (-1, b.count)) for x, b in zip(parts, blocks, strict=True)]
        return gather_from_region(rows, blocks, dim + 1, group).flatten(dim, dim + 1)
    if not isinstance(local, Tensor):
        own = list(chain(*parts))
        return type(local)(chain(*group.transport.all_gather_object(own)))
    order = plan.order if local.shape[dim] == 1 else None  # its strides do not tell
    if dim == 0 and not group.is_virtual and (plan.is_lazy or _is_large(local, region)):
        return ShardedOutput.of(local, blocks[0], group, order)
    return gather_from_region(parts, blocks, dim, group, order)


def leaves_of_output(joined: Any, plan: OutputPlan) -> list[Any]:
    """The leaves of a joined output, which is one itself unless it is a list with one entry for
    each row."""
    return leaves_of(joined) if plan.placement == "entries" else [joined]


def _is_large(local: Tensor, region: Region) -> bool:
    """By the size of the whole output: all ranks decide alike, whatever their shares."""
    block = region.blocks[0]
    whole = local.numel() // block.count * block.total
    return whole * local.element_size() >= sharded_output.LARGE


def gather_arguments(call: BoundCall) -> BoundCall:
    """The same call with whole tensors for arguments that are sharded. Collective."""
    return call.map_arguments(_gathered)


def _gathered(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, ShardedOutput) else value
