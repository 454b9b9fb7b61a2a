"""Steps of Adam, AdamW, SGD and RMSprop on CPUs in an unedited script: by which kernel, and by
which ranks.

The kernels are the fused ones where the script leaves that to PyTorch, which takes loops over
tensors then. These go through memory a dozen times for Adam, and ranks of one host share its
memory. RMSprop has no such kernel. The results are equal up to rounding, as sums over ranks are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from instep.distributed import one_copy
from instep.distributed.communication.tensors import is_dense
from instep.process.patching import Function
from instep.unedited.optimizer_steps import divided_steps

_DTYPES = (torch.float32, torch.float64)
"""With fewer bits the loops round after each operation, and the kernels once."""
_FEWEST_ELEMENTS = 1 << 16
"""Of a step of SGD that its fused kernel makes."""
_OF_SCALER = ("grad_scale", "found_inf")
_FLAGS = ("capturable", "differentiable", "has_sparse_grad")
_NUMBERS = ("lr", "beta1", "beta2", "alpha", "momentum", "weight_decay", "eps")


def adam(original: Function, *lists: Sequence[Tensor], **options: Any) -> Any:
    """torch.optim.adam.adam, which Adam and AdamW call in a step with the lists of parameters,
    gradients, their means, the means of their squares, the maxima of these, and steps."""
    if not (_is_plain(options) and _have_flat_states(lists)):
        return original(*lists, **options)
    return _step(original, lists, options, is_fused=_is_open(options))


def rmsprop(original: Function, *lists: Sequence[Tensor], **options: Any) -> Any:
    """torch.optim.rmsprop.rmsprop, which RMSprop calls in a step with the lists of parameters,
    gradients, means of their squares, their means, momentum buffers, and steps."""
    if not (_is_plain(options) and _have_flat_states(lists)):
        return original(*lists, **options)
    return _step(original, lists, options, is_fused=False)


def sgd(original: Function, *lists: list[Tensor | None], **options: Any) -> Any:
    """torch.optim.sgd.sgd, which SGD calls in a step with the lists of parameters, gradients and
    momentum buffers; these are None before the first step, which writes them into the list.

    Without momentum the loop goes through memory as often as the kernel. Of few elements, looking
    at the tensors takes longer than the kernel saves.
    """
    elements = sum(map(Tensor.numel, cast("list[Tensor]", lists[0])))
    is_fused = elements >= _FEWEST_ELEMENTS and _is_open(options) and bool(options.get("momentum"))
    is_worth_it = is_fused or elements >= one_copy.FEWEST_ELEMENTS
    if not (is_worth_it and _is_plain(options) and _has_sgd_kernel(lists)):
        return original(*lists, **options)
    return _step(original, lists, options, is_fused)


def _step(
    original: Function,
    lists: Sequence[Sequence[Tensor | None]],
    options: dict[str, Any],
    is_fused: bool,
) -> None:
    """`original` on this rank's part, if the step is divided, and by its fused kernel if asked for.

    What it changes has new versions unless the script chose the fused kernel, which counts none.
    """
    counts = not options.get("fused")
    if is_fused:
        options = {**options, "fused": True}
    is_divided = divided_steps.step(original, lists, options)
    if not is_divided:
        original(*lists, **options)
    if counts and (is_divided or is_fused):
        for column in (lists[0], *lists[2:5]):
            increment_version([tensor for tensor in column if tensor is not None])


def _is_open(options: dict[str, Any]) -> bool:
    """Whether the script leaves the kernel to PyTorch."""
    return options.get("foreach") is None and options.get("fused") is None


def _are_different(parameters: Sequence[Tensor | None]) -> bool:
    """Whether none is there twice; of such a one the loops make one step after the other."""
    return len({*map(id, parameters)}) == len(parameters)


def _is_plain(options: dict[str, Any]) -> bool:
    """Whether these options are those of the kernels."""
    return (
        not torch.compiler.is_compiling()
        and all(options.get(name) is None for name in _OF_SCALER)
        and not any(options.get(name) for name in _FLAGS)
        and not any(isinstance(options.get(name), Tensor) for name in _NUMBERS)
    )


def _have_flat_states(lists: Sequence[Sequence[Tensor]]) -> bool:
    if len(lists) != 6 or not _are_different(lists[0]):
        return False
    *by_element, steps = lists
    for step in steps:
        if not (isinstance(step, Tensor) and step.is_cpu and step.dtype is torch.float32):
            return False
    return _are_all_alike(list(filter(None, by_element)))


def _has_sgd_kernel(lists: Sequence[Sequence[Tensor | None]]) -> bool:
    if len(lists) != 3 or not _are_different(lists[0]):
        return False
    *given, buffers = lists
    if all(buffer is None for buffer in buffers):  # the kernel's own, after the first step
        lists = given
    elif any(buffer is None for buffer in buffers):
        return False
    return _are_all_alike(lists)


def _are_all_alike(lists: Sequence[Sequence[Any]]) -> bool:
    """Whether a kernel can go through each parameter, and what the other lists have for it, as if
    they were flat."""
    # In every step, for every parameter: one loop, without calls.
    for parameter, *others in zip(*lists, strict=True):
        dtype, stride = parameter.dtype, parameter.stride()
        if dtype not in _DTYPES:
            return False
        for other in others:
            if not (
                other.is_cpu
                and other.dtype is dtype
                and other.layout is torch.strided
                and other.stride() == stride
            ):
                return False
        if not (parameter.is_contiguous() or is_dense(parameter)):
            return False
    return True
