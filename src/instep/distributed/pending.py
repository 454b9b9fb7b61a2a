"""Collectives that may not have ended yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """A collective that may not have ended yet."""

    def wait(self) -> object:
        """Return when the tensor holds the result."""


class RoundedSum:
    """The sum of a tensor, which is rounded to another dtype and added up in it."""

    def __init__(
        self, tensor: Tensor, dtype: torch.dtype, start: Callable[[Tensor], Pending]
    ) -> None:
        """`start`: starts the sum of a tensor into itself."""
        self._tensor, self._rounded = tensor, tensor.to(dtype)
        self._pending = start(self._rounded)

    def wait(self) -> None:
        """Return when the tensor holds the sum."""
        self._pending.wait()
        self._tensor.copy_(self._rounded)
