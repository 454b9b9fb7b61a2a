"""The likely cause of a gradient that differs at the same parameters: rules for `causes`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from instep.verify.compare import count_samples, fingerprint_distance
from instep.verify.divergence import Evidence, compare_ranks
from instep.verify.rank_values import find_odd_buffer, find_odd_gradient, is_averaged
from instep.verify.recording.records import Fingerprint, StepRecord

_CLEARLY = 0.05
"""Relative difference from 1 from which a factor counts as one."""
Rule = Callable[[Evidence], str | None]


def _parameters_differ_by_rank(e: Evidence) -> str | None:
    """All ranks were set to the same parameters, and differ at the next step."""
    for k in range(e.pinned.steps):
        apart, tensor = compare_ranks(e.pinned, k)
        if apart > e.between_ranks and k in e.pinned.gradients:
            return (
                f"the ranks hold different parameters: before step {k + 1} something changes "
                f"{tensor} on some ranks only"
            )
    return None


def _random_model(e: Evidence) -> str | None:
    """Each rank draws dropout or noise for its own rows: in every step, or in none."""
    drawn = [d for d in e.diffs if any(one.uses_random for one in e.reference.at(d.step))]
    if not drawn or not all(map(e.is_wrong, drawn)):
        return None
    return (
        f"randomness by rank: the model draws random numbers (dropout, noise) in step "
        f"{drawn[0].step + 1}, and each rank draws its own"
    )


def _local_batch_statistics(e: Evidence) -> str | None:
    """The running statistics are not those of the global batch."""
    for diff in e.wrong_gradients:
        expected = _statistics(e.reference.at(diff.step)[0])
        for rank, step in enumerate(e.pinned.at(diff.step)):
            apart, tensor = fingerprint_distance(expected, _statistics(step))
            if apart > 10 * e.tolerance.gradient:
                return (
                    f"BatchNorm is not synchronised: in step {diff.step + 1} {tensor} on rank "
                    f"{rank} does not hold the statistics of the global batch"
                )
    return None


def _statistics(step: StepRecord) -> dict[str, Fingerprint]:
    ends = ("running_mean", "running_var")
    return {name: value for name, value in step.buffers.items() if name.endswith(ends)}


def _gradients_changed_by_rank(e: Evidence) -> str | None:
    """A gradient that was averaged over the ranks is another one on some of them."""
    found = (find_odd_gradient(e.oracle, e.free, k, e.between_ranks) for k in range(e.free.steps))
    k, odd = next(((k, odd) for k, odd in enumerate(found) if odd is not None), (0, None))
    if odd is None:
        return None
    how = "not" if odd.factor is None else f"{odd.factor:.4g} times"
    return (
        f"gradients are changed by rank: in step {k + 1} that of {odd.tensor} on "
        f"{_format_ranks(list(odd.ranks))} is {how} that on rank {odd.reference}, though it was "
        "averaged over the ranks; something changes, drops or scales it there only"
    )


def _buffers_changed_by_rank(e: Evidence) -> str | None:
    """A buffer is another one on some ranks."""
    for k in range(e.free.steps + 1):
        if (odd := find_odd_buffer(e.oracle, e.free, k, e.between_ranks)) is not None:
            when = f"in step {k + 1}" if k < e.free.steps else "after training"
            return (
                f"buffers differ by rank: {when} {odd.tensor} on {_format_ranks(list(odd.ranks))} "
                f"is not that on rank {odd.reference}; something computes it from a rank's own "
                "rows, or changes it there only"
            )
    return None


def _gradients_not_averaged(e: Evidence) -> str | None:
    """The ranks' gradients differ from each other."""
    for diff in e.wrong_gradients:
        first, *others = e.pinned.at(diff.step)
        for rank, other in enumerate(others, 1):
            apart, tensor = fingerprint_distance(first.gradients, other.gradients)
            if apart > e.tolerance.gradient and not is_averaged(e.pinned, tensor):
                return (
                    f"gradients are not averaged over the ranks: in step {diff.step + 1} that of "
                    f"{tensor} differs between ranks 0 and {rank} (instep.replicate the model)"
                )
    return None


def _scaled_gradient(e: Evidence) -> str | None:
    """The gradient has the right direction and the wrong length."""
    for diff in e.wrong_gradients:
        if abs(diff.scale - 1) < _CLEARLY or diff.rest > _CLEARLY:
            continue
        for factor, name, why in (
            (e.n, f"{e.n} times", "gradients that are means were added up"),
            (1 / e.n, f"1/{e.n} of", "the loss is a sum over samples and was averaged"),
        ):
            if abs(diff.scale / factor - 1) < _CLEARLY:
                return (
                    f"a sum taken for a mean: the gradient of step {diff.step + 1} is {name} one "
                    f"process's; {why}"
                )
        return f"the gradient is scaled: {diff.scale:.4g} times that of one process"
    return None


def _scaled_loss(e: Evidence) -> str | None:
    """The losses of some ranks are scaled by the same factor in all steps, others' are not.

    What a rank's loss would be is not known, but one process's loss is a sum of those: with more
    steps than ranks the factors are the solution of linear equations, if all of these hold.
    """
    if not e.wrong_gradients:
        return None
    both = zip(e.reference.losses, range(e.pinned.steps), strict=False)
    ours = {k: loss for loss, k in both if loss is not None and k in e.pinned.gradients}
    parts = {k: [_part_of_loss(one) for one in e.pinned.at(k)] for k in ours}
    if len(parts) <= e.n or any(part is None for each in parts.values() for part in each):
        return None
    rows = torch.tensor([parts[k] for k in ours], dtype=torch.float64)
    whole = torch.tensor([*ours.values()], dtype=torch.float64)
    solved = torch.linalg.lstsq(rows, whole, driver="gelsd").solution
    inverse = torch.where((solved - 1).abs() < _CLEARLY / 10, 1.0, solved)
    apart = (rows @ inverse - whole).abs()
    scaled = [rank for rank in range(e.n) if inverse[rank] != 1.0]
    holds = bool((apart <= 10 * e.tolerance.gradient * whole.abs()).all())
    if not holds or not 0 < len(scaled) < e.n:
        return None
    factors = [round(float(1 / inverse[rank]), 4) for rank in scaled]
    return (
        f"the loss is scaled by rank: on {_format_ranks(scaled)} it is {format_list(factors)} "
        "times what it is in one process"
    )


def _part_of_loss(step: StepRecord) -> float | None:
    """What a rank contributes to the loss of the global batch; None if that is not known."""
    if any(share is None for _, share in step.losses):
        return None
    return sum(loss * share for loss, share in step.losses if share is not None)


def _mean_of_means(e: Evidence) -> str | None:
    """Gradients differ only for batches that cannot be divided evenly; the losses do not differ."""
    ragged = {diff.step for diff in e.diffs if count_samples(e.reference, diff.step) % e.n}
    wrong_gradients = {diff.step for diff in e.wrong_gradients}
    if not wrong_gradients or not wrong_gradients <= ragged or _first_other_loss(e):
        return None
    k = min(wrong_gradients)
    counts = [one.samples for one in e.pinned.at(k)]
    return (
        f"a mean of means: in step {k + 1} the ranks hold {format_list(counts)} samples, but "
        "their gradients count alike"
    )


def _weighted_loss(e: Evidence) -> str | None:
    """The ranks' losses do not add up to the loss at the same parameters and samples."""
    k = _first_other_loss(e)
    if not e.wrong_gradients or not k:
        return None
    return (
        f"a sum or a weighted mean taken for a mean: in step {k} the ranks' losses, weighted by "
        f"their samples, come to {e.pinned.losses[k - 1]:.6g}, that of one process is "
        f"{e.reference.losses[k - 1]:.6g}"
    )


def _first_other_loss(e: Evidence) -> int | None:
    """The first wrong step, counted from 1, whose loss also differs from the oracle's."""
    for diff in e.wrong_gradients:
        ours, theirs = e.reference.losses[diff.step], e.pinned.losses[diff.step]
        if ours is None or theirs is None:
            continue
        if abs(ours - theirs) > 10 * e.tolerance.gradient * abs(ours):
            return diff.step + 1
    return None


GRADIENT_RULES: tuple[Rule, ...] = (
    _parameters_differ_by_rank,
    _gradients_changed_by_rank,
    _gradients_not_averaged,
    _scaled_loss,
    _scaled_gradient,
    _random_model,
    _local_batch_statistics,
    _buffers_changed_by_rank,
    _mean_of_means,
    _weighted_loss,
)


def format_list(values: list[int] | list[float]) -> str:
    """Format numbers, with commas between them."""
    return ", ".join(f"{value:g}" for value in values)


def _format_ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {format_list(ranks)}"
