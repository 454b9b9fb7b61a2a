"""Metrics of the whole data set: sums and counts that every rank adds up and `compute` merges.

Every sample counts once: a rank without samples adds nothing, and no rank pads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from instep.distributed.communication.transport import transport
from instep.training.batches import batch_of
from instep.training.forward_calls import latest

M = TypeVar("M", bound="_Sums")


class _Sums:
    """Running sums (float64) of this rank, on the device of its values: to bring each of them from
    a GPU would be to wait for it. The last one counts."""

    def __init__(self, width: int) -> None:
        self._sums = torch.zeros(width + 1, dtype=torch.float64)

    def _add(self, sums: Tensor, count: float) -> None:
        self._sums = self._sums.to(sums.device)
        self._sums[:-1] += sums.detach().double()
        self._sums[-1] += count

    def merge(self: M, other: M) -> M:
        """Add another metric's sums to this one's; returns itself."""
        self._sums += other._sums.to(self._sums.device)
        return self

    def reset(self) -> None:
        """Forget everything."""
        self._sums.zero_()

    def _averages(self) -> list[float]:
        way = transport()
        total = self._sums.to(way.home, copy=True)  # a rank may have no values, and so no device
        way.all_reduce(total, "sum").wait()
        averages: list[float] = (total[:-1] / total[-1]).tolist()
        return averages


class Mean(_Sums):
    """A mean over all samples of all ranks.

    loss_mean = instep.Mean()
    loss_mean.update(loss, len(target))
    loss_mean.compute()
    """

    def __init__(self) -> None:
        super().__init__(1)

    def update(self, value: Tensor | float, count: float | None = None) -> None:
        """Add this rank's values.

        Args:
            value: one value for each sample (any shape), or, with `count`, their mean.
            count: how many samples `value` is the mean of; may be a number of tokens.
        """
        values = torch.as_tensor(value).detach()
        if _ghost(values):
            return
        if count is None:
            self._add(values.double().sum(), values.numel())
        else:
            self._add(values.double().mean() * count, count)

    def compute(self) -> float:
        """The mean over all ranks; NaN where nothing was counted. Collective."""
        return self._averages()[0]


class Accuracy(_Sums):
    """The fraction of all samples whose target is among the k highest scores, for each k."""

    def __init__(self, topk: int | Sequence[int] = (1,)) -> None:
        topk = (topk,) if isinstance(topk, int) else topk
        if not topk or min(topk) < 1:
            raise ValueError(f"topk holds ranks from 1 on, such as (1, 5); got {tuple(topk)!r}.")
        super().__init__(len(topk))
        self.topk = tuple(topk)

    def update(self, scores: Tensor, target: Tensor) -> None:
        """Add this rank's samples.

        Args:
            scores: (n, classes), the higher the likelier; fewer classes than k count as k.
            target: (n,), class indices.

        Raises ValueError for other shapes.
        """
        if scores.dim() != 2 or target.shape != scores.shape[:1]:
            raise ValueError(
                f"scores are (n, classes) and targets (n,); "
                f"got {tuple(scores.shape)} and {tuple(target.shape)}."
            )
        if _ghost(target):
            return
        best = scores.detach().topk(min(max(self.topk), scores.shape[1])).indices
        hits = (best == target.unsqueeze(1)).double()
        self._add(torch.stack([hits[:, :k].sum() for k in self.topk]), len(target))

    def compute(self) -> tuple[float, ...]:
        """The fraction for each k, over all ranks; NaN where nothing was counted. Collective."""
        return tuple(self._averages())


def _ghost(values: Tensor) -> bool:
    """Whether these come from a sample that only keeps this rank's loop running."""
    batch, call = batch_of(values), latest()
    # A loss is no part of a batch: it belongs to the forward that was made last, if that may be.
    if len(batch.blocks) > 1 and call is not None and {*call.batch.blocks} < {*batch.blocks}:
        batch = call.batch
    return batch.ghost
