"""Helpers of the collectives: devices, tensors as bytes, autograd functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.errors import UnsuitableTensorError, WrongDeviceError
from instep.distributed.identity import torch_devices

_SENT_BY_ALL = frozenset(
    {
        *(torch.float16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int32, torch.int64),
    }
)
"""Those that Gloo, NCCL and HCCL know."""


def check_reachable(tensor: Tensor) -> None:
    """Raise WrongDeviceError unless this job's ranks can exchange `tensor` on its device.

    Raises UnsuitableTensorError for anything but a dense tensor.
    """
    if not isinstance(tensor, Tensor):
        raise UnsuitableTensorError(
            f"this collective takes tensors, not {type(tensor).__name__}. For other values there "
            "are broadcast_object, all_gather_object and gather_object."
        )
    if tensor.layout is not torch.strided:
        raise UnsuitableTensorError(
            f"ranks exchange dense tensors, not {tensor.layout}. Call to_dense() first."
        )
    if tensor.is_cpu:  # without a look at the accelerator, which would initialize it
        return
    reachable = ["cpu"]
    if (name := torch_devices.accelerator_type()) is not None:
        reachable.append(str(torch_devices.current_device(name)))
    if str(tensor.device) not in reachable:
        raise WrongDeviceError(
            f"this job's ranks exchange tensors on {' and '.join(reachable)}, but this tensor is "
            f"on {tensor.device}. Move it there first."
        )


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements as a flat tensor of bytes, which Gloo can send whatever their dtype is."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.numel() < 2:  # an expanded tensor counts as contiguous then, but view fails
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def as_message(tensor: Tensor) -> Tensor:
    """The elements as a flat tensor: of their dtype, which reports then name, where every backend
    can send it, else of bytes."""
    return as_bytes(tensor).view(tensor.dtype if tensor.dtype in _SENT_BY_ALL else torch.uint8)


def is_dense(tensor: Tensor) -> bool:
    """Whether all elements of a tensor are one piece of memory, in some order."""
    if tensor.is_contiguous():
        return True
    numel = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != numel:
            return False
        numel *= size
    return True


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, which torch leaves untyped."""
    return function.apply(*args)


def make_sparse(indices: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """A sparse COO tensor of (dimensions, n) indices and their n values, which are not checked.

    PyTorch 2.12 warns of that for the argument check_invariants=False, too.
    """
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(indices, values, tuple(shape), device=values.device)
