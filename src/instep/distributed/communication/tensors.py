"""Tensors as collectives take them: where they may be, as bytes, and in autograd's graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.errors import UnsuitableTensorError, WrongDeviceError


def check_reachable(tensor: Tensor) -> None:
    """Raise WrongDeviceError unless this job's ranks can exchange `tensor` where it lies.

    Raises UnsuitableTensorError for what is no dense tensor.
    """
    if not isinstance(tensor, Tensor):
        raise UnsuitableTensorError.not_a_tensor(tensor)
    if tensor.layout is not torch.strided:
        raise UnsuitableTensorError.not_dense(tensor.layout)
    if tensor.is_cpu:  # and CUDA is not begun with for it
        return
    reachable = ["cpu"]
    if torch.cuda.is_available():
        reachable.append(f"cuda:{torch.cuda.current_device()}")
    if str(tensor.device) not in reachable:
        raise WrongDeviceError(tensor.device, reachable)


def current_device(kind: str) -> torch.device:
    """This rank's device of a kind: "cpu" or "cuda"."""
    return torch.device(kind, torch.cuda.current_device() if kind == "cuda" else 0)


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements in one dimension, as bytes: what travels unchanged needs no dtype of Gloo's."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.numel() < 2:  # what was expanded counts as contiguous then, but cannot be viewed
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`; torch leaves it untyped."""
    return function.apply(*args)
