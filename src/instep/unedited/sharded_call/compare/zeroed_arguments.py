"""Arguments of which some elements are set to zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Kept = Callable[[Sequence[int], int, torch.Generator], Tensor]
"""Where a tensor of this shape, whose rows are in this dimension, keeps its elements."""


def zeroed(leaf: Any, dim: int | None, kept: Kept, generator: torch.Generator) -> Any:
    """This argument with zeros where `kept` says so; without rows in `dim` as it is."""
    if dim is None or not isinstance(leaf, Tensor) or leaf.requires_grad:
        return leaf
    mask = kept(leaf.shape, dim, generator).to(leaf.device)
    return leaf.where(mask, torch.zeros_like(leaf))


def keep_half(shape: Sequence[int], dim: int, generator: torch.Generator) -> Tensor:
    """True for about half of the elements."""
    return torch.rand(shape, generator=generator, device="cpu") < 0.5


def keep_beginnings(shape: Sequence[int], dim: int, generator: torch.Generator) -> Tensor:
    """True for at least one element from the beginning of each row of the batch dimension `dim`."""
    others = [k for k in range(len(shape)) if k != dim]
    if not others:
        return torch.tensor(True, device="cpu")
    length, along = shape[others[0]], others[0]
    lengths = torch.randint(1, length + 1, (shape[dim],), generator=generator, device="cpu")
    of_rows, of_elements = [1] * len(shape), [1] * len(shape)
    of_rows[dim], of_elements[along] = -1, -1
    return torch.arange(length, device="cpu").view(of_elements) < lengths.view(of_rows)
