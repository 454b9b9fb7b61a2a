"""Batch statistics of the global batch, on any device.

Every rank reduces its own rows once (count, mean, variance per channel), all ranks gather these
few numbers, and each normalises its rows with the merged statistics. A rank may hold its rows in
several shards, each with statistics of its own:

    n = sum n_r,   mean = sum n_r mean_r / n,
    n var = sum (squares_r + n_r (mean_r - mean)^2)      (Chan, Golub, LeVeque 1979, eq. 2.1)

where squares_r is the sum of squared distances from mean_r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from instep.distributed import numbers
from instep.distributed.communication.collectives import sum_with_graph
from instep.distributed.communication.tensors import apply
from instep.distributed.communication.transport import get_transport, use_transport
from instep.distributed.flight_record.recorder import recorder
from instep.distributed.numbers import Doubles, Numbers, NumbersTransport
from instep.errors import TrainingError
from instep.process.torch_private.modules import BatchNorm
from instep.training.batches.registry import note_collective
from instep.training.forward_calls import current_candidates
from instep.training.normalization.cpu_kernels import cpu_kernels
from instep.training.normalization.kernels import (
    Kernels,
    Shard,
    ShardCollectives,
    all_but_channels,
)
from instep.training.normalization.torch_kernels import TORCH_KERNELS, in_dtype

_DETAIL = "batch statistics"
"""What the collectives are for, in errors and records."""


@dataclass(frozen=True)
class _OneShard:
    """A rank is one shard."""

    transport: NumbersTransport

    def gather_numbers(self, by_shard: Sequence[Numbers]) -> Numbers:
        with recorder.with_detail(_DETAIL):
            return numbers.gather(by_shard[0], self.transport)

    def sum_numbers(self, by_shard: Sequence[Numbers]) -> Numbers:
        with recorder.with_detail(_DETAIL):
            return numbers.sum_over_ranks(by_shard[0], self.transport)

    def gather_doubles(self, by_shard: Sequence[Doubles]) -> Doubles:
        with recorder.with_detail(_DETAIL):
            return numbers.gather_doubles(by_shard[0], self.transport)

    def terms_over_shards(self, by_shard: Sequence[Doubles]) -> Doubles:
        with recorder.with_detail(_DETAIL):
            return numbers.terms_over_ranks(by_shard[0], self.transport)


def batch_norm(
    input: Tensor,  # noqa: A002  (torch's name)
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    transport: NumbersTransport | None = None,
) -> Tensor:
    """torch.nn.functional.batch_norm, with the statistics of the global batch.

    Args:
        input: (rows, channels, ...), this rank's rows; the rest as in PyTorch.
        transport: of the ranks that share statistics; by default of all ranks.

    Running statistics are updated in place with the merged mean and the unbiased variance.
    Collective. Raises TrainingError when all ranks together hold one value per channel.
    """
    if not torch.is_grad_enabled():
        note_collective()
    shard = Shard(input, running_mean, running_var, weight, bias, training, momentum, eps)
    (output,) = batch_norm_of_shards([shard], _OneShard(transport or get_transport()))
    return output


def batch_norm_of_shards(shards: Sequence[Shard], collectives: ShardCollectives) -> list[Tensor]:
    """`batch_norm` for each of this rank's shards, as one node of the autograd graph."""
    outputs: tuple[Tensor, ...] = apply(
        _GlobalBatchNorm,
        shards,
        current_candidates([shard.input for shard in shards]).is_placeholder,
        collectives,
        *[shard.input for shard in shards],
        *[shard.weight for shard in shards],
        *[shard.bias for shard in shards],
    )
    return list(outputs)


def normalize(module: BatchNorm, x: Tensor, transport: NumbersTransport) -> Tensor:
    """The forward of Horovod's and Apex's SyncBatchNorm. Collective among `transport`'s ranks."""
    momentum = 0.0 if module.momentum is None else module.momentum
    if module.training and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            momentum = 1.0 / float(module.num_batches_tracked)
    return batch_norm(
        x,
        module.running_mean if module.training else None,
        module.running_var if module.training else None,
        module.weight,
        module.bias,
        True,
        momentum,
        module.eps,
        transport=transport,
    )


class _GlobalBatchNorm(torch.autograd.Function):
    """Normalise with merged statistics, and update the running ones."""

    @staticmethod
    def forward(
        ctx: Any,
        shards: Sequence[Shard],
        is_placeholder: bool,
        collectives: ShardCollectives,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        inputs, weights, biases = _thirds(tensors)
        kernels = _kernels_of(shards)
        own = [_moments(x, is_placeholder, kernels) for x in inputs]
        moments = kernels.gather(own, collectives)
        # Reading the count from a GPU stalls the stream; a rank with two values need not ask.
        if is_placeholder or inputs[0].numel() < 2 * inputs[0].shape[1]:
            _check_value_count(kernels.count(moments, inputs[0].shape[1]), inputs[0])
        statistics = kernels.merge(moments, shards)
        ctx.save_for_backward(*tensors)
        ctx.kernels, ctx.statistics = kernels, statistics
        ctx.is_placeholder, ctx.collectives = is_placeholder, collectives
        return tuple(
            kernels.normalize(x, weight, bias, statistics)
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        inputs, weights, biases = _thirds(tensors)
        if torch.is_grad_enabled():  # create_graph=True: this will be differentiated
            return _differentiable_backward(ctx, grads[0], tensors)
        kernels, statistics = ctx.kernels.for_backward(ctx.statistics, grads, tensors)
        own = [kernels.sums(g, x, statistics) for g, x in zip(grads, inputs, strict=True)]
        by_shard = [sums for sums, _, _ in own]
        if ctx.is_placeholder:
            by_shard = [kernels.zeros(2 * inputs[0].shape[1], inputs[0])]
        total = kernels.total(by_shard, ctx.collectives)
        needed = _thirds(ctx.needs_input_grad[3:])
        results: list[Tensor | None] = [
            kernels.input_gradient(grad, x, weight, total, statistics) if need else None
            for grad, x, weight, need in zip(grads, inputs, weights, needed[0], strict=True)
        ]
        for k, (parameters, needs) in enumerate(zip((weights, biases), needed[1:], strict=True), 1):
            results += [
                in_dtype(each[k], parameter.dtype) if need else None
                for each, parameter, need in zip(own, parameters, needs, strict=True)
            ]
        return None, None, None, *results


def _thirds(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """The inputs, the weights and the biases of the shards."""
    count = len(values) // 3
    return values[:count], values[count : 2 * count], values[2 * count :]


def _differentiable_backward(
    ctx: Any, grad: Tensor, tensors: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """The gradients of a backward as a graph: the layer once more, in differentiable steps."""
    if len(tensors) > 3:
        raise TrainingError(
            "--bitwise cannot differentiate the gradient of batch normalisation once more "
            "(create_graph=True). Run without --bitwise, or normalise otherwise there."
        )
    needed = ctx.needs_input_grad[3:]
    inputs = [t for t, needs in zip(tensors, needed, strict=True) if needs and t is not None]
    with use_transport(ctx.collectives.transport):
        x, weight, bias = tensors
        output = _composite(x, weight, bias, ctx.statistics.eps, ctx.is_placeholder)
        found = iter(torch.autograd.grad(output, inputs, grad, create_graph=True))
    return None, None, None, *(next(found) if needs else None for needs in needed)


def _composite(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_placeholder: bool
) -> Tensor:
    """Batch normalisation with the statistics of all ranks, step by step."""
    dims, shape = all_but_channels(x)
    count = sum_with_graph(x.new_full((), 0 if is_placeholder else x.numel() // x.shape[1]))
    mean = sum_with_graph(_contribution(x.sum(dims), is_placeholder)) / count
    mean = apply(_ZeroGrad, mean, True) if is_placeholder else mean
    centred = x - mean.view(shape)
    var = sum_with_graph(_contribution(centred.square().sum(dims), is_placeholder)) / count
    var = apply(_ZeroGrad, var, True) if is_placeholder else var
    output = centred * (var + eps).rsqrt().view(shape)
    if weight is not None:
        output = output * weight.view(shape)
    return output if bias is None else output + bias.view(shape)


def _contribution(sums: Tensor, is_placeholder: bool) -> Tensor:
    """This rank's part of a sum over ranks: zeros for a placeholder."""
    part: Tensor = apply(_ZeroGrad, sums, False) if is_placeholder else sums
    return part


class _ZeroGrad(torch.autograd.Function):
    """A value (or zeros) whose gradient is zeros, filled in, at any order of differentiation.

    It stays in the graph: a placeholder must take part in every collective of the other ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: bool) -> Tensor:
        return x.view_as(x) if keep else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return apply(_ZeroGrad, grads[0], False), None


def _check_value_count(count: float, x: Tensor) -> None:
    if count < 2:
        raise TrainingError(
            "batch normalisation in training needs more than one value per channel, but all "
            f"ranks together hold {int(count)} (this rank's input is {tuple(x.shape)})."
        )


def _moments(x: Tensor, is_placeholder: bool, kernels: Kernels[Any, Any]) -> Any:
    is_empty = is_placeholder or x.numel() == 0
    return kernels.zeros(2 * x.shape[1] + 1, x) if is_empty else kernels.moments(x)


def _kernels_of(shards: Sequence[Shard]) -> Kernels[Any, Any]:
    compiled = cpu_kernels()
    return compiled if compiled is not None and compiled.accepts(shards) else TORCH_KERNELS
