"""Any CPU tensor as a stretch of plain memory, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is ordinary CPU memory; the rest (sparse, quantized) is left to Gloo."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized


def are_alike(tensors: Sequence[Tensor], model: Tensor) -> bool:
    """Whether all are plain, with the dtype and as many elements as `model`."""
    dtype, numel = model.dtype, model.numel()
    return is_plain(model) and all(
        is_plain(tensor) and tensor.dtype == dtype and tensor.numel() == numel for tensor in tensors
    )


def flat(tensor: Tensor) -> Tensor:
    """The elements in row-major order: 1-D, contiguous, no gradient; a copy only where it must."""
    plain = _unguarded(tensor)
    if not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        return plain.resolve_conj().resolve_neg().reshape(-1)
    return plain if plain.dim() == 1 else plain.view(-1)


def write_back(values: Tensor, tensor: Tensor) -> None:
    """Bring what stands in `values`, the `flat` of `tensor`, home if it was a copy."""
    if values is not tensor and values.data_ptr() != tensor.data_ptr():
        _unguarded(tensor).copy_(values.view(tensor.shape))


def _unguarded(tensor: Tensor) -> Tensor:
    """The same memory outside autograd, writable also where it is an inference tensor."""
    if tensor.is_inference():
        return torch.from_dlpack(tensor.detach())
    return tensor.detach() if tensor.requires_grad else tensor
