"""A sharded call as planned: the module runs on the rows of this rank's shards, and the outputs are
joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from instep.distributed.communication.transport import Transport
from instep.distributed.errors import DisagreementError
from instep.distributed.flight_record.recorder import recorder
from instep.distributed.numbers import gather_values
from instep.errors import CollectiveError
from instep.training.blocks import Block
from instep.training.pytree import Structure, unflatten, versions
from instep.training.random_streams import RNGStates
from instep.unedited.errors import MismatchError, ShardedCallError
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.sharding_plan import OutputPlan, ShardingPlan
from instep.unedited.sharded_call.run.argument_writes import find_computed_buffer, write_back
from instep.unedited.sharded_call.run.forward.joined_outputs import (
    LocalOutputs,
    join_outputs,
    with_given,
)
from instep.unedited.sharded_call.run.forward.local_forward import run_planned
from instep.unedited.sharded_call.run.random_numbers import TorchGeneratorStates
from instep.unedited.sharded_call.run.region import Region, find_leaves, tag_outputs
from instep.unedited.sharded_call.shards.shard_group import ShardGroup
from instep.unedited.sharded_call.shards.shard_threads import next_sequence_number


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
    return versions([buffer for part in parts for buffer in part._buffers.values()])


def _run_sharded(
    call: BoundCall, plan: ShardingPlan, group: ShardGroup
) -> tuple[ShardingPlan, Any]:
    call, name = call.keeping(plan.kept), type(call.module).__name__
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
    _check_outputs(name, plan, region, local, structure, start)
    if _have_other_numbers(plan, local, group):
        if plan.changes_attributes:
            raise ShardedCallError(
                f"{name} has begun to return a number that depends on its rows, and has changed "
                "its attributes. Run this script with --plain, or let it return tensors only."
            )
        before.restore("return a number that depends on its rows", "return tensors only")
        return plan, call.run_whole()
    if region.new_parameter:
        raise ShardedCallError(
            f"{name} began to make its parameter {region.new_parameter} anew in its forward. Run "
            "this script with --plain, or change the parameter that is there."
        )
    if torch.is_grad_enabled() and (buffer := find_computed_buffer(call, region.nodes)):
        raise ShardedCallError(
            f"{name} began to compute its buffer {buffer} with a graph in its forward. Run this "
            "script with --plain, or keep what it computes there the same from the first call on."
        )
    joined = with_given(join_outputs(local, plan, region), local, plan, region, call)
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


def _have_other_numbers(plan: ShardingPlan, local: LocalOutputs, group: ShardGroup) -> bool:
    """Whether the shards have returned different numbers or truth values, which are no tensors, or
    others than in all calls that were compared: an accuracy, say, that was zero in these.
    Collective, if they return any."""
    numbers = [
        (how, repr(part))
        for parts, how in zip(local, plan.outputs, strict=True)
        for part in parts
        if how.placement == "replicate" and how.numbers
    ]
    if not numbers:
        return False
    is_other = any(len(how.numbers) < 2 and text not in how.numbers for how, text in numbers)
    texts = [text for _, text in numbers]
    mine = float(is_other), crc32(repr(texts).encode()), float(_differ(texts, len(local[0])))
    by_rank = gather_values(mine, group.transport)
    return any(row != by_rank[0] or row[0] or row[2] for row in by_rank)


def _differ(texts: Sequence[str], shards: int) -> bool:
    """Whether this rank's shards differ, whose texts follow each other for each output."""
    parts = [texts[k : k + shards] for k in range(0, len(texts), shards)]
    return any(len({*of_one}) > 1 for of_one in parts)


def _check_outputs(
    name: str,
    plan: ShardingPlan,
    region: Region,
    local: LocalOutputs,
    structure: Structure,
    start: int,
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
    for parts, how in zip(local, plan.outputs, strict=True):
        pairs = zip(parts, region.blocks, strict=True)
        if how.placement == "shard" and not all(_has_rows(*pair, how) for pair in pairs):
            raise ShardedCallError(
                f"{name} has returned a tensor of shape {[*parts[0].shape]} for "
                f"{region.blocks[0].count} rows of the batch: which rows it returns depends on "
                "what is in them, or on how many there are. Run this script with --plain, or let "
                "it return as many rows as it is given."
            )
    if plan.stored and find_leaves(chain(*local), start) != []:
        raise ShardedCallError(
            f"{name} began to use a parameter from an object or list that it did not use when its "
            "calls were first divided. Run this script with --plain, or let its forward read "
            "parameters from attributes of modules."
        )


def _has_rows(part: Any, block: Block, how: OutputPlan) -> bool:
    """Whether an output has some rows for each one of this block."""
    if not isinstance(part, Tensor):
        return True
    has_dims = how.order is None or part.dim() == len(how.order)
    return has_dims and part.dim() > how.dim and part.shape[how.dim] % block.count == 0


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
