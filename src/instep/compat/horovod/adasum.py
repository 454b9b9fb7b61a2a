"""Adasum (Maleki et al. 2020, "Scaling distributed training with adaptive summation", eq. 2).

Of two gradients a and b

    (1 - a.b / 2 |a|^2) a + (1 - a.b / 2 |b|^2) b,

which is their sum where they are orthogonal and their average where they are parallel. Ranks are
combined in pairs, then pairs in pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from instep.compat.horovod.errors import UnsupportedOpError


def adasum(rows: Tensor) -> Tensor:
    """Of 1, 2, 4, ... gradients.

    Args:
        rows: (ranks, elements), floating point.

    Returns:
        (elements,), of the same dtype. Products are added up in float64.
    """
    level = list(rows.double().unbind())
    while len(level) > 1:
        level = [_of_two(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0].to(rows.dtype)


def check_size(size: int) -> None:
    """Raise UnsupportedOpError unless `size` ranks can be combined in pairs of pairs."""
    if size & (size - 1):
        raise UnsupportedOpError.adasum_size(size)


def _of_two(a: Tensor, b: Tensor) -> Tensor:
    dot = torch.dot(a, b)
    return _kept(dot, a) * a + _kept(dot, b) * b


def _kept(dot: Tensor, a: Tensor) -> Tensor:
    """How much of `a` stays; all of it where it is zero."""
    square = torch.dot(a, a)
    return torch.where(square > 0, 1 - dot / (2 * square), torch.ones_like(square))
