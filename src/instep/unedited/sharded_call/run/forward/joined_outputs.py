"""The outputs of a sharded call, joined from those of the shards of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from instep.training.pytree import leaves_of
from instep.unedited.objects.script_code import script_files
from instep.unedited.objects.syntax_trees import compares_types
from instep.unedited.sharded_call.plan.bound_call import BoundCall
from instep.unedited.sharded_call.plan.sharding_plan import OutputPlan, ShardingPlan
from instep.unedited.sharded_call.run import sharded_output
from instep.unedited.sharded_call.run.argument_writes import Unset
from instep.unedited.sharded_call.run.mappings import (
    gather_entries,
    gather_from_region,
    reduce_from_region,
)
from instep.unedited.sharded_call.run.region import Region
from instep.unedited.sharded_call.run.sharded_output import ShardedOutput
from instep.unedited.sharded_call.run.tensor_subclasses import (
    as_plain,
    is_subclass,
    with_attributes_of,
)

LocalOutputs = list[tuple[Any, ...]]
"""Of each output of a module, that of each of this rank's shards."""


def join_outputs(local: LocalOutputs, plan: ShardingPlan, region: Region) -> list[Any]:
    """The outputs of the call, from those of this rank's shards. Collective as `join_output`."""
    return [join_output(*pair, region) for pair in zip(local, plan.outputs, strict=True)]


def given_back(plan: OutputPlan, whole: Any, call: BoundCall) -> OutputPlan:
    """The plan of an output, which may be what the whole forward was given, or a view of it."""
    plan, given = replace(plan, given=None, row_stride=None), call.given(call.leaves)
    if id(whole) in given:
        return replace(plan, given=given[id(whole)])
    if plan.interleaved or plan.placement == "entries" or not isinstance(whole, Tensor):
        return plan
    row_stride = whole.stride(plan.dim) if plan.placement == "shard" and whole.dim() else 0
    wholes = ((which, call.value_given(which)) for which in given.values())
    found = (which for which, value in wholes if _is_view(whole, value))
    which = next(found, None)
    return plan if which is None else replace(plan, given=which, row_stride=row_stride)


def with_given(
    joined: list[Any], local: LocalOutputs, plan: ShardingPlan, region: Region, call: BoundCall
) -> list[Any]:
    """These outputs, of which those that the forward has returned as they were given are the
    script's own tensors, and views of these are views."""
    return [
        output if how.given is None else _given(output, parts[0], how, region, call)
        for output, parts, how in zip(joined, local, plan.outputs, strict=True)
    ]


def _given(joined: Any, local: Any, how: OutputPlan, region: Region, call: BoundCall) -> Any:
    """The script's own tensor, or a view of it, if the forward has returned that; else `joined`."""
    assert how.given is not None
    whole = call.value_given(how.given)
    if how.row_stride is None:
        return whole if region.given.get(id(local)) == how.given else joined
    own = region.leaves[how.given] if isinstance(how.given, int) else whole
    if not (_is_view(local, own) and _is_view(own, whole)):
        return joined
    size, strides, block = list(local.shape), list(local.stride()), region.blocks[0]
    if how.placement == "shard":
        size[how.dim] = size[how.dim] // block.count * block.total
        strides[how.dim] = how.row_stride  # where there is one row, its own stride tells nothing
    start = whole.storage_offset() + local.storage_offset() - own.storage_offset()
    view = whole.as_strided(size, strides, start)
    return view if local.requires_grad else view.detach()


def _is_view(tensor: Any, other: Any) -> bool:
    """Whether these are plain tensors, the one in the memory of the other one."""
    pair = tensor, other
    if not all(isinstance(x, Tensor) and x.layout is torch.strided for x in pair):
        return False
    if any(map(is_subclass, pair)) or tensor.dtype != other.dtype or not tensor.numel():
        return False
    if tensor.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    (first, last), (begin, end) = map(_places, pair)
    return begin <= first <= last <= end


def _places(tensor: Tensor) -> tuple[int, int]:
    """The first and the last place of a tensor in its storage."""
    start = int(tensor.storage_offset())
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + sum((int(length) - 1) * int(stride) for length, stride in pairs)


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
    is_large = whole * local.element_size() >= sharded_output.LARGE
    return is_large and not _script_compares_types()


@functools.cache
def _script_compares_types() -> bool:
    """Whether the script asks for exact types, which tell a tensor of a class of instep's from
    others. Looked at once, since all ranks have to decide alike."""
    return any(map(compares_types, script_files()))
