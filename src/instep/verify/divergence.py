"""The first step at which a run on several ranks differs from the oracle by more than rounding.

A value that one process itself does not repeat with other rounding (an adaptive schedule, a loop
that stops at some loss) does not count as a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from instep.verify.compare import (
    GradientDifference,
    collect_rows,
    compare_losses,
    compare_parameters,
    count_samples,
    find_max_difference,
    fingerprint_distance,
    movement,
    ratio,
)
from instep.verify.rank_values import find_odd_buffer, find_odd_gradient
from instep.verify.recording.records import RunRecord


@dataclass(frozen=True)
class Tolerance:
    """Limits up to which a difference counts as rounding, by the dtype of the parameters."""

    gradient: float
    """For the gradient at the oracle's own parameters, relative to its norm."""
    run: float
    """For the loss curve, the final parameters (relative to their movement) and the buffers."""


FLOAT64 = Tolerance(gradient=1e-12, run=1e-9)
FLOAT32 = Tolerance(gradient=5e-6, run=1e-4)
HALF = Tolerance(gradient=1e-2, run=1e-1)


@dataclass(frozen=True)
class Evidence:
    """The runs and limits by which one number of ranks is judged."""

    oracle: RunRecord
    noise: RunRecord
    """One process, with other rounding."""
    pinned: RunRecord
    free: RunRecord
    diffs: list[GradientDifference]
    """The gradients of the pinned steps against the reference's."""
    tolerance: Tolerance
    reference: RunRecord
    """One process, up to the last pinned step; with autocast or without, as `pinned`."""
    limits: Mapping[int, float] = field(default_factory=dict)
    """By pinned step: how much its gradient may differ, if not by the tolerance."""
    between_ranks: float = FLOAT32.gradient
    """How much what is equal on all ranks may differ between them: no noise excuses it."""

    @property
    def n(self) -> int:
        """The number of ranks."""
        return self.free.n

    @property
    def steps(self) -> int:
        """The number of steps that the oracle and all ranks have made."""
        return min(self.oracle.steps, self.free.steps)

    @property
    def wrong_gradients(self) -> list[GradientDifference]:
        """The pinned steps whose gradient differs from the oracle's."""
        return [diff for diff in self.diffs if self.is_wrong(diff)]

    def is_wrong(self, diff: GradientDifference) -> bool:
        """Whether a difference is more than rounding."""
        limit = self.limits.get(diff.step, self.tolerance.gradient)
        return not diff.difference <= limit or diff.hidden is not None

    def is_deterministic_run(self, step: int, value: Callable[[RunRecord, int], object]) -> bool:
        """Whether one process repeats the value at this step with other rounding."""
        if step >= min(self.oracle.steps, self.noise.steps):
            return False
        return value(self.oracle, step) == value(self.noise, step)


@dataclass(frozen=True)
class Divergence:
    """The first step at which a run differs, and the value that differs there."""

    n: int
    step: int
    """Counted from 1, as a user counts."""
    what: str
    """steps, samples, learning rate, parameters, gradient, buffers or loss."""
    tensor: str | None
    difference: float
    """Relative, where it has a size; else infinite."""


def find_divergence(e: Evidence) -> Divergence | None:
    """The earliest difference that cannot be rounding, if any."""
    order = (
        _start,
        _samples,
        _learning_rates,
        _gradient,
        _gradient_of_a_rank,
        _parameters_of_a_rank,
        _buffers_of_a_rank,
        _steps,
    )
    found = [first for check in order if (first := next(check(e), None)) is not None]
    return min(found, key=lambda divergence: divergence.step, default=None)


def find_first_difference(e: Evidence, loss_limit: float, moved_limit: float) -> Divergence:
    """The step from which the free run differs by more than these limits, at latest the end."""
    moved = movement(e.oracle)
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
        tensor, apart = find_max_difference(ours, theirs)
        if apart > 0:
            return Divergence(e.n, e.steps, what, tensor, apart)
    raise AssertionError("nothing has drifted")


def _start(e: Evidence) -> Iterator[Divergence]:
    apart, tensor = fingerprint_distance(e.oracle.at(0)[0].parameters, e.free.at(0)[0].parameters)
    if apart > e.tolerance.gradient:
        yield Divergence(e.n, 1, "parameters", tensor, apart)


def _samples(e: Evidence) -> Iterator[Divergence]:
    for k in range(e.steps):
        if count_samples(e.free, k) != count_samples(e.oracle, k) or has_other_samples(e, k):
            yield Divergence(e.n, k + 1, "samples", None, math.inf)


def has_other_samples(e: Evidence, step: int) -> bool:
    """Whether the step had other samples: other row hashes and another loss.

    Hashes alone do not suffice: one model's output may be another one's input, and differ in its
    bits by rounding.
    """
    if collect_rows(e.free, step) == collect_rows(e.oracle, step) or not e.is_deterministic_run(
        step, collect_rows
    ):
        return False
    return compare_losses(e.oracle, e.free)[step] > e.tolerance.run


def learning_rates_at(run: RunRecord, step: int) -> list[tuple[float, ...]]:
    """The different learning rates of a step among the ranks."""
    return sorted({tuple(float(f"{rate:.9g}") for rate in one.lrs) for one in run.at(step)})


def _learning_rates(e: Evidence) -> Iterator[Divergence]:
    for k in range(e.steps):
        ours, theirs = learning_rates_at(e.oracle, k), learning_rates_at(e.free, k)
        if theirs != ours and (len(theirs) > 1 or e.is_deterministic_run(k, learning_rates_at)):
            pairs = [pair for lrs in theirs for pair in zip(ours[0], lrs, strict=False)]
            apart = max((ratio(abs(a - b), abs(a)) for a, b in pairs), default=math.inf)
            yield Divergence(e.n, k + 1, "learning rate", None, apart)


def _gradient(e: Evidence) -> Iterator[Divergence]:
    for diff in e.wrong_gradients:
        yield Divergence(
            e.n, diff.step + 1, "gradient", diff.hidden or diff.tensor, diff.difference
        )


def _gradient_of_a_rank(e: Evidence) -> Iterator[Divergence]:
    for k in range(e.free.steps):
        if (odd := find_odd_gradient(e.oracle, e.free, k, e.between_ranks)) is not None:
            yield Divergence(e.n, k + 1, "gradient", odd.tensor, odd.difference)


def _parameters_of_a_rank(e: Evidence) -> Iterator[Divergence]:
    for k in range(e.free.steps):
        apart, tensor = compare_ranks(e.free, k)
        if apart > e.between_ranks:
            yield Divergence(e.n, k + 1, "parameters", tensor, apart)


def _buffers_of_a_rank(e: Evidence) -> Iterator[Divergence]:
    for k in range(e.free.steps + 1):
        if (odd := find_odd_buffer(e.oracle, e.free, k, e.between_ranks)) is not None:
            yield Divergence(e.n, min(k + 1, e.free.steps), "buffers", odd.tensor, odd.difference)


def compare_ranks(run: RunRecord, step: int) -> tuple[float, str]:
    """The largest distance of a rank's parameters from rank 0's, and the tensor."""
    first, *others = run.at(step)
    apart = (fingerprint_distance(first.parameters, other.parameters) for other in others)
    return max(apart, default=(0.0, ""))


def _steps(e: Evidence) -> Iterator[Divergence]:
    counts = {len(rank.steps) for rank in e.free.ranks}
    if len(counts) > 1 or (counts != {e.oracle.steps} and e.oracle.steps == e.noise.steps):
        yield Divergence(e.n, min(*counts, e.oracle.steps) + 1, "steps", None, math.inf)
