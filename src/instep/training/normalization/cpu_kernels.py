"""The kernels of batch normalisation for float32 on one thread of a CPU, in C.

They are one call in place of a dozen, and one pass over the activations in place of two:
benchmarks/batch_norm.py. Where setup.py finds no compiler or no Python.h, they are not built.

Numbers are bytes: after a layer has filled the processor's caches, each call of NumPy's takes 15 to
70 microseconds, and a function of this module takes 2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from instep.distributed.numbers import Doubles
from instep.training.normalization.kernels import Kernels, Shard, ShardCollectives
from instep.training.normalization.torch_kernels import TORCH_KERNELS, Statistics

_INTERFACE = 2
"""INTERFACE of cpu_kernels.c: both change with any function's arguments."""
_CLASSES = (Tensor, torch.nn.Parameter)
_BYTES = 8
"""Of a number."""


class CpuStatistics(NamedTuple):
    """Batch statistics of all shards' rows together."""

    numbers: Doubles
    """Means, biased variances, and how many values a channel has."""
    eps: float

    def for_torch(self) -> Statistics:
        """These statistics for torch's kernels."""
        array = np.frombuffer(self.numbers)
        channels = len(array) // 2
        mean, var = array[:channels], array[channels:-1]
        return Statistics(mean, var, array[-1], self.eps, torch.float32)


class _CpuKernels:
    """Kernels in C, for contiguous tensors of float32."""

    def __init__(self, compiled: ModuleType) -> None:
        self._compiled: Any = compiled

    def accepts(self, shards: Sequence[Shard]) -> bool:
        """Whether they compute these shards: on every rank alike, whatever rows it has."""
        return torch.get_num_threads() == 1 and all(map(_is_accepted, shards))

    def zeros(self, count: int, like: Tensor) -> Doubles:
        return bytes(count * _BYTES)

    def moments(self, x: Tensor) -> Doubles:
        moments: Doubles = self._compiled.moments(x.data_ptr(), *_shape(x))
        return moments

    def gather(self, by_shard: Sequence[Doubles], collectives: ShardCollectives) -> Doubles:
        return collectives.gather_doubles(by_shard)

    def count(self, moments: Doubles, channels: int) -> float:
        return float(np.frombuffer(moments).reshape(-1, 2 * channels + 1)[:, -1].sum())

    def merge(self, moments: Doubles, shards: Sequence[Shard]) -> CpuStatistics:
        channels = shards[0].input.shape[1]
        statistics = self._compiled.merge(moments, channels)
        for shard in shards:
            running = _data(shard.running_mean), _data(shard.running_var)
            self._compiled.update_running(*running, channels, statistics, shard.momentum)
        return CpuStatistics(statistics, shards[0].eps)

    def normalize(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: CpuStatistics
    ) -> Tensor:
        output = torch.empty_like(x)
        self._compiled.normalize(
            *(x.data_ptr(), *_shape(x)),
            *statistics,
            *(_data(weight), _data(bias), output.data_ptr()),
        )
        return output

    def for_backward(
        self, statistics: CpuStatistics, grads: Sequence[Tensor], saved: Sequence[Tensor | None]
    ) -> tuple[Kernels[Any, Any], Any]:
        if all(map(_is_plain, saved)) and all(_is_plain(grad.contiguous()) for grad in grads):
            return self, statistics
        return TORCH_KERNELS, statistics.for_torch()

    def sums(
        self, grad: Tensor, x: Tensor, statistics: CpuStatistics
    ) -> tuple[Doubles, Tensor, Tensor]:
        grad, channels = grad.contiguous(), x.shape[1]
        for_weight, for_bias = x.new_empty(channels), x.new_empty(channels)
        sums = self._compiled.sums(
            *(grad.data_ptr(), x.data_ptr(), *_shape(x)),
            *statistics,
            *(for_weight.data_ptr(), for_bias.data_ptr()),
        )
        return sums, for_weight, for_bias

    def total(self, by_shard: Sequence[Doubles], collectives: ShardCollectives) -> Doubles:
        """The terms of the sums: `input_gradient` adds them up."""
        return collectives.terms_over_shards(by_shard)

    def input_gradient(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        total: Doubles,
        statistics: CpuStatistics,
    ) -> Tensor:
        grad, output = grad.contiguous(), torch.empty_like(x)
        self._compiled.input_gradient(
            *(grad.data_ptr(), x.data_ptr(), *_shape(x)),
            *statistics,
            *(_data(weight), total, output.data_ptr()),
        )
        return output


@functools.cache
def cpu_kernels() -> _CpuKernels | None:
    """None where setup.py built none, or another version's."""
    try:
        from instep.training.normalization import _cpu_kernels
    except ImportError:  # or built for another machine
        return None
    return _CpuKernels(_cpu_kernels) if _cpu_kernels.INTERFACE == _INTERFACE else None


def _is_accepted(shard: Shard) -> bool:
    _, channels, size = _shape(shard.input)
    if channels == 0 or size < 2 or not _is_plain(shard.input):
        return False
    for other in (shard.weight, shard.bias, shard.running_mean, shard.running_var):
        if other is not None and not (_is_plain(other) and other.numel() == channels):
            return False
    return True


def _is_plain(tensor: Tensor | None) -> bool:
    """Whether C finds its values one after the other; so it is with no tensor."""
    return tensor is None or (
        tensor.dtype is torch.float32
        and tensor.is_cpu
        and tensor.is_contiguous()
        and type(tensor) in _CLASSES
    )


def _shape(x: Tensor) -> tuple[int, int, int]:
    """Rows, channels, and how many elements of a channel lie side by side."""
    rows, channels, *others = x.shape
    return rows, channels, math.prod(others)


def _data(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
