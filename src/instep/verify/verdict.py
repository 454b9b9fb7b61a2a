"""The verdict: from runs to one of three words, with the figures and the cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from enum import StrEnum

import torch

from instep.verify.causes import likely_cause
from instep.verify.compare import Difference, difference, gradient_gaps, prints_apart
from instep.verify.divergence import (
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
from instep.verify.recording.records import Run, Step
from instep.verify.runs import Alone, Together

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


def judge(alone: Alone, together: Sequence[Together]) -> Report:
    """Compare everything with the oracle."""
    tolerance = tolerance_for(alone.oracle)
    gaps = [gap for run in alone.with_other_rounding for gap in gradient_gaps(alone.again, run)]
    noise = difference(alone.oracle, alone.noise, gaps)
    unrepeated = unsteady(alone)
    judgements = () if unrepeated else tuple(_judge(alone, t, noise, tolerance) for t in together)
    worst = max(
        judgements,
        key=lambda judgement: list(Verdict).index(judgement.verdict),
        default=Judgement(alone.oracle, Verdict.SAME, difference(alone.oracle, alone.oracle, [])),
    )
    return Report(
        Verdict.DIFFERENT if unrepeated else worst.verdict,
        alone.oracle,
        noise,
        alone.noise_by,
        tolerance,
        judgements,
        unlike_python(alone.oracle, alone.plain, tolerance),
        unrepeated or worst.cause,
        worst.parting,
    )


def _judge(alone: Alone, runs: Together, noise: Difference, tolerance: Tolerance) -> Judgement:
    gaps = gradient_gaps(alone.again, runs.pinned, alone.with_other_rounding)
    found = difference(alone.oracle, runs.free, gaps)
    allowed = replace(tolerance, gradient=max(tolerance.gradient, OF_ITS_NOISE * noise.gradient))
    evidence = Evidence(alone.oracle, alone.noise, runs.pinned, runs.free, gaps, allowed)
    verdict = _by_size(found, noise, tolerance)
    parting = first_parting(evidence)
    if parting is None and verdict is Verdict.DIFFERENT:
        limits = (max(tolerance.run, OF_ITS_NOISE * own) for own in (noise.loss, noise.moved))
        parting = first_drift(evidence, *limits)
    if parting is None:
        return Judgement(runs.free, verdict, found)
    return Judgement(runs.free, Verdict.DIFFERENT, found, parting, likely_cause(evidence))


def _by_size(found: Difference, noise: Difference, tolerance: Tolerance) -> Verdict:
    """The verdict on the sizes alone."""
    verdict = Verdict.SAME
    for size, own, allowed in (
        (found.gradient, noise.gradient, tolerance.gradient),
        (found.loss, noise.loss, tolerance.run),
        (found.moved, noise.moved, tolerance.run),
        (found.buffers, noise.buffers, tolerance.run),
    ):
        if size <= allowed:
            continue
        if not size <= OF_ITS_NOISE * own:
            return Verdict.DIFFERENT
        verdict = Verdict.NOISE
    return verdict


def tolerance_for(oracle: Run) -> Tolerance:
    """By the least precise dtype that is trained or computed with."""
    kinds = {tensor.dtype for tensor in oracle.parameters.values()}
    computed_in_half = any(step.half for step in oracle.ranks[0].steps)
    if computed_in_half or kinds & {torch.float16, torch.bfloat16}:
        return HALF
    return FLOAT64 if kinds and kinds <= {torch.float64, torch.complex128} else FLOAT32


def usable_noise(reference: Run, backwards: Run) -> bool:
    """Whether reversed batches change the first gradient, and only by rounding."""
    gaps = gradient_gaps(reference, backwards)
    limit = OF_ITS_NOISE * tolerance_for(backwards).gradient
    return bool(gaps) and 0.0 < gaps[0].difference <= limit


def unsteady(alone: Alone) -> str | None:
    """Why one process does not repeat itself; None if it does, up to rounding."""
    oracle, again, tolerance = alone.oracle, alone.again, tolerance_for(alone.oracle)
    for k in range(min(oracle.steps, again.steps)):
        ours, theirs = oracle.at(k)[0], again.at(k)[0]
        place = f"two runs of one process differ from step {k + 1} on"
        apart, tensor = prints_apart(ours.parameters, theirs.parameters)
        if k == 0 and apart > tolerance.gradient:
            return f"not deterministic: {place}, {tensor} starts differently (seed the script)"
        if ours.samples != theirs.samples or rates_at(oracle, k) != rates_at(again, k):
            return f"not deterministic: {place}, in samples or learning rates"
        apart, tensor = prints_apart(ours.gradients, theirs.gradients)
        if apart > OF_ITS_NOISE * tolerance.gradient:
            return f"{_why(ours, theirs)}: {place}, in the gradient of {tensor}"
    return None


def _why(ours: Step, theirs: Step) -> str:
    """Why two gradients of one process differ."""
    if ours.random != theirs.random:
        return "not deterministic (seed the script)"
    if ours.rows != theirs.rows:
        return "not deterministic in its samples"
    return (
        "non-deterministic kernels, with equal samples and random numbers "
        "(see torch.use_deterministic_algorithms)"
    )


def _asked_alike(oracle: Run, plain: Run) -> bool:
    """Whether the DataLoaders of both have asked for the same samples in the same order."""
    ends = [run.ranks[0].end for run in (oracle, plain)]
    ours, theirs = (() if end is None else end.indices for end in ends)
    known = min(len(ours), len(theirs))
    return known > 0 and ours[:known] == theirs[:known]


def unlike_python(oracle: Run, plain: Run | None, tolerance: Tolerance) -> str | None:
    """How one process of instep differs from the script without instep, in one sentence."""
    if plain is None:
        return "the script does not run in plain Python without instep's two lines"
    for k in range(min(oracle.steps, plain.steps)):
        ours, theirs = oracle.at(k)[0], plain.at(k)[0]
        if k == 0 and prints_apart(ours.parameters, theirs.parameters)[0] > tolerance.gradient:
            return (
                "the parameters start differently (instep.shard takes a seed from torch's "
                "generator, which plain Python does not)"
            )
        if ours.samples != theirs.samples:
            return f"step {k + 1} has {ours.samples} samples instead of {theirs.samples}"
        if ours.rows != theirs.rows and _asked_alike(oracle, plain):
            return (
                "what is random in a sample is drawn from a stream of the sample's own, the same "
                "whoever loads it (INSTEP_LOAD=whole: from plain Python's)"
            )
        if ours.rows != theirs.rows:
            return (
                "the samples come in another order: instep draws it from a stream of its own, "
                "the same on all ranks"
            )
        if prints_apart(ours.gradients, theirs.gradients)[0] > OF_ITS_NOISE * tolerance.gradient:
            return f"the gradient of step {k + 1} is another one, though the samples are the same"
    return None
