"""Differences between runs. Pure: records in, numbers out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add, or_

import torch
from torch import Tensor

from instep.verify.recording.records import Fingerprints, RunRecord, Tensors

_SMALL_LOSS = 1e-2
"""A loss below this fraction of the largest one is measured against that fraction."""
_OF_ONE_TENSOR = 1e-3
_OF_ITS_NOISE = 100.0


@dataclass(frozen=True)
class GradientDifference:
    """The difference of one step's gradient from the oracle's at the same parameters."""

    step: int
    difference: float
    """Norm of the difference over the norm of the oracle's gradient, all tensors together."""
    tensor: str
    """The tensor that contributes most."""
    scale: float = 1.0
    """The factor c for which c times the oracle's gradient comes closest."""
    rest: float = 0.0
    """The distance that is left after scaling, over the norm of the run's gradient."""
    hidden: str | None = None
    """A tensor that is wrong by its own norm and noise, although it is small beside the others."""


@dataclass(frozen=True)
class RunDifference:
    """The relative differences of a run from the oracle; 0 is equal."""

    gradient: float
    """The largest of the compared steps, relative to the gradient's norm."""
    loss: float
    """The largest along the curve, relative to the oracle's loss."""
    parameters: float
    """At the end: norm of the difference over the norm of all parameters."""
    moved: float
    """At the end: norm of the difference over the distance that training moved them."""
    buffers: float
    """At the end: norm of the difference over the norm of all floating-point buffers."""


def compare_runs(
    oracle: RunRecord, run: RunRecord, diffs: Iterable[GradientDifference]
) -> RunDifference:
    """Compare a whole run with the oracle."""
    apart = distance(oracle.parameters, run.parameters)
    return RunDifference(
        gradient=max((diff.difference for diff in diffs), default=0.0),
        loss=max(compare_losses(oracle, run), default=0.0),
        parameters=ratio(apart, norm(oracle.parameters)),
        moved=ratio(apart, movement(oracle)),
        buffers=ratio(distance(oracle.buffers, run.buffers), norm(oracle.buffers)),
    )


# ----------------------------------------------------------------------------- gradients


def compare_gradients(
    reference: RunRecord, run: RunRecord, rounded: Sequence[RunRecord] = ()
) -> list[GradientDifference]:
    """Compare every step for which both runs have whole gradients.

    Args:
        rounded: the reference with other rounding; it shows the rounding of each small tensor.
    """
    rounding: dict[str, float] = {}
    for other in rounded:
        for k in _common_steps(reference, other):
            apart = _distances(reference.gradients[k], other.gradients[k])
            for name in other.gradients[k]:
                rounding[name] = max(apart[name], rounding.get(name, 0.0))
    return [
        _compare_step(k, reference.gradients[k], run.gradients[k], rounding)
        for k in _common_steps(reference, run)
    ]


def _common_steps(a: RunRecord, b: RunRecord) -> list[int]:
    return sorted(a.gradients.keys() & b.gradients.keys())


def _compare_step(
    step: int, ours: Tensors, theirs: Tensors, rounding: dict[str, float]
) -> GradientDifference:
    apart = _distances(ours, theirs)
    own = {name: norm({name: tensor}) for name, tensor in ours.items()}
    total, whole = norm(ours), math.hypot(*apart.values())
    product = sum(
        float((ours[name].double() * theirs[name].double()).sum())
        for name in ours.keys() & theirs.keys()
    )
    scale = ratio(product, total**2)
    scaled = {name: tensor.double() * scale for name, tensor in ours.items()}
    return GradientDifference(
        step,
        ratio(whole, total),
        max(apart, key=lambda name: apart[name], default=""),
        scale,
        ratio(distance(scaled, theirs), norm(theirs)),
        next((name for name in apart if _is_far_off(name, apart, own, rounding)), None),
    )


def _is_far_off(
    name: str, apart: dict[str, float], own: dict[str, float], rounding: dict[str, float]
) -> bool:
    """Whether one tensor is wrong beside its own norm and its own rounding."""
    if not rounding.get(name):
        return False
    return apart[name] > max(_OF_ONE_TENSOR * own.get(name, 0.0), _OF_ITS_NOISE * rounding[name])


# --------------------------------------------------------------------------------- curves


def compare_losses(oracle: RunRecord, run: RunRecord) -> list[float]:
    """Relative differences of the losses, step by step; steps without a loss count as equal."""
    known = [abs(loss) for loss in oracle.losses if loss is not None and math.isfinite(loss)]
    floor = _SMALL_LOSS * max(known, default=0.0)
    return [
        0.0 if a is None or b is None else ratio(absolute_difference(a, b), max(abs(a), floor))
        for a, b in zip(oracle.losses, run.losses, strict=False)
    ]


def absolute_difference(a: float, b: float) -> float:
    """|a - b|, with 0 for two equal infinities or two NaNs, and infinity for one NaN."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    apart = abs(a - b)
    return math.inf if math.isnan(apart) else apart


def compare_parameters(oracle: RunRecord, run: RunRecord) -> list[tuple[float, str]]:
    """Before each step: the distance by fingerprints, and the tensor that differs most."""
    pairs = zip(oracle.ranks[0].steps, run.ranks[0].steps, strict=False)
    return [_total_distance(a.parameters, b.parameters) for a, b in pairs]


def fingerprint_distance(ours: Fingerprints, theirs: Fingerprints) -> tuple[float, str]:
    """The relative distance by fingerprints, and the tensor that differs most."""
    apart, worst = _total_distance(ours, theirs)
    norms = (one.norm for one in ours.values())
    return ratio(apart, math.hypot(*filter(math.isfinite, norms))), worst


def _total_distance(ours: Fingerprints, theirs: Fingerprints) -> tuple[float, str]:
    apart = {
        name: max(absolute_difference(a, b) for a, b in zip(ours[name], theirs[name], strict=True))
        for name in ours.keys() & theirs.keys()
    }
    return math.hypot(*apart.values()), max(apart, key=lambda name: apart[name], default="")


# -------------------------------------------------------------------------------- tensors


def norm(tensors: Tensors) -> float:
    """The norm of all floating-point tensors together, in float64. What is not finite, such as a
    mask, counts as zero: beside it no difference of the others would be seen."""
    floats = (t for t in tensors.values() if t.is_floating_point())
    return math.hypot(*(float(_finite(t).norm()) for t in floats))


def movement(run: RunRecord) -> float:
    """How far a run has moved its parameters, of those that are finite."""
    ends = run.initial, run.parameters
    by_name = (
        [{name: _finite(tensors[name])} if name in tensors else {} for tensors in ends]
        for name in {**run.initial, **run.parameters}
    )
    return math.hypot(*(distance(*each) for each in by_name))


def _finite(tensor: Tensor) -> Tensor:
    """A floating-point tensor in float64, with zeros for what is not finite; else the tensor."""
    return tensor.double().nan_to_num(0.0, 0.0, 0.0) if tensor.is_floating_point() else tensor


def distance(ours: Tensors, theirs: Tensors) -> float:
    """The norm of the difference; infinite if integers, shapes or NaNs differ."""
    return math.hypot(*_distances(ours, theirs).values())


def _distances(ours: Tensors, theirs: Tensors) -> dict[str, float]:
    """The distance of each tensor; a missing one counts as zeros."""
    found = {}
    for name, one in {**ours, **theirs}.items():
        if name in ours and name in theirs:
            apart = _distance_between(ours[name], theirs[name])
        else:
            apart = float(one.double().norm()) if one.is_floating_point() else 0.0
        found[name] = math.inf if math.isnan(apart) else apart
    return found


def find_max_difference(ours: Tensors, theirs: Tensors) -> tuple[str, float]:
    """The tensor that differs most, and its relative difference."""
    apart = _distances(ours, theirs)
    name = max(apart, key=lambda name: apart[name], default="")
    return name, ratio(apart.get(name, 0.0), norm({name: ours[name]} if name in ours else {}))


def _distance_between(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else math.inf
    same = (a == b) | (a.isnan() & b.isnan())  # infinities of the same sign too
    return float(torch.where(same, 0.0, a.double() - b.double()).norm())


def ratio(part: float, whole: float) -> float:
    """part / whole, with 0 / 0 = 0 and x / 0 infinite."""
    if part == 0.0 or math.isinf(part):
        return part
    return part / whole if whole else math.inf


# -------------------------------------------------------------------------------- samples


def collect_rows(run: RunRecord, step: int) -> Counter[int]:
    """The row hashes of a step's samples on all ranks, with their counts."""
    ranks = [Counter(one.row_hashes) for one in run.at(step)]
    return reduce(or_ if _all_whole(run, step) else add, ranks)


def count_samples(run: RunRecord, step: int) -> int:
    """The number of samples of a step on all ranks.

    If ranks recorded whole batches of different sizes, it is the sum of the sizes.
    """
    counts = [one.samples for one in run.at(step)]
    return sum(set(counts) if _all_whole(run, step) else counts)


def _all_whole(run: RunRecord, step: int) -> bool:
    return all(one.whole for one in run.at(step))
