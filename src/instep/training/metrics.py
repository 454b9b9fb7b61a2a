"""Metrics of the whole data set: every rank adds up totals, and `compute` sums them over the ranks.

Every sample counts once: a rank without samples adds nothing, and no rank pads. A metric of your
own is a subclass of `Metric`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from instep.distributed.communication.exchanges import all_gather_internal
from instep.distributed.communication.transport import get_transport
from instep.training.batches.candidates import BatchCandidates
from instep.training.batches.noted_losses import are_of_several, find_noted
from instep.training.batches.registry import find_candidates, note_collective
from instep.training.errors import UnknownBatchError
from instep.training.forward_calls import find_calls, last

M = TypeVar("M", bound="Metric")


class Metric(ABC):
    """The base class of metrics that are a function of sums over all samples of all ranks.

    A subclass defines `update`, which calls `add` with this batch's totals, and `compute`, which
    calls `all_reduce` for the totals of all ranks. For example, the F1 score of two classes:

        class F1(instep.Metric):
            def __init__(self):
                super().__init__(3)

            def update(self, predicted, target):
                hits = (predicted * target).sum()
                self.add(torch.stack([hits, predicted.sum(), target.sum()]), target)

            def compute(self):
                hits, predicted, target = self.all_reduce().tolist()
                return 2 * hits / (predicted + target)

    Args:
        size: the number of totals. They are float64 and start at zero.
    """

    def __init__(self, size: int) -> None:
        self.totals = torch.zeros(size, dtype=torch.float64, device="cpu")
        """This rank's. They stay on the device of the values: to copy them from a GPU in every
        step would wait for it."""

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add this rank's samples. Not collective."""

    @abstractmethod
    def compute(self) -> Any:
        """The value over all ranks. Collective."""

    def add(self, totals: Tensor, samples: Tensor) -> None:
        """Add a batch's totals to this rank's.

        Args:
            totals: (size,), of any dtype.
            samples: a tensor of the batch from which they were computed. Nothing is added if it
                is the sample that a rank without rows runs.

        Raises ValueError for totals of another shape, TypeError for what is no tensor.
        """
        for value in (totals, samples):
            if not isinstance(value, Tensor):
                raise TypeError(
                    "add takes two tensors, this batch's totals and one of the batch's own tensors "
                    f"(by which ranks without rows are known), not {type(value).__name__}."
                )
        if totals.shape != self.totals.shape:
            raise ValueError(
                f"a {type(self).__name__} adds a tensor of {len(self.totals)} totals, of shape "
                f"{tuple(self.totals.shape)}; got {tuple(totals.shape)}. torch.stack makes one."
            )
        self._add(totals, samples, None)

    def _add(self, totals: Tensor, samples: Tensor, rows: int | None) -> None:
        if not _is_placeholder(samples, rows):
            self.totals = self.totals.to(totals.device)
            self.totals += totals.detach().double()

    def all_reduce(self) -> Tensor:
        """The totals summed over all ranks.

        Collective. Raises TrainingError if some ranks have no rows of the first batch of a loop
        without gradients.
        """
        note_collective()
        transport = get_transport()
        # A rank without values has its totals on the CPU, so all go to one device.
        total = self.totals.to(transport.control_device, copy=True)
        transport.all_reduce(total, "sum").wait()
        return total

    def merge(self: M, other: M) -> M:
        """Add the totals of another metric of the same class to this one's; returns itself.

        Raises TypeError for another class.
        """
        if type(other) is not type(self):
            name, of_other = type(self).__name__, type(other).__name__
            raise TypeError(f"{name}.merge takes a metric of its own class, not of {of_other}.")
        self.totals += other.totals.to(self.totals.device)
        return self

    def reset(self) -> None:
        """Forget everything."""
        self.totals.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's totals."""
        return {"totals": self.totals.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set this rank's totals. Raises ValueError for another number of them."""
        if state["totals"].shape != self.totals.shape:
            raise ValueError(
                f"{len(state['totals'])} totals, but there are {len(self.totals)}: this state is "
                f"that of another metric than this {type(self).__name__}, or of one that was made "
                "with other arguments."
            )
        self.totals = state["totals"].to(self.totals, copy=True)


class Mean(Metric):
    """A mean over all samples of all ranks.

        loss_mean = instep.Mean()
        loss_mean.update(loss, len(target))  # in the loop, on every rank
        loss_mean.compute()

    With `count` it is a mean of means, each with its weight.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def update(
        self, value: Tensor | float, count: float | None = None, samples: Tensor | None = None
    ) -> None:
        """Add this rank's values.

        Args:
            value: one value for each sample (any shape), or, with `count`, their mean.
            count: how many samples `value` is the mean of; may be a number of tokens. With 0,
                `value` may be anything.
            samples: a tensor of the batch. It is needed only where loops over several loaders are
                at work and `value` is no loss that had a backward.

        Collective where that is so. Raises UnknownBatchError where the batch cannot be told.
        """
        of_batch = value if samples is None else samples
        values = (
            value
            if isinstance(value, Tensor)
            else torch.as_tensor(value, dtype=torch.float64, device="cpu")
        ).detach()
        rows = count if isinstance(count, int) else None
        if count is None:
            total, count = values.double().sum(), values.numel()
        else:
            mean = values.double().mean() if count else values.new_zeros((), dtype=torch.float64)
            total = mean * count
        totals = torch.stack([total, torch.full_like(total, count)])
        self._add(totals, of_batch if isinstance(of_batch, Tensor) else values, rows)

    def compute(self) -> float:
        """The mean over all ranks; NaN where nothing was counted. Collective."""
        total, count = self.all_reduce()
        return float(total / count)


class Accuracy(Metric):
    """The fraction of all samples whose target is among the k highest scores, for each k.

    Args:
        topk: one k, or several, from 1 on.

    Raises ValueError for another k, or none.
    """

    def __init__(self, topk: int | Sequence[int] = (1,)) -> None:
        topk = (topk,) if isinstance(topk, int) else topk
        if not topk or min(topk) < 1:
            raise ValueError(f"topk holds ranks from 1 on, such as (1, 5); got {tuple(topk)!r}.")
        super().__init__(len(topk) + 1)
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
        best = scores.detach().topk(min(max(self.topk), scores.shape[1])).indices
        hits = (best == target.unsqueeze(1)).double()
        totals = [hits[:, :k].sum() for k in self.topk]
        self.add(torch.stack([*totals, torch.full_like(totals[0], len(target))]), target)

    def compute(self) -> tuple[float, ...]:
        """The fraction for each k, over all ranks; NaN where nothing was counted. Collective."""
        totals = self.all_reduce()
        return tuple((totals[:-1] / totals[-1]).tolist())


def gather_rows(rows: Tensor) -> Tensor:
    """The rows of the whole batch, in its order, on every rank: each once, none padded.

        for x, y in loader:                     # from instep.shard
            predicted += instep.gather_rows(model(x).argmax(1)).tolist()

    It is called once for each batch: rows of several batches would be ordered by rank first. Add up
    what it returns: a rank without rows of the last batch gets a placeholder in such a loop.

    Args:
        rows: (n, ...), one row for each sample of this rank's part of the batch, of any dtype. A
            rank without samples, which runs a placeholder, may pass what that gave.

    Returns:
        (N, ...), detached, on the device of `rows`; N is the number of samples of the batch.

    Collective. Raises TypeError for what is no tensor, ValueError for one without dimensions,
    TrainingError if some ranks have no rows of the first batch of a loop without gradients, and
    what `all_gather` raises.
    """
    if not isinstance(rows, Tensor):
        raise TypeError(
            "gather_rows takes one tensor with one row for each sample, "
            f"not {type(rows).__name__}: call it for each of several tensors. "
            "instep.all_gather_object gathers Python values."
        )
    if rows.dim() == 0:
        raise ValueError("gather_rows takes a tensor with one row for each sample; got a scalar.")
    note_collective()
    own = rows[:0] if _is_placeholder(rows) else rows
    return torch.cat(all_gather_internal(own.detach()))


def _is_placeholder(values: Tensor, rows: int | None = None) -> bool:
    """Whether these come from the sample that a rank without rows runs; `rows`: how many samples a
    mean is of, as far as that is known."""
    batch = find_candidates(values)
    if len(batch.blocks) > 1 and not batch.rows and rows is not None:
        batch = replace(batch, rows=frozenset((rows,)))
    if len(batch.blocks) > 1 and any(each and each.has_empty_ranks for each in batch.blocks):
        return _is_placeholder_of_several(values, batch)
    return _of_last_forward(batch).is_placeholder


def _is_placeholder_of_several(values: Tensor, batch: BatchCandidates) -> bool:
    """Whether values are a placeholder's, where batches of several loops are possible, some
    without rows for all ranks."""
    calls = find_calls((values,))[0] if values.grad_fn is not None else []
    if len(calls) == 1:
        return calls[0].is_placeholder
    noted = find_noted(values, batch.blocks)
    if noted is None and not are_of_several(batch.blocks):
        noted = _of_last_forward(batch)
    try:
        return (batch if noted is None else noted).is_placeholder
    except UnknownBatchError as error:
        raise UnknownBatchError(
            "these values may be of different batches, of which some have no rows on this or "
            "another rank. Update the metric with the loss on which backward is called; or name "
            "a tensor of the batch, as in mean.update(value, len(x), samples=x)."
        ) from error


def _of_last_forward(batch: BatchCandidates) -> BatchCandidates:
    call = last()
    # A loss is no part of a batch: it belongs to the forward that was made last, if that may be, as
    # it may wherever no loop is at work: of kept batches (`itertools.cycle`) any is possible.
    if len(batch.blocks) > 1 and call is not None:
        possible = {*batch.blocks}
        if {*call.batch.blocks} < possible or None in possible:
            return call.batch
    return batch
