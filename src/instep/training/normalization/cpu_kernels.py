"""The kernels of batch normalisation for float32 on one thread of a CPU, in C.

They are one call in place of a dozen, and one pass over the activations in place of two:
benchmarks/batch_norm.py. Where setup.py finds no compiler, they are not built.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from instep.distributed.numbers import Numbers
from instep.training.normalization.kernels import Shard, Statistics
from instep.training.normalization.torch_kernels import TORCH_KERNELS

_INTERFACE = 1
"""instep_kernels_interface of cpu_kernels.c: both change with any function's parameters."""
_CLASSES = (Tensor, torch.nn.Parameter)

_pointer, _size, _double = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_double
_SHAPE = (_size, _size, _size)
_PARAMETERS = {
    "instep_moments": (_pointer, *_SHAPE, _pointer),
    "instep_merge": (_pointer, _size, _size, _pointer),
    "instep_update_running": (_pointer, _pointer, _size, _double, _double),
    "instep_normalize": (_pointer, *_SHAPE, _pointer, _double, *[_pointer] * 3),
    "instep_sums": (_pointer, _pointer, *_SHAPE, _pointer, _double, *[_pointer] * 3),
    "instep_input_grad": (
        *(_pointer, _pointer, *_SHAPE, _pointer, _double),
        *(_pointer, _pointer, _double, _pointer),
    ),
}


class _CpuKernels:
    """Of contiguous tensors of float32."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, parameters in _PARAMETERS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = parameters, None
        library.instep_merge.restype = _double
        self._library = library

    def accepts(self, shards: Sequence[Shard]) -> bool:
        """Whether they compute these shards: on every rank alike, whatever rows it has."""
        return torch.get_num_threads() == 1 and all(map(_is_accepted, shards))

    def moments(self, x: Tensor) -> Numbers:
        rows, channels, size = _shape(x)
        moments = np.empty(2 * channels + 1)
        moments[-1] = rows * size
        self._library.instep_moments(x.data_ptr(), rows, channels, size, _address(moments))
        return moments

    def merge(self, moments: Numbers, shards: Sequence[Shard]) -> Statistics:
        moments = np.ascontiguousarray(moments)
        channels = moments.shape[1] // 2
        statistics = np.empty((2, channels))
        means = _address(statistics)
        count = self._library.instep_merge(_address(moments), len(moments), channels, means)
        update = self._library.instep_update_running
        for shard in shards:
            if (running := shard.running_mean) is not None:
                update(running.data_ptr(), means, channels, 1.0, shard.momentum)
            if (running := shard.running_var) is not None:
                unbiased = count / (count - 1) if count > 1 else math.nan
                variances = means + channels * statistics.itemsize
                update(running.data_ptr(), variances, channels, unbiased, shard.momentum)
        return Statistics(statistics[0], statistics[1], count, shards[0].eps, torch.float32)

    def normalize(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics
    ) -> Tensor:
        output = torch.empty_like(x)
        self._library.instep_normalize(
            x.data_ptr(),
            *_shape(x),
            _address(statistics.mean),  # its variances lie behind
            statistics.eps,
            _data(weight),
            _data(bias),
            output.data_ptr(),
        )
        return output

    def sums(
        self, grad: Tensor, x: Tensor, statistics: Statistics
    ) -> tuple[Numbers, Tensor, Tensor]:
        grad, channels = grad.contiguous(), x.shape[1]
        if not (_is_plain(grad) and _is_plain(x)):  # hooks may give back other saved tensors
            return TORCH_KERNELS.sums(grad, x, statistics)
        sums = np.empty(2 * channels)
        for_weight, for_bias = x.new_empty(channels), x.new_empty(channels)
        self._library.instep_sums(
            grad.data_ptr(),
            x.data_ptr(),
            *_shape(x),
            _address(statistics.mean),
            statistics.eps,
            _address(sums),
            for_weight.data_ptr(),
            for_bias.data_ptr(),
        )
        return sums, for_weight, for_bias

    def input_gradient(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        sums: Numbers,
        statistics: Statistics,
    ) -> Tensor:
        grad = grad.contiguous()
        if not (_is_plain(grad) and _is_plain(x) and _is_plain(weight)):
            return TORCH_KERNELS.input_gradient(grad, x, weight, sums, statistics)
        output = torch.empty_like(x)
        self._library.instep_input_grad(
            grad.data_ptr(),
            x.data_ptr(),
            *_shape(x),
            _address(statistics.mean),
            statistics.eps,
            _data(weight),
            _address(np.ascontiguousarray(sums)),
            statistics.count,
            output.data_ptr(),
        )
        return output


@functools.cache
def cpu_kernels() -> _CpuKernels | None:
    """None where setup.py built none, or another version's."""
    found = find_spec(f"{__package__}._cpu_kernels")
    if found is None or found.origin is None:
        return None
    try:
        library = ctypes.CDLL(found.origin)
        interface = ctypes.c_int.in_dll(library, "instep_kernels_interface").value
    except (OSError, ValueError):  # built for another machine
        return None
    return _CpuKernels(library) if interface == _INTERFACE else None


def _is_accepted(shard: Shard) -> bool:
    _, channels, size = _shape(shard.input)
    others = (shard.weight, shard.bias, shard.running_mean, shard.running_var)
    return (channels > 0 and size > 1 and _is_plain(shard.input)) and all(
        other is None or (_is_plain(other) and other.numel() == channels) for other in others
    )


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


def _address(array: Numbers) -> int:
    assert isinstance(array, np.ndarray)
    address: int = array.__array_interface__["data"][0]
    return address


def _data(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
