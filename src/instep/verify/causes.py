"""The likely cause of a difference: rules, each with its own sign. The first that fits is told.

A rule looks at records only. Rules that explain others come first: who computes other samples has
another gradient too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from instep.verify.compare import prints_apart, ratio, rows_at, samples_at
from instep.verify.divergence import Evidence, between_ranks, other_rows, rates_at
from instep.verify.recording.records import Print, Run, Step

Rule = Callable[[Evidence], str | None]

_CLEARLY = 0.05
"""Relative; factors nearer to 1 are not called factors."""


def likely_cause(e: Evidence) -> str | None:
    """One sentence, or None when no rule fits."""
    return next((cause for rule in RULES if (cause := rule(e)) is not None), None)


# ----------------------------------------------------------------- steps, samples, schedule


def decisions_by_rank(e: Evidence) -> str | None:
    """Ranks make other numbers of steps, or step with other learning rates."""
    counts = [len(rank.steps) for rank in e.free.ranks]
    if len(set(counts)) > 1:
        return f"decisions that differ by rank: the ranks made {_listed(counts)} steps"
    for k in range(e.steps):
        if len(rates_at(e.free, k)) > 1:
            rates = [one.rates[0] for one in e.free.at(k) if one.rates]
            return (
                f"decisions that differ by rank: the learning rate of step {k + 1} is "
                f"{_listed(rates)} on the ranks; a decision was made from one rank's numbers"
            )
    return None


def not_split(e: Evidence) -> str | None:
    """Every rank computes the whole batch."""
    for k in range(e.steps):
        whole = samples_at(e.oracle, k)
        ranks = e.free.at(k)
        if any(one.whole for one in ranks):
            continue
        if e.n > 1 and whole > 1 and all(one.samples == whole for one in ranks):
            return (
                f"a batch that was not split: in step {k + 1} each of {e.n} ranks computed all "
                f"{whole} samples (use instep.shard on the loader or the batch)"
            )
    return None


def other_number_of_steps(e: Evidence) -> str | None:
    """All ranks make more or fewer steps than one process."""
    if e.free.steps == e.oracle.steps:
        return None
    batches = ""
    if (theirs := samples_at(e.free, 0)) != (ours := samples_at(e.oracle, 0)):
        batches = f", with {theirs} samples in the first one instead of {ours}"
    return f"another number of steps: {e.free.steps} instead of {e.oracle.steps}{batches}"


def padded(e: Evidence) -> str | None:
    """Where a batch cannot be divided evenly, a sample counts twice, or one is missing."""
    known = _all_rows(e.oracle)
    for k in range(e.steps):
        ours, theirs = samples_at(e.oracle, k), samples_at(e.free, k)
        if 0 < theirs - ours < e.n and ours % e.n and _all_rows(e.free).keys() <= known.keys():
            return (
                f"a padded tail: the {ours} samples of step {k + 1} cannot be divided evenly by "
                f"{e.n}, and the ranks computed {theirs}: a sample counts twice"
            )
        if theirs < ours:
            return f"samples were dropped: {theirs} of the {ours} in step {k + 1} were computed"
        if theirs > ours:
            return f"samples were added: {theirs} instead of {ours} in step {k + 1}"
    return None


def other_samples(e: Evidence) -> str | None:
    """As many samples, but not the same ones."""
    k = next((k for k in range(e.steps) if other_rows(e, k)), None)
    if k is None:
        return None
    if _asked_for_the_same(e):
        return (
            "randomness by rank: the ranks asked for the same samples as one process, but what "
            f"they got for step {k + 1} was drawn at random (augmentation)"
        )
    expected = rows_at(e.oracle, k)
    theirs = [Counter(one.rows) for one in e.free.at(k)]
    right = [rank for rank, rows in enumerate(theirs) if rows and rows <= expected]
    if right:
        wrong = sorted(set(range(e.n)) - set(right))
        return (
            f"randomness by rank: in step {k + 1} the order of samples is one process's on ranks "
            f"{_listed(right)}, but another on {_listed(wrong)}"
        )
    if _all_rows(e.free) == _all_rows(e.oracle):
        return f"another order: from step {k + 1} on, the same samples come in other batches"
    return f"randomness by rank: the samples of step {k + 1} come from no order of one process"


def _asked_for_the_same(e: Evidence) -> bool:
    ends = [rank.end for rank in (*e.oracle.ranks, *e.free.ranks)]
    asked = [end.indices for end in ends if end is not None and end.indices]
    if len(asked) != len(ends):
        return False
    return all(set().union(*theirs) == set(ours) for ours, *theirs in zip(*asked, strict=False))


def _all_rows(run: Run) -> Counter[int]:
    return Counter(row for rank in run.ranks for step in rank.steps for row in step.rows)


def other_start(e: Evidence) -> str | None:
    """Training does not begin at the same parameters."""
    ours, theirs = e.oracle.at(0)[0], e.free.at(0)
    for rank, one in enumerate(theirs):
        apart, tensor = prints_apart(ours.parameters, one.parameters)
        if apart > e.tolerance.gradient:
            return (
                f"randomness by rank: {tensor} on rank {rank} does not start as it does in one "
                "process (instep.replicate gives all ranks rank 0's parameters)"
            )
    return None


def other_schedule(e: Evidence) -> str | None:
    """The learning rate is scaled, or its schedule is stepped too often."""
    ours, theirs = _rates(e.oracle), _rates(e.free)
    different = [k for k in range(e.steps) if rates_at(e.oracle, k) != rates_at(e.free, k)]
    different = [k for k in different if e.repeats(k, rates_at)]
    if not different:
        return None
    k = different[0]
    factors = [ratio(theirs[j], ours[j]) for j in range(e.steps) if ours[j]]
    if factors and max(factors) - min(factors) < 1e-6 and k == 0:
        return f"the learning rate is scaled: {factors[0]:.6g} times that of one process"
    for times in (2, 3, *({e.n} - {2, 3})):
        if _runs_ahead(ours, theirs, times):
            return (
                f"the schedule is stepped too often: the learning rates of step {k + 1} and on "
                f"are those that one process has {times} times as late"
            )
    return f"another schedule: the learning rate of step {k + 1} is {theirs[k]} not {ours[k]}"


def _runs_ahead(ours: list[float], theirs: list[float], times: int) -> bool:
    """Whether the distinct rates of `theirs` are every `times`-th of `ours`."""
    levels, ahead = _levels(ours), _levels(theirs)
    expected = levels[::times]
    common = min(len(expected), len(ahead))
    return common > 1 and all(
        abs(a - b) <= 1e-6 * abs(a) for a, b in zip(expected[:common], ahead, strict=False)
    )


def _levels(rates: list[float]) -> list[float]:
    return [rate for k, rate in enumerate(rates) if k == 0 or rate != rates[k - 1]]


def _rates(run: Run) -> list[float]:
    return [run.at(k)[0].rates[0] if run.at(k)[0].rates else 0.0 for k in range(run.steps)]


# ------------------------------------------------------- the gradient at the same parameters


def changed_by_rank(e: Evidence) -> str | None:
    """Pinned to the same parameters, the ranks do not hold the same ones at the next step."""
    for k in range(e.pinned.steps):
        apart, tensor = between_ranks(e.pinned, k)
        if apart > e.tolerance.gradient and k in e.pinned.gradients:
            return (
                f"the ranks hold different parameters: before step {k + 1} something changes "
                f"{tensor} on some ranks only"
            )
    return None


def model_randomness(e: Evidence) -> str | None:
    """Dropout and noise: drawn by each rank for its own rows."""
    for gap in e.bad:
        if any(one.drew for one in e.oracle.at(gap.step)):
            return (
                f"randomness by rank: the model draws random numbers (dropout, noise) in step "
                f"{gap.step + 1}, and each rank draws its own"
            )
    return None


def batch_norm(e: Evidence) -> str | None:
    """Running statistics that are not those of the global batch."""
    for gap in e.bad:
        expected = _statistics(e.oracle.at(gap.step)[0])
        for rank, step in enumerate(e.pinned.at(gap.step)):
            apart, tensor = prints_apart(expected, _statistics(step))
            if apart > 10 * e.tolerance.gradient:
                return (
                    f"BatchNorm is not synchronised: in step {gap.step + 1} {tensor} on rank "
                    f"{rank} does not hold the statistics of the global batch"
                )
    return None


def _statistics(step: Step) -> dict[str, Print]:
    ends = ("running_mean", "running_var")
    return {name: value for name, value in step.buffers.items() if name.endswith(ends)}


def not_averaged(e: Evidence) -> str | None:
    """The ranks do not even agree among each other."""
    for gap in e.bad:
        first, *others = e.pinned.at(gap.step)
        for rank, other in enumerate(others, 1):
            apart, tensor = prints_apart(first.gradients, other.gradients)
            if apart > e.tolerance.gradient:
                return (
                    f"gradients are not averaged over the ranks: in step {gap.step + 1} that of "
                    f"{tensor} differs between ranks 0 and {rank} (instep.replicate the model)"
                )
    return None


def scaled(e: Evidence) -> str | None:
    """The right direction, the wrong length."""
    for gap in e.bad:
        if abs(gap.scale - 1) < _CLEARLY or gap.rest > _CLEARLY:
            continue
        for factor, name, why in (
            (e.n, f"{e.n} times", "gradients that are means were added up"),
            (1 / e.n, f"1/{e.n} of", "the loss is a sum over samples and was averaged"),
        ):
            if abs(gap.scale / factor - 1) < _CLEARLY:
                return (
                    f"a sum taken for a mean: the gradient of step {gap.step + 1} is {name} one "
                    f"process's; {why}"
                )
        return f"the gradient is scaled: {gap.scale:.4g} times that of one process"
    return None


def mean_of_means(e: Evidence) -> str | None:
    """Only batches that cannot be divided evenly differ, and their losses do not."""
    ragged = {gap.step for gap in e.gaps if samples_at(e.oracle, gap.step) % e.n}
    bad = {gap.step for gap in e.bad}
    if not bad or not bad <= ragged or _losses_differ(e):
        return None
    k = min(bad)
    counts = [one.samples for one in e.pinned.at(k)]
    return (
        f"a mean of means: in step {k + 1} the ranks hold {_listed(counts)} samples, but their "
        "gradients count alike"
    )


def weighted(e: Evidence) -> str | None:
    """The losses of the ranks do not add up to the loss, at the same parameters and samples."""
    k = _losses_differ(e)
    if not e.bad or not k:
        return None
    return (
        f"a sum or a weighted mean taken for a mean: in step {k} the ranks' losses, weighted by "
        f"their samples, come to {e.pinned.losses[k - 1]:.6g}, that of one process is "
        f"{e.oracle.losses[k - 1]:.6g}"
    )


def _losses_differ(e: Evidence) -> int | None:
    """The first bad step, counted from 1, whose loss is not the oracle's."""
    for gap in e.bad:
        ours, theirs = e.oracle.losses[gap.step], e.pinned.losses[gap.step]
        if ours is None or theirs is None:
            continue
        if abs(ours - theirs) > 10 * e.tolerance.gradient * abs(ours):
            return gap.step + 1
    return None


RULES: tuple[Rule, ...] = (
    decisions_by_rank,
    not_split,
    other_number_of_steps,
    padded,
    other_samples,
    other_start,
    other_schedule,
    changed_by_rank,
    model_randomness,
    batch_norm,
    not_averaged,
    scaled,
    mean_of_means,
    weighted,
)


def _listed(values: list[int] | list[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
