"""Where a run on several ranks parts from the oracle: checks that hold at any noise.

What one process does not repeat itself when only its rounding changes (an adaptive schedule, a
loop that stops at a loss) is not held against many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from instep.verify.compare import (
    GradientDifference,
    collect_rows,
    compare_losses,
    compare_parameters,
    count_samples,
    distance,
    find_worst_tensor,
    fingerprint_distance,
    ratio,
)
from instep.verify.recording.records import RunRecord


@dataclass(frozen=True)
class Tolerance:
    """What counts as rounding, by the dtype of the parameters."""

    gradient: float
    """Of the gradient at the oracle's own parameters, relative to its norm."""
    run: float
    """Of the loss curve, of the final parameters (to the distance moved) and buffers."""


FLOAT64 = Tolerance(gradient=1e-12, run=1e-9)
FLOAT32 = Tolerance(gradient=5e-6, run=1e-4)
HALF = Tolerance(gradient=1e-2, run=1e-1)


@dataclass(frozen=True)
class Evidence:
    """What there is to judge one number of ranks by."""

    oracle: RunRecord
    noise: RunRecord
    """One process against itself."""
    pinned: RunRecord
    free: RunRecord
    diffs: list[GradientDifference]
    """The gradients of the pinned steps against the oracle's."""
    tolerance: Tolerance

    @property
    def n(self) -> int:
        """How many ranks."""
        return self.free.n

    @property
    def steps(self) -> int:
        """How many steps the oracle and all ranks have made."""
        return min(self.oracle.steps, self.free.steps)

    @property
    def wrong_gradients(self) -> list[GradientDifference]:
        """The pinned steps whose gradient is not the oracle's."""
        return [diff for diff in self.diffs if self.is_wrong(diff)]

    def is_wrong(self, diff: GradientDifference) -> bool:
        """Whether this is more than rounding."""
        return not diff.difference <= self.tolerance.gradient or diff.hidden is not None

    def is_repeatable(self, step: int, value: Callable[[RunRecord, int], object]) -> bool:
        """Whether one process has the same value at this step again, with other rounding."""
        if step >= min(self.oracle.steps, self.noise.steps):
            return False
        return value(self.oracle, step) == value(self.noise, step)


@dataclass(frozen=True)
class Divergence:
    """The first place where a run is another one."""

    n: int
    step: int
    """Counted from 1, as a user counts."""
    what: str
    """steps, samples, learning rate, parameters, gradient or loss."""
    tensor: str | None
    difference: float
    """Relative, where it has a size; else infinite."""


def find_divergence(e: Evidence) -> Divergence | None:
    """The earliest of what cannot be rounding; None when there is nothing."""
    order = (_start, _samples, _first_lrs, _gradient, _between_ranks, _steps)
    found = [divergence for check in order for divergence in _first(check(e))]
    return min(found, key=lambda divergence: divergence.step, default=None)


def find_drift(e: Evidence, loss_limit: float, moved_limit: float) -> Divergence:
    """Where the free run leaves the oracle by more than these limits: the end at the latest."""
    moved = distance(e.oracle.parameters, e.oracle.initial)
    parameters = compare_parameters(e.oracle, e.free)
    for k, loss in enumerate(compare_losses(e.oracle, e.free)):
        apart, tensor = parameters[k]
        if ratio(apart, moved) > moved_limit:
            return Divergence(e.n, k + 1, "parameters", tensor, ratio(apart, moved))
        if loss > loss_limit:
            return Divergence(e.n, k + 1, "loss", None, loss)
    for what, ours, theirs in (
        ("parameters", e.oracle.parameters, e.free.parameters),
        ("buffers", e.oracle.buffers, e.free.buffers),
    ):
        tensor, apart = find_worst_tensor(ours, theirs)
        if apart > 0:
            return Divergence(e.n, e.steps, what, tensor, apart)
    raise AssertionError("nothing has drifted")


def _first(found: Iterator[Divergence]) -> list[Divergence]:
    return [divergence for divergence in [next(found, None)] if divergence is not None]


def _start(e: Evidence) -> Iterator[Divergence]:
    apart, tensor = fingerprint_distance(e.oracle.at(0)[0].parameters, e.free.at(0)[0].parameters)
    if apart > e.tolerance.gradient:
        yield Divergence(e.n, 1, "parameters", tensor, apart)


def _samples(e: Evidence) -> Iterator[Divergence]:
    for k in range(e.steps):
        if count_samples(e.free, k) != count_samples(e.oracle, k) or has_other_samples(e, k):
            yield Divergence(e.n, k + 1, "samples", None, math.inf)


def has_other_samples(e: Evidence, step: int) -> bool:
    """Whether other samples were in this step: other bits, and another loss.

    What a model has made for another one differs in its bits by rounding.
    """
    if collect_rows(e.free, step) == collect_rows(e.oracle, step) or not e.is_repeatable(
        step, collect_rows
    ):
        return False
    return compare_losses(e.oracle, e.free)[step] > e.tolerance.run


def lrs_at(run: RunRecord, step: int) -> list[tuple[float, ...]]:
    """The learning rates of a step, one entry for each opinion among the ranks."""
    return sorted({tuple(float(f"{rate:.9g}") for rate in one.lrs) for one in run.at(step)})


def _first_lrs(e: Evidence) -> Iterator[Divergence]:
    for k in range(e.steps):
        ours, theirs = lrs_at(e.oracle, k), lrs_at(e.free, k)
        if theirs != ours and (len(theirs) > 1 or e.is_repeatable(k, lrs_at)):
            pairs = [pair for lrs in theirs for pair in zip(ours[0], lrs, strict=False)]
            apart = max((ratio(abs(a - b), abs(a)) for a, b in pairs), default=math.inf)
            yield Divergence(e.n, k + 1, "learning rate", None, apart)


def _gradient(e: Evidence) -> Iterator[Divergence]:
    for diff in e.wrong_gradients:
        yield Divergence(
            e.n, diff.step + 1, "gradient", diff.hidden or diff.tensor, diff.difference
        )


def _between_ranks(e: Evidence) -> Iterator[Divergence]:
    for k in range(e.free.steps):
        apart, tensor = compare_ranks(e.free, k)
        if apart > e.tolerance.gradient:
            yield Divergence(e.n, k + 1, "parameters", tensor, apart)


def compare_ranks(run: RunRecord, step: int) -> tuple[float, str]:
    """How far the ranks are from rank 0 in their parameters, and in which most."""
    first, *others = run.at(step)
    apart = (fingerprint_distance(first.parameters, other.parameters) for other in others)
    return max(apart, default=(0.0, ""))


def _steps(e: Evidence) -> Iterator[Divergence]:
    counts = {len(rank.steps) for rank in e.free.ranks}
    if len(counts) > 1 or (counts != {e.oracle.steps} and e.oracle.steps == e.noise.steps):
        yield Divergence(e.n, min(*counts, e.oracle.steps) + 1, "steps", None, math.inf)
