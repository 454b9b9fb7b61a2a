"""What computes batch normalisation on one rank, between its collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from instep.distributed.numbers import Doubles, Numbers

N = TypeVar("N", Numbers, Doubles)
"""What kernels keep the numbers of channels in."""
S = TypeVar("S")
"""What kernels keep the statistics of all shards' rows together in."""


class Shard(NamedTuple):
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


class ShardCollectives(Protocol):
    """Collectives between shards, of which each rank has one or several."""

    @property
    def transport(self) -> Any:
        """Between the ranks."""

    def gather_numbers(self, by_shard: Sequence[Numbers]) -> Numbers:
        """Every shard's numbers, in rows, from those of this rank's shards."""

    def sum_numbers(self, by_shard: Sequence[Numbers]) -> Numbers:
        """The sum over all shards, from the numbers of this rank's, which it may overwrite."""

    def gather_doubles(self, by_shard: Sequence[Doubles]) -> Doubles:
        """Every shard's numbers, one shard's after another's."""

    def terms_over_shards(self, by_shard: Sequence[Doubles]) -> Doubles:
        """Terms of the sum over all shards, one after another: one or several."""


class Kernels(Protocol[N, S]):
    """The passes over a shard's rows, and what is computed of the numbers of all shards."""

    def zeros(self, count: int, like: Tensor) -> N:
        """So many zeros, on the device of `like`."""

    def moments(self, x: Tensor) -> N:
        """Each channel's mean in these rows, then each channel's sum of squared distances from it,
        then the number of values in a channel, which is not 0."""

    def gather(self, by_shard: Sequence[N], collectives: ShardCollectives) -> N:
        """Every shard's moments, from those of this rank's shards. Collective."""

    def count(self, moments: N, channels: int) -> float:
        """How many values a channel has in all shards together."""

    def merge(self, moments: N, shards: Sequence[Shard]) -> S:
        """The statistics of all rows, from the moments of all shards.

        Updates the running statistics of `shards` in place, and leaves their version counters as
        they are, as torch's kernel does: an earlier call's graph may hold them.
        """

    def normalize(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: S
    ) -> Tensor:
        """The output of one shard."""

    def for_backward(
        self, statistics: S, grads: Sequence[Tensor], saved: Sequence[Tensor | None]
    ) -> tuple[Kernels[Any, Any], Any]:
        """The kernels that take these gradients and saved tensors, which hooks may have changed,
        and the statistics for them. Those of other ranks may be others."""

    def sums(self, grad: Tensor, x: Tensor, statistics: S) -> tuple[N, Tensor, Tensor]:
        """sum(grad * x_hat) and sum(grad) of each channel in these rows: as numbers, and as the
        gradients of weight and bias."""

    def total(self, by_shard: Sequence[N], collectives: ShardCollectives) -> N:
        """The sums over all shards' rows, for `input_gradient`, from those of this rank's shards,
        which it may overwrite. Collective."""

    def input_gradient(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, total: N, statistics: S
    ) -> Tensor:
        """scale * (grad - avg(grad) - x_hat * avg(grad * x_hat)), x_hat = (x - mean) * inv_std.

        Ioffe and Szegedy 2015, section 3.
        """


def all_but_channels(x: Tensor) -> tuple[list[int], tuple[int, ...]]:
    """The dimensions that statistics run over; the shape of a channel's number beside `x`."""
    return [0, *range(2, x.dim())], (1, -1) + (1,) * (x.dim() - 2)
