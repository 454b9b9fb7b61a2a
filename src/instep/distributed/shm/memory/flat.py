"""Any CPU tensor as flat memory, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.process.torch_private.tensors import neg_view


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense CPU memory; others (sparse, quantized) are left to Gloo."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized


def match(tensors: Sequence[Tensor], like: Tensor) -> bool:
    """Whether all are plain, with the dtype and the number of elements of `like`."""
    dtype, numel = like.dtype, like.numel()
    return is_plain(like) and all(
        is_plain(tensor) and tensor.dtype == dtype and tensor.numel() == numel for tensor in tensors
    )


def flatten(tensor: Tensor) -> Tensor:
    """The elements in row-major order: 1-D, contiguous, without gradient; a copy if need be."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    plain = _unguarded(tensor)
    if not plain.is_contiguous():
        plain = plain.contiguous()  # reshape(-1) may leave gaps
    if plain.dim() == 1 and plain.stride(0) == 1:
        return plain
    return plain.as_strided((plain.numel(),), (1,))  # view(-1) may leave one element a stride of 2


def write_back(values: Tensor, tensor: Tensor) -> None:
    """Copy `values`, the result of `flatten(tensor)`, back to `tensor` if it was a copy."""
    if values is tensor or values.data_ptr() == tensor.data_ptr():
        return
    source = values.view(tensor.shape)
    if tensor.is_conj():
        source, tensor = source.conj(), tensor.conj()
    if tensor.is_neg():  # DLPack would forget the sign
        source, tensor = source.neg(), neg_view(tensor)
    target = _unguarded(tensor)
    for dim, (stride, length) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and length > 1:  # expanded: one element in memory
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def _unguarded(tensor: Tensor) -> Tensor:
    """The memory of a tensor outside autograd; that of an inference tensor is writable, too."""
    if tensor.is_inference():
        return torch.from_dlpack(tensor.detach())
    return tensor.detach() if tensor.requires_grad else tensor
