"""Batch statistics of the global batch, on any device.

Every rank reduces its own rows once (count, mean, variance per channel), all ranks gather these
few numbers, and each normalises its rows with the merged statistics. A rank may hold its rows in
several shards, each with statistics of its own:

    n = sum n_r,   mean = sum n_r mean_r / n,
    n var = sum (squares_r + n_r (mean_r - mean)^2)      (Chan, Golub, LeVeque 1979, eq. 2.1)

where squares_r is the sum of squared distances from mean_r.

The passes over the activations are PyTorch's own fused kernels with given statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from instep.distributed import numbers
from instep.distributed.communication.collectives import sum_with_graph
from instep.distributed.communication.tensors import apply
from instep.distributed.communication.transport import get_transport, use_transport
from instep.distributed.flight_record.recorder import recorder
from instep.distributed.numbers import Numbers, NumbersTransport
from instep.errors import TrainingError
from instep.process.torch_private import BatchNorm
from instep.training.batches.registry import note_collective
from instep.training.forward_calls import current_candidates

_SHORT, _LONG = 8, 16  # elements of a channel that lie side by side
_MANY = 1 << 14  # elements of a tensor
_FAR = 1.0  # a squared mean, in variances
_DETAIL = "batch statistics"
"""What the collectives are for, in errors and records."""


class ShardCollectives(Protocol):
    """Collectives between shards, of which each rank has one or several."""

    @property
    def transport(self) -> Any:
        """Between the ranks."""

    def gather_numbers(self, by_shard: Sequence[Numbers]) -> Numbers:
        """Every shard's numbers, in rows, from those of this rank's shards."""

    def sum_numbers(self, by_shard: Sequence[Numbers]) -> Numbers:
        """The sum over all shards, from the numbers of this rank's, which it may overwrite."""


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


@dataclass(frozen=True)
class Shard:
    """What torch.nn.functional.batch_norm gets for one shard."""

    input: Tensor
    """(rows, channels, ...), the shard's rows."""
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


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
        current_candidates().is_placeholder,
        collectives,
        *(shard.input for shard in shards),
        *(shard.weight for shard in shards),
        *(shard.bias for shard in shards),
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
        eps, dtype = shards[0].eps, _statistics_dtype(inputs[0])
        with np.errstate(all="ignore"):  # as torch, of values that are not finite
            moments = collectives.gather_numbers(
                [_local_moments(x, is_placeholder) for x in inputs]
            )
            _check_value_count(moments, inputs[0], is_placeholder)
            merged = _merge(moments)
            mean, var = numbers.to_tensor(merged.mean, dtype), numbers.to_tensor(merged.var, dtype)
            _update_running(shards, mean, merged)
        outputs = []
        for x, weight, bias in zip(inputs, weights, biases, strict=True):
            # The kernels take weights in half precision with statistics in that only.
            slope = None if weight is None else _in_dtype(weight, dtype)
            offset = None if bias is None else _in_dtype(bias, dtype)
            output, _, _ = torch.native_batch_norm(x, slope, offset, mean, var, False, 0.0, eps)
            outputs.append(output)
        ctx.save_for_backward(*tensors)
        ctx.statistics, ctx.mean, ctx.var = merged, mean, var
        ctx.eps, ctx.is_placeholder, ctx.collectives = eps, is_placeholder, collectives
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, mean, var = ctx.saved_tensors, ctx.mean, ctx.var
        inputs, weights, biases = _thirds(tensors)
        if torch.is_grad_enabled():  # create_graph=True: this will be differentiated
            return _differentiable_backward(ctx, grads[0], tensors)
        own = [_local_sums(g, x, mean, var, ctx.eps) for g, x in zip(grads, inputs, strict=True)]
        by_shard = [numbers.join(sums) for sums in own]
        if ctx.is_placeholder:
            by_shard[0][:] = 0
        with np.errstate(all="ignore"):
            sums = ctx.collectives.sum_numbers(by_shard)
            needed = _thirds(ctx.needs_input_grad[3:])
            results: list[Tensor | None] = [
                _input_gradient(grad, x, weight, sums, ctx) if need else None
                for grad, x, weight, need in zip(grads, inputs, weights, needed[0], strict=True)
            ]
        for k, (parameters, needs) in enumerate(zip((weights, biases), needed[1:], strict=True)):
            results += [
                _in_dtype(each[k], parameter.dtype) if need else None
                for each, parameter, need in zip(own, parameters, needs, strict=True)
            ]
        return None, None, None, *results


def _thirds(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Of each shard the input, the weight, the bias."""
    count = len(values) // 3
    return values[:count], values[count : 2 * count], values[2 * count :]


def _differentiable_backward(
    ctx: Any, grad: Tensor, tensors: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """The same gradients as a graph: the layer once more, written in differentiable steps."""
    if len(tensors) > 3:
        raise TrainingError(
            "--bitwise cannot differentiate the gradient of batch normalisation once more "
            "(create_graph=True). Run without --bitwise, or normalise otherwise there."
        )
    needed = ctx.needs_input_grad[3:]
    inputs = [t for t, needs in zip(tensors, needed, strict=True) if needs and t is not None]
    with use_transport(ctx.collectives.transport):
        x, weight, bias = tensors
        output = _composite(x, weight, bias, ctx.eps, ctx.is_placeholder)
        found = iter(torch.autograd.grad(output, inputs, grad, create_graph=True))
    return None, None, None, *(next(found) if needs else None for needs in needed)


def _composite(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_placeholder: bool
) -> Tensor:
    """Batch normalisation with the statistics of all ranks, step by step."""
    dims, shape = _all_but_channels(x)
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


def _check_value_count(moments: Numbers, x: Tensor, is_placeholder: bool) -> None:
    # Reading the count from a GPU stalls the stream; a rank with two values need not ask.
    few = is_placeholder or x.numel() < 2 * x.shape[1]
    if few and (count := moments[:, -1].sum()) < 2:
        raise TrainingError(
            "batch normalisation in training needs more than one value per channel, but all "
            f"ranks together hold {int(count)} (this rank's input is {tuple(x.shape)})."
        )


def _local_moments(x: Tensor, is_placeholder: bool) -> Numbers:
    """The statistics of this rank's rows: each channel's mean, then each channel's sum of squared
    distances from it, then the number of values in a channel."""
    channels = x.shape[1]
    count = 0 if is_placeholder else x.numel() // channels
    if not count:
        return numbers.zeros(2 * channels + 1, x)
    if _channel_stride(x) >= _LONG and x.numel() > _MANY:
        return np.concatenate((*_moments_of_planes(x, count), (count,)))
    mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)  # adds up in double precision
    return numbers.join((mean, var * count), count)


def _moments_of_planes(x: Tensor, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of each channel the mean, and the sum of squared distances from it.

    From the sums and the norms of the planes, whose kernels are vectorised. Where the mean is far
    from zero, the difference of the squares is not exact enough: there the distances are squared.
    """
    planes = x.flatten(2)
    mean = planes.sum(-1).numpy().sum(0, dtype=np.float64) / count
    squares = np.square(torch.linalg.vector_norm(planes, dim=-1).numpy(), dtype=np.float64).sum(0)
    squares_of_mean = count * mean * mean
    squares -= squares_of_mean
    far = np.flatnonzero(~(squares_of_mean <= _FAR * squares))  # or not finite
    if far.size:
        centred = planes[:, far] - torch.from_numpy(mean[far]).to(x.dtype)[:, None]
        rest = centred.sum((0, 2)).numpy().astype(np.float64)  # what rounding the mean has left
        squares[far] = centred.square_().sum((0, 2)).numpy() - rest * rest / count
    return mean, squares


def _local_sums(
    grad: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Of each channel of this rank's rows sum(grad * x_hat) and sum(grad)."""
    if 1 < _channel_stride(x) < _SHORT:  # torch's kernel is not vectorised here
        _, shape = _all_but_channels(x)
        dot = (x - mean.view(shape)).mul_(grad).flatten(2).sum(-1).sum(0)
        return dot * (var + eps).rsqrt(), grad.flatten(2).sum(-1).sum(0)
    # Given statistics are constants to this kernel: what it calls the gradients of weight and
    # bias are just these sums, whatever the weight. CUDA's takes neither None for what a forward
    # would have saved, nor no weight.
    one, nothing = torch.ones_like(mean), mean.new_empty(0)
    _, dot, total = torch.ops.aten.native_batch_norm_backward(
        grad, x, one, mean, var, nothing, nothing, False, eps, [False, True, True]
    )
    return dot, total


def _channel_stride(x: Tensor) -> int:
    """How many elements of a channel lie side by side; 0 where torch's kernels are fast anyway."""
    plain = x.dim() > 2 and x.is_cpu and x.dtype in (torch.float32, torch.float64)
    return x.stride(1) if plain else 0


@dataclass(frozen=True)
class _Statistics:
    """Of all shards' rows together."""

    mean: Numbers
    var: Numbers
    """Biased."""
    count: Any
    """How many values a channel has: a float, or a tensor on an accelerator."""


def _merge(moments: Numbers) -> _Statistics:
    channels = moments.shape[1] // 2
    means, squares, counts = moments[:, :channels], moments[:, channels:-1], moments[:, -1:]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    offsets = means - mean
    return _Statistics(mean, (squares + counts * offsets * offsets).sum(0) / total, total)


def _update_running(shards: Sequence[Shard], mean: Tensor, merged: _Statistics) -> None:
    # An earlier call's graph may hold the statistics: like torch's kernel, .data leaves their
    # version counters as they are.
    for shard in shards:
        if (running := shard.running_mean) is not None:
            running.data.lerp_(_in_dtype(mean, running.dtype), shard.momentum)
        if (running := shard.running_var) is not None:
            unbiased = merged.var * (merged.count / (merged.count - 1))
            running.data.lerp_(numbers.to_tensor(unbiased, running.dtype), shard.momentum)


def _input_gradient(
    grad: Tensor, x: Tensor, weight: Tensor | None, sums: Numbers, ctx: Any
) -> Tensor:
    """scale * (grad - avg(grad) - x_hat * avg(grad * x_hat)), x_hat = (x - mean) * inv_std.

    `sums`: of grad * x_hat and of grad over all rows, for each channel.

    Ioffe and Szegedy 2015, section 3. Written as an affine map of x (one fused pass) plus
    scale * grad (another).
    """
    dtype, statistics, channels = ctx.mean.dtype, ctx.statistics, x.shape[1]
    scale = (statistics.var + ctx.eps) ** -0.5
    if weight is not None:
        scale = scale * numbers.from_tensor(weight)
    factors = sums.reshape(2, channels) * (scale / -statistics.count)
    slope, offset = numbers.to_tensor(factors[0], dtype), numbers.to_tensor(factors[1], dtype)
    affine, *_ = torch.native_batch_norm(x, slope, offset, ctx.mean, ctx.var, False, 0.0, ctx.eps)
    _, shape = _all_but_channels(x)
    return affine.addcmul_(grad, numbers.to_tensor(scale, grad.dtype).view(shape))


def _all_but_channels(x: Tensor) -> tuple[list[int], tuple[int, ...]]:
    """The dimensions that statistics run over; the shape of a channel's number beside `x`."""
    return [0, *range(2, x.dim())], (1, -1) + (1,) * (x.dim() - 2)


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor itself if it has this dtype. (Asking takes less time than `to`.)"""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _statistics_dtype(x: Tensor) -> torch.dtype:
    """What torch keeps batch statistics in: float32 for half precision, else the input's."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
