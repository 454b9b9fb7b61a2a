"""Averaged gradients, and buffers, that are not the same on all ranks, though one sum made them so.

Ranks compute with the same sum, in the same bits: whatever differs was changed afterwards, on some
ranks only. An optimizer that divides by the size of a gradient (Adam) hides it in the parameters,
and running statistics show in evaluation alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from instep.verify.compare import absolute_difference, ratio
from instep.verify.recording.records import Fingerprint, Fingerprints, RunRecord

_NOTHING = Fingerprint(0.0, 0.0)
"""The fingerprint of a gradient of zeros, and of none."""


@dataclass(frozen=True)
class OddTensor:
    """A tensor of one step that is another one on some ranks."""

    tensor: str
    ranks: tuple[int, ...]
    reference: int
    """A rank whose tensor is the right one."""
    difference: float
    """Relative to the right one."""
    factor: float | None
    """How many times as large it is on `ranks`; None if it is another one in another way."""


def is_averaged(run: RunRecord, name: str) -> bool:
    """Whether instep averages the gradient of this parameter over the ranks."""
    ends = [rank.end for rank in run.ranks if rank.end is not None]
    return any(name in end.replicated or bool(end.divided) for end in ends)


def find_odd_gradient(
    oracle: RunRecord, run: RunRecord, step: int, limit: float
) -> OddTensor | None:
    """The first averaged gradient of `step` that differs between ranks by more than `limit`.

    The right ones are those of most ranks; of two ranks, the one that is nearer to the oracle's.
    """
    ranks = [one.gradients for one in run.at(step)]
    for name in dict.fromkeys(name for one in ranks for name in one):
        values = [one.get(name, _NOTHING) for one in ranks]
        first = values[0]
        if all(_relative(first, value) <= limit for value in values):
            continue
        if not is_averaged(run, name):
            continue
        steps = oracle.ranks[0].steps
        expected = steps[step].gradients.get(name) if step < len(steps) else None
        return _describe(name, values, expected, limit)
    return None


def find_odd_buffer(oracle: RunRecord, run: RunRecord, step: int, limit: float) -> OddTensor | None:
    """The first buffer that differs between ranks by more than `limit` before `step`; the buffers
    after training follow the last step. A module that only some ranks call is not compared."""
    ranks = buffers_at(run, step)
    expected = buffers_at(oracle, step)
    for name in ranks[0] if ranks else ():
        if not all(name in one for one in ranks):
            continue
        values = [one[name] for one in ranks]
        if any(_relative(values[0], value) > limit for value in values):
            return _describe(name, values, expected[0].get(name) if expected else None, limit)
    return None


def buffers_at(run: RunRecord, step: int) -> Sequence[Fingerprints]:
    """The buffers of each rank before `step`, or after training; empty if they are not known."""
    if step < run.steps:
        return [one.buffers for one in run.at(step)]
    ends = [rank.end for rank in run.ranks if rank.end is not None and len(rank.steps) == step]
    return [end.buffers for end in ends] if len(ends) == run.n else []


def _describe(
    name: str, values: Sequence[Fingerprint], expected: Fingerprint | None, limit: float
) -> OddTensor:
    groups: list[list[int]] = []
    for rank, value in enumerate(values):
        same = (group for group in groups if _relative(values[group[0]], value) <= limit)
        group = next(same, None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)

    def trust(group: list[int]) -> tuple[int, float]:
        return len(group), -_relative(expected or values[0], values[group[0]])

    right = max(groups, key=trust)
    odd = [rank for rank in range(len(values)) if rank not in right]
    ours, theirs = values[right[0]], values[odd[0]]
    factor = ratio(theirs.norm, ours.norm)
    is_scaled = _relative(Fingerprint(*(factor * each for each in ours)), theirs) <= limit
    alike = all(_relative(values[rank], theirs) <= limit for rank in odd)
    return OddTensor(
        name,
        tuple(odd),
        right[0],
        _relative(ours, theirs),
        factor if is_scaled and alike and math.isfinite(factor) else None,
    )


def _relative(ours: Fingerprint, theirs: Fingerprint) -> float:
    apart = max(absolute_difference(a, b) for a, b in zip(ours, theirs, strict=True))
    return ratio(apart, ours.norm if ours.norm else theirs.norm)
