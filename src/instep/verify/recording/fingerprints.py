"""Fingerprints of tensors, and hashes of samples and of random generators' states."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from instep.distributed.generator_states import hash_states
from instep.training.random_streams import default_generators
from instep.verify.recording.records import Fingerprint

_WIDTH = 1024
_COLUMNS = 4096
"""At most so many numbers of a sample enter its hash."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Norm and projection in float64. The direction depends only on the number of elements."""
    flat = to_dense_real(tensor).reshape(-1).double()
    rows = -(-flat.numel() // _WIDTH)
    padded = torch.nn.functional.pad(flat, (0, rows * _WIDTH - flat.numel())).view(rows, _WIDTH)
    projection = padded @ _signs(_WIDTH, flat.device) @ _signs(rows, flat.device)
    return Fingerprint(flat.norm().item(), projection.item())


@functools.cache
def _signs(length: int, device: torch.device) -> Tensor:
    """Random signs. The products of two such vectors are pairwise uncorrelated signs again."""
    generator = torch.Generator().manual_seed(length)
    return (
        (torch.randint(0, 2, (length,), generator=generator, device="cpu") * 2.0 - 1)
        .double()
        .to(device)
    )


def hash_rows(tensor: Tensor) -> tuple[int, ...]:
    """One integer for each row (dimension 0), which depends on the bits of that row alone."""
    rows = to_dense_real(tensor).cpu().contiguous().view(tensor.shape[0], -1)
    if rows.shape[1] > _COLUMNS:
        rows = rows[
            :, torch.linspace(0, rows.shape[1] - 1, _COLUMNS, device="cpu").long()
        ].contiguous()
    bits = rows.view(_INTEGERS[rows.element_size()]).long()
    return tuple((bits * _weights()[: bits.shape[1]]).sum(1).tolist())


@functools.cache
def _weights() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randint(-(2**62), 2**62, (2 * _COLUMNS,), generator=generator, device="cpu") * 2 + 1
    )


def to_dense_real(tensor: Tensor) -> Tensor:
    """The tensor as dense and real (complex numbers as pairs), without a graph."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def hash_generators(of_torch: Sequence[Tensor] = ()) -> str:
    """A hash of the states of all global generators of this process.

    Args:
        of_torch: states of torch's generators to use in place of the current ones.
    """
    states = of_torch or [generator.get_state() for generator in default_generators()]
    return hash_states([*states, np.random.get_state(legacy=False), random.getstate()])
