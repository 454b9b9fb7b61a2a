"""The kernels of batch normalisation on any device: passes over the activations are PyTorch's own
fused kernels with given statistics, a few numbers are NumPy's on CPUs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from instep.distributed import numbers
from instep.distributed.numbers import Numbers
from instep.training.normalization.kernels import (
    Kernels,
    Shard,
    ShardCollectives,
    all_but_channels,
)

_SHORT, _LONG = 8, 16  # elements of a channel that lie side by side
_MANY = 1 << 14  # elements of a tensor
_FAR = 1.0  # a squared mean, in variances


@dataclass(frozen=True)
class Statistics:
    """Batch statistics of all shards' rows together."""

    mean: Numbers
    var: Numbers
    """Biased."""
    count: Any
    """How many values a channel has: a float, or a tensor on an accelerator."""
    eps: float
    dtype: torch.dtype
    """What torch keeps them in."""

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Mean and variance, for torch's kernels."""
        mean, var = (numbers.to_tensor(each, self.dtype) for each in (self.mean, self.var))
        return mean, var


class _TorchKernels:
    """PyTorch's kernels, for any dtype and memory layout."""

    def zeros(self, count: int, like: Tensor) -> Numbers:
        return numbers.zeros(count, like)

    @np.errstate(all="ignore")  # as torch, of values that are not finite
    def moments(self, x: Tensor) -> Numbers:
        count = x.numel() // x.shape[1]
        if _channel_stride(x) >= _LONG and x.numel() > _MANY:
            return np.concatenate((*_moments_of_planes(x, count), (count,)))
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)  # adds up in double precision
        return numbers.join((mean, var * count), count)

    def gather(self, by_shard: Sequence[Numbers], collectives: ShardCollectives) -> Numbers:
        return collectives.gather_numbers(by_shard)

    def count(self, moments: Numbers, channels: int) -> float:
        return float(moments[:, -1].sum())

    @np.errstate(all="ignore")  # as torch, of values that are not finite
    def merge(self, moments: Numbers, shards: Sequence[Shard]) -> Statistics:
        channels = moments.shape[1] // 2
        means, squares, counts = moments[:, :channels], moments[:, channels:-1], moments[:, -1:]
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        offsets = means - mean
        var = (squares + counts * offsets * offsets).sum(0) / total
        dtype = _statistics_dtype(shards[0].input)
        statistics = Statistics(mean, var, total, shards[0].eps, dtype)
        for shard in shards:
            if (running := shard.running_mean) is not None:
                running.data.lerp_(in_dtype(statistics.tensors[0], running.dtype), shard.momentum)
            if (running := shard.running_var) is not None:
                unbiased = numbers.to_tensor(var * (total / (total - 1)), running.dtype)
                running.data.lerp_(unbiased, shard.momentum)
        return statistics

    def normalize(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics
    ) -> Tensor:
        # The kernels take weights in half precision with statistics in that only.
        slope = None if weight is None else in_dtype(weight, statistics.dtype)
        offset = None if bias is None else in_dtype(bias, statistics.dtype)
        return _affine(x, slope, offset, statistics)

    def for_backward(
        self, statistics: Statistics, grads: Sequence[Tensor], saved: Sequence[Tensor | None]
    ) -> tuple[Kernels[Any, Any], Any]:
        return self, statistics

    def sums(
        self, grad: Tensor, x: Tensor, statistics: Statistics
    ) -> tuple[Numbers, Tensor, Tensor]:
        mean, var = statistics.tensors
        if 1 < _channel_stride(x) < _SHORT:  # torch's kernel is not vectorised here
            _, shape = all_but_channels(x)
            dot = (x - mean.view(shape)).mul_(grad).flatten(2).sum(-1).sum(0)
            dot, total = dot * (var + statistics.eps).rsqrt(), grad.flatten(2).sum(-1).sum(0)
        else:
            # Given statistics are constants to this kernel: what it calls the gradients of weight
            # and bias are just these sums, whatever the weight. CUDA's takes neither None for what
            # a forward would have saved, nor no weight.
            one, nothing = torch.ones_like(mean), mean.new_empty(0)
            saved, wanted = (mean, var, nothing, nothing), [False, True, True]
            _, dot, total = torch.ops.aten.native_batch_norm_backward(
                grad, x, one, *saved, False, statistics.eps, wanted
            )
        return numbers.join((dot, total)), dot, total

    def total(self, by_shard: Sequence[Numbers], collectives: ShardCollectives) -> Numbers:
        return collectives.sum_numbers(by_shard)

    @np.errstate(all="ignore")  # as torch, of values that are not finite
    def input_gradient(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        total: Numbers,
        statistics: Statistics,
    ) -> Tensor:
        """Written as an affine map of x (one fused pass) plus scale * grad (another)."""
        dtype = statistics.dtype
        scale = (statistics.var + statistics.eps) ** -0.5
        if weight is not None:
            scale = scale * numbers.from_tensor(weight)
        factors = total.reshape(2, -1) * (scale / -statistics.count)
        slope, offset = numbers.to_tensor(factors[0], dtype), numbers.to_tensor(factors[1], dtype)
        affine = _affine(x, slope, offset, statistics)
        _, shape = all_but_channels(x)
        return affine.addcmul_(grad, numbers.to_tensor(scale, grad.dtype).view(shape))


TORCH_KERNELS: Kernels[Numbers, Statistics] = _TorchKernels()


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor itself if it has this dtype. (Asking takes less time than `to`.)"""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _affine(
    x: Tensor, slope: Tensor | None, offset: Tensor | None, statistics: Statistics
) -> Tensor:
    """x_hat * slope + offset."""
    mean, var = statistics.tensors
    output, *_ = torch.native_batch_norm(x, slope, offset, mean, var, False, 0.0, statistics.eps)
    return output


def _moments_of_planes(x: Tensor, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The mean of each channel, and the sum of squared distances from it.

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


def _channel_stride(x: Tensor) -> int:
    """How many elements of a channel lie side by side; 0 where torch's kernels are fast anyway."""
    plain = x.dim() > 2 and x.is_cpu and x.dtype in (torch.float32, torch.float64)
    return x.stride(1) if plain else 0


def _statistics_dtype(x: Tensor) -> torch.dtype:
    """What torch keeps batch statistics in: float32 for half precision, else the input's."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
