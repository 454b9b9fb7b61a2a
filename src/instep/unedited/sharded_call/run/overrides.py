"""Functions of torch that must know about a sharded call: batch statistics, packed sequences,
layers with large weights, and checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn

from instep.process.patching import Function
from instep.process.torch_private.compiler import disable_compile
from instep.process.torch_private.modules import BatchNorm
from instep.training.normalization import batchnorm
from instep.training.normalization.kernels import Shard
from instep.unedited.sharded_call.run.region import call_state, current_region, is_inside
from instep.unedited.sharded_call.run.tensor_subclasses import (
    as_plain,
    is_subclass,
    with_attributes_of,
)
from instep.unedited.sharded_call.shards.large_weights import (
    LayerCall,
    outputs_of_shards,
    rows_of,
)
from instep.unedited.sharded_call.shards.shard_group import ShardGroup
from instep.unedited.sharded_call.shards.weighted_layers import Convolution, Linear

_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
"""Arguments of torch.utils.checkpoint that are not the function's."""
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def batch_norm(
    original: Function,
    input: Tensor,  # noqa: A002  (torch's name)
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """torch.nn.functional.batch_norm: inside of a sharded call, statistics of the whole batch."""
    function = _global_batch_norm if training and is_inside() else original
    return function(input, running_mean, running_var, weight, bias, training, *args, **kwargs)


@disable_compile
def _global_batch_norm(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    region = current_region()
    assert region is not None
    output: Tensor = region.meet(
        Shard(as_plain(rows), *args, **kwargs),
        partial(batchnorm.batch_norm_of_shards, collectives=region.group),
    )
    return with_attributes_of(rows, output) if is_subclass(rows) else output


def instance_norm(
    original: Function,
    input: Tensor,  # noqa: A002  (torch's name)
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """torch.nn.functional.instance_norm: inside of a sharded call, running statistics are means
    over the rows of all ranks."""
    rest = (weight, bias, use_input_stats, *args)
    region = current_region()
    if running_mean is None or running_var is None or not use_input_stats or region is None:
        return original(input, running_mean, running_var, *rest, **kwargs)
    own = running_mean.clone(), running_var.clone()
    output = original(input, *own, *rest, **kwargs)
    with torch.no_grad():
        mean, var = region.sum(torch.stack(own) * region.block.fraction)
        running_mean.copy_(mean)
        running_var.copy_(var)
    return output


def pad_packed_sequence(
    original: Function,
    data: Tensor,
    batch_sizes: Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> Any:
    """What torch.nn.utils.rnn.pad_packed_sequence calls: inside of a sharded call, the sequences
    are padded to the longest one of the whole batch."""
    region = current_region()
    if region is not None:
        total_length = region.meet(total_length, partial(_longest, group=region.group))
    return original(data, batch_sizes, batch_first, padding_value, total_length)


@disable_compile
def _longest(lengths: Sequence[int], group: ShardGroup) -> Sequence[int]:
    device = group.transport.control_device
    told = group.all_gather([torch.tensor([length], device=device) for length in lengths])
    return [max(map(int, told))] * len(lengths)


def linear(
    original: Function,
    input: Tensor,  # noqa: A002  (torch's name)
    weight: Tensor,
    bias: Tensor | None = None,
) -> Any:
    """torch.nn.functional.linear: where virtual shards share a large weight, one product serves all
    shards of a rank that come there."""
    if _is_large(weight):
        rows = input.reshape(-1, input.shape[-1]).contiguous()
        output = _output_of_shards(LayerCall(original, Linear(), rows, weight, bias))
        if output is not None:
            return output.reshape(*input.shape[:-1], -1)
    return original(input, weight, bias)


def conv(
    original: Function,
    input: Tensor,  # noqa: A002  (torch's name)
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """torch.nn.functional.conv1d, conv2d and conv3d: as `linear`."""
    options = stride, padding, dilation, groups
    layer = Convolution.of(weight.dim() - 2, options) if _is_large(weight) else None
    if layer is not None:
        output = _output_of_shards(LayerCall(original, layer, input, weight, bias))
        if output is not None:
            return output
    return original(input, weight, bias, *options)


def _is_large(weight: Tensor) -> bool:
    """Whether virtual shards share it, and one product of their rows."""
    is_eager = not torch.compiler.is_compiling()
    return is_eager and current_region() is not None and rows_of(weight) is not None


def _output_of_shards(call: LayerCall) -> Tensor | None:
    """This shard's output, computed with those of others; None if it must be computed alone."""
    region, rows = current_region(), rows_of(call.weight)
    assert region is not None
    assert rows is not None
    if not call.is_collected(rows):
        return None
    place = rows.index, call.layer, call.input.shape[1:]
    output: Tensor = region.meet(call, outputs_of_shards, place)
    return output


def sync_batch_norm(original: Function, self: nn.SyncBatchNorm, input: Tensor) -> Any:  # noqa: A002
    """torch.nn.SyncBatchNorm.forward: to the script there is one process, whose batch is whole."""
    return BatchNorm.forward(self, input)


def checkpoint(
    original: Function,
    function: Function,
    *args: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """torch.utils.checkpoint.checkpoint: backward recomputes what the forward has computed.

    In a module's call it is never reentrant: that would compute with the parameters themselves
    instead of their aliases, and knows no torch.autograd.grad. The numbers are the same, and as
    there nothing gets a gradient where no argument asks for one. A script's own reentrant
    checkpoint recomputes with gradients what it has computed without, so modules may be sharded in
    both. Otherwise the recomputation must save the same tensors, and modules run as they are.

    Where a rank computes virtual shards nothing is recomputed.
    """
    region = current_region()
    if region is not None and region.group.is_virtual:  # what backward recomputes meets nobody
        return function(*args, **{k: v for k, v in kwargs.items() if k not in _OPTIONS})
    inside = region is not None or call_state.inside or call_state.is_checkpointed
    reentrant = use_reentrant is not False  # torch's default, too
    if reentrant and not (inside and _has_gradient(args)):
        return original(function, *args, use_reentrant=use_reentrant, **kwargs)
    script_contexts: Callable[[], Contexts] = kwargs.pop("context_fn", noop_context_fn)

    around = call_state.calling if region is None else region.recomputed
    checkpointed = nullcontext if inside else call_state.checkpointing

    def contexts() -> Contexts:
        forward, recompute = script_contexts()
        return _Nested(checkpointed, forward), _Nested(around, recompute)

    return original(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _has_gradient(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


class _Nested:
    """A context around the script's own; like that one, it may be entered more than once."""

    def __init__(
        self,
        outer: Callable[[], AbstractContextManager[None]],
        inner: AbstractContextManager[Any],
    ) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(self._outer())
        self._stack.enter_context(self._inner)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
