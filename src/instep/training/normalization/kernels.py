"""What computes batch normalisation on one rank, between its collectives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from instep.distributed import numbers
from instep.distributed.numbers import Numbers


@dataclass(frozen=True)
class Shard:
    """What torch.nn.functional.batch_norm gets for one shard."""

    input: Tensor
    """(rows, channels, ...), the shard's rows."""
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


@dataclass(frozen=True)
class Statistics:
    """Of all shards' rows together."""

    mean: Numbers
    var: Numbers
    """Biased."""
    count: Any
    """How many values a channel has: a float, or a tensor on an accelerator."""
    eps: float
    dtype: torch.dtype
    """What torch keeps them in."""

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Mean and variance, for torch's kernels."""
        mean, var = (numbers.to_tensor(each, self.dtype) for each in (self.mean, self.var))
        return mean, var


class Kernels(Protocol):
    """The passes over a shard's rows, and what is computed of the numbers of all shards."""

    def moments(self, x: Tensor) -> Numbers:
        """Of these rows each channel's mean, then each channel's sum of squared distances from it,
        then the number of values in a channel, which is not 0."""

    def merge(self, moments: Numbers, shards: Sequence[Shard]) -> Statistics:
        """The statistics of all rows, from each shard's moments in a row.

        Updates the running statistics of `shards` in place, and leaves their version counters as
        they are, as torch's kernel does: an earlier call's graph may hold them.
        """

    def normalize(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics
    ) -> Tensor:
        """The output of one shard."""

    def sums(
        self, grad: Tensor, x: Tensor, statistics: Statistics
    ) -> tuple[Numbers, Tensor, Tensor]:
        """Of each channel of these rows sum(grad * x_hat) and sum(grad): as numbers, and as the
        gradients of weight and bias."""

    def input_gradient(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        sums: Numbers,
        statistics: Statistics,
    ) -> Tensor:
        """scale * (grad - avg(grad) - x_hat * avg(grad * x_hat)), x_hat = (x - mean) * inv_std.

        `sums`: of grad * x_hat and of grad over all rows, for each channel.

        Ioffe and Szegedy 2015, section 3.
        """


def all_but_channels(x: Tensor) -> tuple[list[int], tuple[int, ...]]:
    """The dimensions that statistics run over; the shape of a channel's number beside `x`."""
    return [0, *range(2, x.dim())], (1, -1) + (1,) * (x.dim() - 2)
