"""Adam and AdamW on CPUs: the fused kernel, where a script leaves the kernel to PyTorch.

PyTorch then takes loops over tensors, which go through memory a dozen times. With the 5 million
parameters of benchmarks/models.py that takes 34 ms on one thread and the fused kernel 4 ms; ranks
of one host also share its memory. The results are equal up to rounding, as sums over ranks are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from instep.process.patching import Function
from instep.training.optimizer_shards.layout import is_dense

_DTYPES = (torch.float32, torch.float64)
"""With fewer bits the loops round after each operation, and the kernel once."""
_DECIDES = ("foreach", "fused", "grad_scale", "found_inf")
_FLAGS = ("capturable", "differentiable")
_NUMBERS = ("lr", "beta1", "beta2", "weight_decay", "eps")


def adam(original: Function, *lists: Sequence[Tensor], **options: Any) -> Any:
    """torch.optim.adam.adam, which Adam and AdamW call in a step with the lists of parameters,
    gradients, their means, the means of their squares, the maxima of these, and steps."""
    if torch.compiler.is_compiling() or not _is_open(lists, options):
        return original(*lists, **options)
    result = original(*lists, **{**options, "fused": True})
    for changed in (lists[0], *lists[2:5]):
        increment_version(changed)  # which the kernel does not; the loops do
    return result


def _is_open(lists: Sequence[Sequence[Tensor]], options: dict[str, Any]) -> bool:
    """Whether the script leaves the kernel to PyTorch, and the fused one can be it."""
    if len(lists) != 6 or any(options.get(name) is not None for name in _DECIDES):
        return False
    if any(options.get(name) for name in _FLAGS):
        return False
    if any(isinstance(options.get(name), Tensor) for name in _NUMBERS):
        return False
    *by_element, steps = lists
    are_numbers = all(isinstance(step, Tensor) and step.is_cpu for step in steps)
    if not are_numbers or any(step.dtype is not torch.float32 for step in steps):
        return False
    return all(_are_alike(*each) for each in zip(*filter(None, by_element), strict=True))


def _are_alike(parameter: Tensor, *others: Tensor) -> bool:
    """Whether the kernel can go through these as if they were flat."""
    dtype, stride = parameter.dtype, parameter.stride()
    for other in others:
        if not (
            other.is_cpu
            and other.dtype is dtype
            and other.layout is torch.strided
            and other.stride() == stride
        ):
            return False
    return dtype in _DTYPES and is_dense(parameter)
