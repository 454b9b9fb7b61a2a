"""The transport of a world of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Completed:
    """A collective that has ended."""

    def wait(self) -> None:
        """Return at once."""


class LocalTransport:
    """A world of one rank."""

    rank, size, in_place = 0, 1, True
    control_device = torch.device("cpu")

    def all_reduce(self, tensor: Tensor, op: str) -> Completed:
        return Completed()

    def sum_rounded(self, tensor: Tensor, dtype: torch.dtype) -> Completed:
        return Completed()

    def all_reduce_each(self, tensors: list[Tensor], op: str) -> None:
        return None

    def reduce(self, tensor: Tensor, op: str, root: int) -> Completed:
        return Completed()

    def broadcast(self, tensor: Tensor, root: int) -> Completed:
        return Completed()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone()]

    def all_gather_each(self, parts: Sequence[Sequence[Tensor]]) -> None:
        return None

    def all_to_all(self, inputs: Sequence[Tensor], output_sizes: Sequence[int]) -> list[Tensor]:
        return [inputs[0].clone()]

    def open_memory(self, size: int) -> None:
        return None

    def barrier(self) -> None:
        return None

    def send(self, tensor: Tensor, to: int) -> None:
        raise AssertionError("a world of one has no peer")

    def recv(self, tensor: Tensor, source: int) -> None:
        raise AssertionError("a world of one has no peer")

    def all_gather_object(self, value: T) -> list[T]:
        return [value]

    def broadcast_object(self, value: T, root: int) -> T:
        return value

    def send_object(self, value: object, to: int) -> None:
        raise AssertionError("a world of one has no peer")

    def recv_object(self, source: int) -> Any:
        raise AssertionError("a world of one has no peer")
