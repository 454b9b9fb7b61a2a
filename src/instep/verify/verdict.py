"""The verdict on runs, with the differences and the likely cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from enum import StrEnum

import torch

from instep.verify.causes import find_cause
from instep.verify.compare import (
    GradientDifference,
    RunDifference,
    compare_gradients,
    compare_runs,
    fingerprint_distance,
)
from instep.verify.divergence import (
    FLOAT32,
    FLOAT64,
    HALF,
    Divergence,
    Evidence,
    Tolerance,
    find_divergence,
    find_first_difference,
    learning_rates_at,
)
from instep.verify.recording.records import RunRecord, StepRecord
from instep.verify.runs import PINNED, MultiRankRuns, SingleRankRuns

OF_ITS_NOISE = 10.0
"""A run may differ this many times as much as one process from itself."""


class Verdict(StrEnum):
    """The three verdicts."""

    SAME = "SAME"
    NOISE = "SAME WITHIN ITS OWN NOISE"
    DIFFERENT = "DIFFERENT"


@dataclass(frozen=True)
class RunResult:
    """The verdict on one number of ranks."""

    run: RunRecord
    """The free run."""
    verdict: Verdict
    difference: RunDifference
    divergence: Divergence | None = None
    cause: str | None = None


@dataclass(frozen=True)
class Report:
    """The verdict on the whole script."""

    verdict: Verdict
    oracle: RunRecord
    noise: RunDifference
    noise_by: str
    tolerance: Tolerance
    results: tuple[RunResult, ...]
    compared_steps: tuple[int, ...] = ()
    """The steps whose gradients were compared, from 0."""
    autocast: bool = True
    """Whether these gradients were computed with the script's autocast."""
    compare_with_python: str | None = None
    """How one process under instep differs from plain Python, if it does."""
    cause: str | None = None
    divergence: Divergence | None = None

    @property
    def max_difference(self) -> RunDifference:
        """The largest of each difference."""
        rows = [astuple(result.difference) for result in self.results]
        return (
            RunDifference(*map(max, zip(*rows, strict=True))) if rows else RunDifference(*[0.0] * 5)
        )


def make_report(single: SingleRankRuns, multi: Sequence[MultiRankRuns]) -> Report:
    """Compare all runs with the oracle. Without autocast gradients can be compared with fewer
    rounding errors; with it they must be right as well."""
    report = _make_report(single, multi)
    if single.full is None:
        return report
    full = _make_report(single.full, in_full_precision(multi))
    only_with = report.verdict is Verdict.DIFFERENT is not full.verdict
    return report if only_with else full


def in_full_precision(multi: Sequence[MultiRankRuns]) -> list[MultiRankRuns]:
    """The runs, with the pinned steps without autocast in place of those with it."""
    return [replace(runs, pinned=runs.full) for runs in multi if runs.full is not None]


def _make_report(single: SingleRankRuns, multi: Sequence[MultiRankRuns]) -> Report:
    tolerance = choose_tolerance(single.oracle)
    if not single.autocast:
        tolerance = replace(tolerance, gradient=choose_tolerance(single.again).gradient)
    diffs = [
        diff for run in single.with_other_rounding for diff in compare_gradients(single.again, run)
    ]
    noise = compare_runs(single.oracle, single.noise, diffs)
    nondeterminism = find_nondeterministic(single) if single.autocast else None
    compared = () if nondeterminism else multi
    results = tuple(_make_result(single, runs, diffs, noise, tolerance) for runs in compared)
    worst = max(
        results,
        key=lambda result: list(Verdict).index(result.verdict),
        default=RunResult(
            single.oracle, Verdict.SAME, compare_runs(single.oracle, single.oracle, [])
        ),
    )
    return Report(
        Verdict.DIFFERENT if nondeterminism else worst.verdict,
        single.oracle,
        noise,
        single.noise_by,
        tolerance,
        results,
        tuple(single.again.gradients),
        single.autocast,
        compare_with_python(single.oracle, single.plain, tolerance),
        nondeterminism or worst.cause,
        worst.divergence,
    )


def _make_result(
    single: SingleRankRuns,
    runs: MultiRankRuns,
    rounding: Sequence[GradientDifference],
    noise: RunDifference,
    tolerance: Tolerance,
) -> RunResult:
    diffs = compare_gradients(single.again, runs.pinned, single.with_other_rounding)
    found = compare_runs(single.oracle, runs.free, diffs)
    allowed = replace(tolerance, gradient=max(tolerance.gradient, OF_ITS_NOISE * noise.gradient))
    evidence = Evidence(
        single.oracle,
        single.noise,
        runs.pinned,
        runs.free,
        diffs,
        allowed,
        single.again,
        _limits(single.again, rounding, tolerance),
        _tolerance_of(single.oracle).gradient,
    )
    verdict = _verdict_by_size(found, noise, tolerance)
    divergence = find_divergence(evidence)
    if divergence is None and verdict is Verdict.DIFFERENT:
        limits = (max(tolerance.run, OF_ITS_NOISE * own) for own in (noise.loss, noise.moved))
        divergence = find_first_difference(evidence, *limits)
    if divergence is None:
        return RunResult(runs.free, verdict, found)
    return RunResult(runs.free, Verdict.DIFFERENT, found, divergence, find_cause(evidence))


def _limits(
    reference: RunRecord, rounding: Sequence[GradientDifference], tolerance: Tolerance
) -> dict[int, float]:
    """By step: how much its gradient may differ. The first steps have one limit; a later one is
    judged by what rounding does up to it, since what is not pinned may be further off by then."""
    return {
        k: max(
            [tolerance.gradient]
            + [OF_ITS_NOISE * one.difference for one in rounding if one.step < max(k + 1, PINNED)]
        )
        for k in reference.gradients
    }


def _verdict_by_size(found: RunDifference, noise: RunDifference, tolerance: Tolerance) -> Verdict:
    """The verdict by the sizes of the differences alone."""
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


def choose_tolerance(oracle: RunRecord) -> Tolerance:
    """The tolerance for the least precise dtype of parameters and computation."""
    return HALF if oracle.half_precision else _tolerance_of(oracle)


def _tolerance_of(oracle: RunRecord) -> Tolerance:
    """The tolerance for the least precise dtype of parameters."""
    kinds = {tensor.dtype for tensor in oracle.parameters.values()}
    if kinds & {torch.float16, torch.bfloat16}:
        return HALF
    return FLOAT64 if kinds and kinds <= {torch.float64, torch.complex128} else FLOAT32


def is_usable_noise(reference: RunRecord, backwards: RunRecord) -> bool:
    """Whether reversed batches change the first gradient, and only by rounding."""
    diffs = compare_gradients(reference, backwards)
    limit = OF_ITS_NOISE * choose_tolerance(backwards).gradient
    return bool(diffs) and 0.0 < diffs[0].difference <= limit


def find_nondeterministic(single: SingleRankRuns) -> str | None:
    """Why two runs of one process differ by more than rounding; None if they do not."""
    oracle, again, tolerance = single.oracle, single.again, choose_tolerance(single.oracle)
    for k in range(min(oracle.steps, again.steps)):
        ours, theirs = oracle.at(k)[0], again.at(k)[0]
        place = f"two runs of one process differ from step {k + 1} on"
        apart, tensor = fingerprint_distance(ours.parameters, theirs.parameters)
        if k == 0 and apart > tolerance.gradient:
            return f"not deterministic: {place}, {tensor} starts differently (seed the script)"
        if ours.samples != theirs.samples or learning_rates_at(oracle, k) != learning_rates_at(
            again, k
        ):
            return f"not deterministic: {place}, in samples or learning rates"
        apart, tensor = fingerprint_distance(ours.gradients, theirs.gradients)
        if apart > OF_ITS_NOISE * tolerance.gradient:
            return f"{_why(ours, theirs)}: {place}, in the gradient of {tensor}"
    return None


def _why(ours: StepRecord, theirs: StepRecord) -> str:
    """Why two gradients of one process differ."""
    if ours.generator_hash != theirs.generator_hash:
        return "not deterministic (seed the script)"
    if ours.row_hashes != theirs.row_hashes:
        return "not deterministic in its samples"
    return (
        "non-deterministic kernels, with equal samples and random numbers "
        "(see torch.use_deterministic_algorithms)"
    )


def _have_same_order(oracle: RunRecord, plain: RunRecord) -> bool | None:
    """Whether both runs load the same samples in the same order; None if that is not known."""
    ends = [run.ranks[0].end for run in (oracle, plain)]
    ours, theirs = (() if end is None else end.indices for end in ends)
    known = min(len(ours), len(theirs))
    if known:
        return ours[:known] == theirs[:known]
    here, there = (_positions(run, min(oracle.steps, plain.steps)) for run in (oracle, plain))
    common = here.keys() & there.keys()  # an augmentation may leave some samples as they are
    return all(here[row] & there[row] for row in common) if common else None


def _positions(run: RunRecord, steps: int) -> dict[int, set[tuple[int, int]]]:
    """By the hash of a row: the steps, and the positions in them, at which the row is used."""
    positions: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for k in range(steps):
        for index, row in enumerate(run.at(k)[0].row_hashes):
            positions[row].add((k, index))
    return positions


def compare_with_python(
    oracle: RunRecord, plain: RunRecord | None, tolerance: Tolerance
) -> str | None:
    """How one process under instep differs from the script without instep, in one sentence."""
    if plain is None:
        return "the script fails there"
    for k in range(min(oracle.steps, plain.steps)):
        ours, theirs = oracle.at(k)[0], plain.at(k)[0]
        if (
            k == 0
            and fingerprint_distance(ours.parameters, theirs.parameters)[0] > tolerance.gradient
        ):
            return (
                "the parameters start differently (instep.shard takes a seed from torch's "
                "generator, which plain Python does not)"
            )
        if ours.samples != theirs.samples:
            return f"step {k + 1} has {ours.samples} samples instead of {theirs.samples}"
        if ours.row_hashes != theirs.row_hashes:
            same_order = _have_same_order(oracle, plain)
            if same_order is False:
                return (
                    "the samples come in another order, which instep draws from a stream of its "
                    "own, the same on all ranks"
                )
            return (
                f"{'' if same_order else 'the samples have other contents: '}random augmentation "
                "of a sample is drawn from a stream of its own, the same on every rank (with "
                "INSTEP_LOAD=whole: from plain Python's stream)"
            )
        if (
            fingerprint_distance(ours.gradients, theirs.gradients)[0]
            > OF_ITS_NOISE * tolerance.gradient
        ):
            return f"the gradient of step {k + 1} is another one, though the samples are the same"
    return None
