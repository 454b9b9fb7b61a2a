"""The verdict: from runs to one of three words, with the figures and the cause."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from enum import StrEnum

import torch

from instep.verify.causes import likely_cause
from instep.verify.compare import Difference, difference, gradient_gaps, prints_apart
from instep.verify.partings import (
    FLOAT32,
    FLOAT64,
    HALF,
    Evidence,
    Parting,
    Tolerance,
    first_drift,
    first_parting,
    rates_at,
)
from instep.verify.records import Run
from instep.verify.runs import REVERSED, Runs

OF_ITS_NOISE = 10.0
"""A run may differ this many times as much as one process from itself."""


class Verdict(StrEnum):
    """What is told of a script."""

    SAME = "SAME"
    NOISE = "SAME WITHIN ITS OWN NOISE"
    DIFFERENT = "DIFFERENT"


@dataclass(frozen=True)
class Judgement:
    """Of one number of ranks."""

    run: Run
    """The free run."""
    verdict: Verdict
    difference: Difference
    parting: Parting | None = None
    cause: str | None = None


@dataclass(frozen=True)
class Report:
    """Of the whole script."""

    verdict: Verdict
    oracle: Run
    noise: Difference
    noise_by: str
    tolerance: Tolerance
    judgements: tuple[Judgement, ...]
    unlike_python: str | None = None
    """How one process of instep differs from plain Python."""
    cause: str | None = None
    parting: Parting | None = None

    @property
    def worst(self) -> Difference:
        """The largest difference of each kind."""
        rows = [astuple(judgement.difference) for judgement in self.judgements]
        return Difference(*map(max, zip(*rows, strict=True))) if rows else Difference(*[0.0] * 5)


def judge(runs: Runs) -> Report:
    """Compare everything with the oracle."""
    tolerance = tolerance_for(runs.oracle)
    gaps = gradient_gaps(runs.again, runs.noise) if runs.noise_by == REVERSED else []
    noise = difference(runs.oracle, runs.noise, gaps)
    report = Report(
        Verdict.SAME,
        runs.oracle,
        noise,
        runs.noise_by,
        tolerance,
        (),
        unlike_python(runs.oracle, runs.plain, tolerance),
    )
    if unsteady := not_repeated(runs.oracle, runs.again, tolerance):
        return replace(report, verdict=Verdict.DIFFERENT, cause=unsteady)
    judgements = tuple(_judge_one(runs, n, noise, tolerance) for n in runs.free)
    verdicts = [judgement.verdict for judgement in judgements]
    worst = max(verdicts, key=list(Verdict).index, default=Verdict.SAME)
    first = next((j for j in judgements if j.verdict is worst), None)
    return replace(
        report,
        verdict=worst,
        judgements=judgements,
        cause=first.cause if first else None,
        parting=first.parting if first else None,
    )


def _judge_one(runs: Runs, n: int, noise: Difference, tolerance: Tolerance) -> Judgement:
    pinned, free = runs.pinned[n], runs.free[n]
    rounding = runs.noise.gradients.get(0) if runs.noise_by == REVERSED else None
    gaps = gradient_gaps(runs.again, pinned, rounding)
    found = difference(runs.oracle, free, gaps)
    allowed = replace(tolerance, gradient=max(tolerance.gradient, OF_ITS_NOISE * noise.gradient))
    evidence = Evidence(runs.oracle, runs.noise, pinned, free, gaps, allowed)
    parting = first_parting(evidence)
    if parting is None:
        verdict, limit = _by_size(found, noise, tolerance)
        if verdict is not Verdict.DIFFERENT:
            return Judgement(free, verdict, found)
        parting = first_drift(evidence, limit)
    return Judgement(free, Verdict.DIFFERENT, found, parting, likely_cause(evidence))


def _by_size(found: Difference, noise: Difference, tolerance: Tolerance) -> tuple[Verdict, float]:
    """The verdict on the sizes alone, and what the first exceeded one might have been."""
    verdict, limit = Verdict.SAME, 0.0
    for size, own, allowed in (
        (found.gradient, noise.gradient, tolerance.gradient),
        (found.loss, noise.loss, tolerance.run),
        (found.moved, noise.moved, tolerance.run),
        (found.buffers, noise.buffers, tolerance.run),
    ):
        if size <= allowed:
            continue
        if not size <= OF_ITS_NOISE * own:
            return Verdict.DIFFERENT, max(allowed, OF_ITS_NOISE * own)
        verdict = Verdict.NOISE
    return verdict, limit


def tolerance_for(oracle: Run) -> Tolerance:
    """By the least precise dtype that is trained."""
    kinds = {tensor.dtype for tensor in oracle.parameters.values()}
    if kinds & {torch.float16, torch.bfloat16}:
        return HALF
    return FLOAT64 if kinds and kinds <= {torch.float64, torch.complex128} else FLOAT32


def usable_noise(reference: Run, backwards: Run) -> bool:
    """Whether reversed batches change the first gradient, and only by rounding."""
    gaps = gradient_gaps(reference, backwards)
    limit = OF_ITS_NOISE * tolerance_for(backwards).gradient
    return bool(gaps) and 0.0 < gaps[0].difference <= limit


def not_repeated(oracle: Run, again: Run, tolerance: Tolerance) -> str | None:
    """Why one process does not repeat itself; None if it does, up to rounding."""
    for k in range(min(oracle.steps, again.steps)):
        ours, theirs = oracle.at(k)[0], again.at(k)[0]
        place = f"two runs of one process differ from step {k + 1} on"
        apart, tensor = prints_apart(ours.parameters, theirs.parameters)
        if k == 0 and apart > tolerance.gradient:
            return f"not deterministic: {place}, {tensor} starts differently; seed the script"
        if ours.samples != theirs.samples or rates_at(oracle, k) != rates_at(again, k):
            return f"not deterministic: {place}, in samples or learning rates"
        apart, tensor = prints_apart(ours.gradients, theirs.gradients)
        if apart > OF_ITS_NOISE * tolerance.gradient:
            if ours.rows != theirs.rows:
                return f"not deterministic: {place}, in their samples; seed the script"
            if ours.random != theirs.random:
                return f"not deterministic: {place}, in their random numbers; seed the script"
            return (
                f"non-deterministic kernels: {place}, with the same samples and random numbers, "
                f"in the gradient of {tensor} (see torch.use_deterministic_algorithms)"
            )
    return None


def unlike_python(oracle: Run, plain: Run | None, tolerance: Tolerance) -> str | None:
    """How one process of instep differs from the script without instep, in one sentence."""
    if plain is None:
        return "the script does not run in plain Python without instep's two lines"
    for k in range(min(oracle.steps, plain.steps)):
        ours, theirs = oracle.at(k)[0], plain.at(k)[0]
        if k == 0 and prints_apart(ours.parameters, theirs.parameters)[0] > tolerance.gradient:
            return "the parameters start differently"
        if ours.samples != theirs.samples:
            return f"step {k + 1} has {ours.samples} samples instead of {theirs.samples}"
        if ours.rows != theirs.rows:
            return (
                "the samples come in another order: instep draws it from a stream of its own, "
                "the same on all ranks"
            )
        if prints_apart(ours.gradients, theirs.gradients)[0] > OF_ITS_NOISE * tolerance.gradient:
            return f"the gradient of step {k + 1} is another one, though the samples are the same"
    return None
