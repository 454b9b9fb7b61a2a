"""A sharded call as planned: the module runs on this rank's rows, and the outputs are joined."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from instep.distributed.communication.transport import Transport
from instep.training.pytree import Structure, flatten, unflatten, versions
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.division import Division
from instep.unedited.sharded_call.plan.sharding_plan import OutputPlan, ShardingPlan
from instep.unedited.sharded_call.plan.stored_parameters import StoredParameter, replaced
from instep.unedited.sharded_call.run import sharded_output
from instep.unedited.sharded_call.run.argument_writes import ArgumentWatch, write_back
from instep.unedited.sharded_call.run.grad_sums import alias_parameters
from instep.unedited.sharded_call.run.graph_leaves import find_leaves, next_sequence_number
from instep.unedited.sharded_call.run.mappings import (
    copy_to_region,
    gather_from_region,
    pass_to_region,
    reduce_from_region,
    scatter_to_region,
)
from instep.unedited.sharded_call.run.random_numbers import DrawsWithoutRows, TorchGeneratorStates
from instep.unedited.sharded_call.run.region import Region, tag_outputs
from instep.unedited.sharded_call.run.sharded_output import ShardedOutput
from instep.unedited.sharded_call.run.tensor_subclasses import (
    as_plain,
    is_subclass,
    with_attributes_of,
)


def run_sharded(
    call: BoundCall, plan: ShardingPlan, transport: Transport
) -> tuple[ShardingPlan, Any]:
    """Make the call as planned; returns the plan for the next call, and this one's output.

    Collective. Raises ShardedCallError.
    """
    name = type(call.module).__name__
    generators = TorchGeneratorStates(plan.generators)
    versions = [buffer._version for buffer in call.module.buffers()]
    start = next_sequence_number() if plan.stored else 0
    region, local, structure = run_planned(call, plan, transport)
    if not plan.is_random and not generators.same(TorchGeneratorStates(plan.generators)):
        if versions != [buffer._version for buffer in call.module.buffers()]:
            raise ShardedCallError(
                f"{name} began to draw random numbers in its forward, which it did not before, "
                "and has changed its buffers meanwhile. Run this script with --plain, or let it "
                "draw from the first call on (a dropout of 1e-9, say)."
            )
        generators.restore()
        return run_sharded(call, replace(plan, is_random=True), transport)
    if structure != plan.structure:
        raise ShardedCallError(
            f"{name} returns something else than when its calls were first divided (another "
            "number of outputs, or others). Run this script with --plain, or keep what it returns "
            "the same for the same kind of arguments."
        )
    if plan.stored and find_leaves(local, start) != []:
        raise ShardedCallError(
            f"{name} began to use a parameter from an object or list that it did not use when its "
            "calls were first divided. Run this script with --plain, or let its forward read "
            "parameters from attributes of modules."
        )
    joined = [
        join_output(output, how, region) for output, how in zip(local, plan.outputs, strict=True)
    ]
    tag_outputs(local, region)
    return plan, write_back(unflatten(joined, structure), call)


def run_planned(
    call: BoundCall, plan: ShardingPlan, transport: Transport
) -> tuple[Region, list[Any], Structure]:
    """As `run_local`, with the plan's division and draws."""
    known = DrawsWithoutRows(found=plan.without_rows)
    return run_local(
        call,
        plan.division,
        transport,
        is_random=plan.is_random,
        without_rows=known,
        stored=plan.stored,
    )


def run_local(
    call: BoundCall,
    division: Division,
    transport: Transport,
    *,
    is_random: bool,
    without_rows: DrawsWithoutRows,
    stored: Sequence[StoredParameter],
) -> tuple[Region, list[Any], Structure]:
    """Call the module with this rank's rows; returns its outputs, flat, and their structure.

    Raises ShardedCallError where it changes its arguments otherwise than by items of dicts: the
    script would not see it.
    """
    block = division.block(call.leaves, transport.rank, transport.size)
    assert block is not None
    region = Region(block, division, transport, is_random, without_rows)
    region.gradients.module, region.gradients.block = weakref.ref(call.module), block
    leaves = [
        _local_leaf(leaf, dim, region) for leaf, dim in zip(call.leaves, division.dims, strict=True)
    ]
    if torch.is_grad_enabled():
        region.inputs = [x for x in call.leaves if isinstance(x, Tensor) and x.requires_grad]
    args, kwargs = unflatten(leaves, call.structure)
    watch = ArgumentWatch(args, kwargs)
    before = versions(call.leaves)
    with region.entered(), _aliased_parameters(call.module, region, stored):
        output = call.original(call.module, *args, **kwargs)
    if watch.has_other_changes() or before != versions(call.leaves):
        raise ShardedCallError(
            f"{type(call.module).__name__} began to change its arguments in its forward (a cache, "
            "a list, a tensor in place), which it did not do when its calls were first divided. "
            "Run this script with --plain, or let it return what is new instead."
        )
    return region, *flatten(watch.result(output))


def _local_leaf(leaf: Any, dim: int | None, region: Region) -> Any:
    block = region.block
    if isinstance(leaf, ShardedOutput):
        if dim == 0 and leaf.full is None and leaf.block == block:
            return pass_to_region(leaf.local)
        leaf = leaf.full_tensor()
    if dim is not None and not isinstance(leaf, Tensor):
        return leaf[block.start : block.stop]
    if dim is not None:
        return scatter_to_region(leaf, block, dim, region.transport)
    if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
        return copy_to_region(leaf, 1, region.transport)
    return leaf


@contextmanager
def _aliased_parameters(
    module: nn.Module, region: Region, stored: Sequence[StoredParameter]
) -> Iterator[None]:
    """Inside, aliases stand in for the module's parameters (see `grad_sums`)."""
    if not torch.is_grad_enabled():
        yield
        return
    parts = list(module.modules())
    slots = [
        (part._parameters, name, parameter)
        for part in parts
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    parameters = list({id(p): p for _, _, p in slots}.values())
    if not parameters:
        yield
        return
    made = alias_parameters(parameters, region.gradients, region.transport)
    alias_of: dict[int, Any] = {id(p): alias for p, alias in zip(parameters, made, strict=True)}
    for table, name, parameter in slots:
        table[name] = alias_of[id(parameter)]
    recurrent = [part for part in parts if isinstance(part, nn.RNNBase)]
    _refresh_flat_weights(recurrent)
    try:
        with replaced(stored, alias_of):
            yield
    finally:
        for table, name, parameter in slots:
            table[name] = parameter
        _refresh_flat_weights(recurrent)


def _refresh_flat_weights(recurrent: Sequence[nn.RNNBase]) -> None:
    """Recurrent layers keep a list of their weights."""
    for part in recurrent:
        part._flat_weights = [getattr(part, name, None) for name in part._flat_weights_names]


def join_output(local: Any, plan: OutputPlan, region: Region) -> Any:
    """The script's output, from this rank's. Collective, unless it stays sharded."""
    block, transport, dim = region.block, region.transport, plan.dim
    if plan.placement == "replicate":
        return local
    if is_subclass(local):  # the script may read its attributes: it does not stay sharded
        joined = join_output(as_plain(local), plan, region)
        whole = joined.full_tensor() if isinstance(joined, ShardedOutput) else joined
        return with_attributes_of(local, whole)
    if plan.placement != "shard":
        weight = block.fraction if plan.placement == "partial_mean" else 1
        return reduce_from_region(local, weight, transport)
    if plan.interleaved:
        rows = local.unflatten(dim, (-1, block.count))
        return gather_from_region(rows, block, dim + 1, transport).flatten(dim, dim + 1)
    if not isinstance(local, Tensor):
        return type(local)(chain(*transport.all_gather_object(local)))
    if dim == 0 and (plan.is_lazy or _is_large(local, region)):
        return ShardedOutput.of(local, block, transport)
    return gather_from_region(local, block, dim, transport)


def _is_large(local: Tensor, region: Region) -> bool:
    """By the size of the whole output: all ranks decide alike, whatever their shares."""
    whole = local.numel() // region.block.count * region.block.total
    return whole * local.element_size() >= sharded_output.LARGE


def gather_arguments(call: BoundCall) -> BoundCall:
    """The same call with whole tensors for arguments that are sharded. Collective."""
    return call.map_arguments(
        lambda value: value.full_tensor() if isinstance(value, ShardedOutput) else value
    )
