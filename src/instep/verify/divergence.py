"""Where a run on several ranks parts from the oracle: checks that hold at any noise.

What one process does not repeat itself when only its rounding changes (an adaptive schedule, a
loop that stops at a loss) is not held against many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from instep.verify.compare import (
    Gap,
    distance,
    farthest,
    loss_differences,
    parameter_differences,
    prints_apart,
    ratio,
    rows_at,
    samples_at,
)
from instep.verify.recording.records import Run


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

    oracle: Run
    noise: Run
    """One process against itself."""
    pinned: Run
    free: Run
    gaps: list[Gap]
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
    def bad(self) -> list[Gap]:
        """The pinned steps whose gradient is not the oracle's."""
        return [gap for gap in self.gaps if self.off(gap)]

    def off(self, gap: Gap) -> bool:
        """Whether this is more than rounding."""
        return not gap.difference <= self.tolerance.gradient or gap.hidden is not None

    def repeats(self, step: int, value: Callable[[Run, int], object]) -> bool:
        """Whether one process has the same value at this step again, with other rounding."""
        if step >= min(self.oracle.steps, self.noise.steps):
            return False
        return value(self.oracle, step) == value(self.noise, step)


@dataclass(frozen=True)
class Parting:
    """The first place where a run is another one."""

    n: int
    step: int
    """Counted from 1, as a user counts."""
    what: str
    """steps, samples, learning rate, parameters, gradient or loss."""
    tensor: str | None
    difference: float
    """Relative, where it has a size; else infinite."""


def first_parting(e: Evidence) -> Parting | None:
    """The earliest of what cannot be rounding; None when there is nothing."""
    order = (_start, _samples, _rates, _gradient, _between_ranks, _steps)
    found = [parting for check in order for parting in _first(check(e))]
    return min(found, key=lambda parting: parting.step, default=None)


def first_drift(e: Evidence, loss_limit: float, moved_limit: float) -> Parting:
    """Where the free run leaves the oracle by more than these limits: the end at the latest."""
    moved = distance(e.oracle.parameters, e.oracle.initial)
    parameters = parameter_differences(e.oracle, e.free)
    for k, loss in enumerate(loss_differences(e.oracle, e.free)):
        apart, tensor = parameters[k]
        if ratio(apart, moved) > moved_limit:
            return Parting(e.n, k + 1, "parameters", tensor, ratio(apart, moved))
        if loss > loss_limit:
            return Parting(e.n, k + 1, "loss", None, loss)
    for what, ours, theirs in (
        ("parameters", e.oracle.parameters, e.free.parameters),
        ("buffers", e.oracle.buffers, e.free.buffers),
    ):
        tensor, apart = farthest(ours, theirs)
        if apart > 0:
            return Parting(e.n, e.steps, what, tensor, apart)
    raise AssertionError("nothing has drifted")


def _first(found: Iterator[Parting]) -> list[Parting]:
    return [parting for parting in [next(found, None)] if parting is not None]


def _start(e: Evidence) -> Iterator[Parting]:
    apart, tensor = prints_apart(e.oracle.at(0)[0].parameters, e.free.at(0)[0].parameters)
    if apart > e.tolerance.gradient:
        yield Parting(e.n, 1, "parameters", tensor, apart)


def _samples(e: Evidence) -> Iterator[Parting]:
    for k in range(e.steps):
        if samples_at(e.free, k) != samples_at(e.oracle, k) or other_rows(e, k):
            yield Parting(e.n, k + 1, "samples", None, math.inf)


def other_rows(e: Evidence, step: int) -> bool:
    """Whether other samples were in this step: other bits, and another loss.

    What a model has made for another one differs in its bits by rounding.
    """
    if rows_at(e.free, step) == rows_at(e.oracle, step) or not e.repeats(step, rows_at):
        return False
    return loss_differences(e.oracle, e.free)[step] > e.tolerance.run


def rates_at(run: Run, step: int) -> list[tuple[float, ...]]:
    """The learning rates of a step, one entry for each opinion among the ranks."""
    return sorted({tuple(float(f"{rate:.9g}") for rate in one.rates) for one in run.at(step)})


def _rates(e: Evidence) -> Iterator[Parting]:
    for k in range(e.steps):
        ours, theirs = rates_at(e.oracle, k), rates_at(e.free, k)
        if theirs != ours and (len(theirs) > 1 or e.repeats(k, rates_at)):
            pairs = [pair for rates in theirs for pair in zip(ours[0], rates, strict=False)]
            apart = max((ratio(abs(a - b), abs(a)) for a, b in pairs), default=math.inf)
            yield Parting(e.n, k + 1, "learning rate", None, apart)


def _gradient(e: Evidence) -> Iterator[Parting]:
    for gap in e.bad:
        yield Parting(e.n, gap.step + 1, "gradient", gap.hidden or gap.tensor, gap.difference)


def _between_ranks(e: Evidence) -> Iterator[Parting]:
    for k in range(e.free.steps):
        apart, tensor = between_ranks(e.free, k)
        if apart > e.tolerance.gradient:
            yield Parting(e.n, k + 1, "parameters", tensor, apart)


def between_ranks(run: Run, step: int) -> tuple[float, str]:
    """How far the ranks are from rank 0 in their parameters, and in which most."""
    first, *others = run.at(step)
    apart = (prints_apart(first.parameters, other.parameters) for other in others)
    return max(apart, default=(0.0, ""))


def _steps(e: Evidence) -> Iterator[Parting]:
    counts = {len(rank.steps) for rank in e.free.ranks}
    if len(counts) > 1 or (counts != {e.oracle.steps} and e.oracle.steps == e.noise.steps):
        yield Parting(e.n, min(*counts, e.oracle.steps) + 1, "steps", None, math.inf)
