"""The likely cause of a divergence: the first rule that fits gives it.

Rules look at records only. A rule whose cause also produces the signs of other rules comes before
them: ranks that compute other samples have another gradient too.
"""

from __future__ import annotations

from collections import Counter

from instep.verify.compare import collect_rows, count_samples, fingerprint_distance, ratio
from instep.verify.divergence import Evidence, has_other_samples, learning_rates_at
from instep.verify.gradient_causes import GRADIENT_RULES, Rule, format_list
from instep.verify.recording.records import RunRecord


def find_cause(e: Evidence) -> str | None:
    """The likely cause in one sentence; None if no rule fits."""
    return next((cause for rule in RULES if (cause := rule(e)) is not None), None)


# ----------------------------------------------------------------- steps, samples, schedule


def _rank_dependent_decisions(e: Evidence) -> str | None:
    """Ranks make different numbers of steps, or use different learning rates."""
    counts = [len(rank.steps) for rank in e.free.ranks]
    if len(set(counts)) > 1:
        return f"decisions that differ by rank: the ranks made {format_list(counts)} steps"
    for k in range(e.steps):
        if len(learning_rates_at(e.free, k)) > 1:
            lrs = [one.lrs[0] for one in e.free.at(k) if one.lrs]
            return (
                f"decisions that differ by rank: the learning rate of step {k + 1} is "
                f"{format_list(lrs)} on the ranks; a decision was made from one rank's numbers"
            )
    return None


def _batch_not_split(e: Evidence) -> str | None:
    """Every rank computes the whole batch."""
    for k in range(e.steps):
        whole = count_samples(e.oracle, k)
        ranks = e.free.at(k)
        if any(one.whole for one in ranks):
            continue
        if e.n > 1 and whole > 1 and all(one.samples == whole for one in ranks):
            if _has_own_batches(e, k):
                continue
            if (reason := _opt_out(e)) is not None:
                return (
                    f"{e.n} identical runs: every rank runs the script as it is, since {reason}, "
                    f"and computed all {whole} samples of step {k + 1}"
                )
            return (
                f"a batch that was not split: in step {k + 1} each of {e.n} ranks computed all "
                f"{whole} samples (use instep.shard on the loader or the batch)"
            )
    return None


def _has_own_batches(e: Evidence, k: int) -> bool:
    """Whether each rank is known to have a batch of its own in this step."""
    ranks = e.free.at(k)
    rows = [sorted(one.row_hashes) for one in ranks]
    are_known = all(len(one.row_hashes) == one.samples for one in ranks)
    if not are_known or any(each == rows[0] for each in rows[1:]):
        return False
    ends = [rank.end for rank in e.free.ranks]
    asked = {end.indices for end in ends if end is not None}
    return len(asked) != 1 or asked == {()}  # else the ranks draw other rows for the same samples


def _larger_batch(e: Evidence) -> str | None:
    """The batch grows with the number of ranks."""
    theirs, ours = count_samples(e.free, 0), count_samples(e.oracle, 0)
    if e.n == 1 or ours == 0 or theirs != e.n * ours or _opt_out(e) is not None:
        return None
    steps = ""
    if e.free.steps != e.oracle.steps:
        steps = f", and made {e.free.steps} steps instead of {e.oracle.steps}"
    return (
        f"a batch that is {e.n} times larger: in step 1 the ranks computed {theirs} samples, one "
        f"process {ours}{steps} (instep.shard divides the batch size that the script gives)"
    )


def _batch_of_each_rank(e: Evidence) -> str | None:
    """Every rank of an unedited script runs it as it is, with batches of its own."""
    theirs, ours = count_samples(e.free, 0), count_samples(e.oracle, 0)
    if (reason := _opt_out(e)) is None or (theirs == ours and e.free.steps == e.oracle.steps):
        return None
    effect = ""  # samples are unknown in a model that DistributedDataParallel wraps
    if e.free.steps != e.oracle.steps:
        effect = f": {e.free.steps} steps instead of {e.oracle.steps}"
    elif theirs:
        effect = f": {theirs} samples in step 1 instead of {ours}"
    return (
        f"a batch for each rank: every rank runs the script as it is, since {reason}; its batch is "
        f"then up to {e.n} times larger{effect}"
    )


def _other_step_count(e: Evidence) -> str | None:
    """All ranks make more or fewer steps than one process."""
    if e.free.steps == e.oracle.steps:
        return None
    batches = ""
    if (theirs := count_samples(e.free, 0)) != (ours := count_samples(e.oracle, 0)):
        batches = f", with {theirs} samples in the first one instead of {ours}"
    return f"another number of steps: {e.free.steps} instead of {e.oracle.steps}{batches}"


def _opt_out(e: Evidence) -> str | None:
    """Why every rank of an unedited script ran it as it is, if it did."""
    ends = [rank.end for rank in e.free.ranks]
    return next((end.opt_out for end in ends if end is not None and end.opt_out), None)


def _padded_batch(e: Evidence) -> str | None:
    """In a batch that cannot be divided evenly a sample counts twice, or one is missing."""
    known = _count_all_rows(e.oracle)
    for k in range(e.steps):
        ours, theirs = count_samples(e.oracle, k), count_samples(e.free, k)
        if (
            0 < theirs - ours < e.n
            and ours % e.n
            and _count_all_rows(e.free).keys() <= known.keys()
        ):
            return (
                f"a padded tail: the {ours} samples of step {k + 1} cannot be divided evenly by "
                f"{e.n}, and the ranks computed {theirs}: a sample counts twice"
            )
        if theirs < ours:
            return f"samples were dropped: {theirs} of the {ours} in step {k + 1} were computed"
        if theirs > ours:
            return f"samples were added: {theirs} instead of {ours} in step {k + 1}"
    return None


def _other_samples(e: Evidence) -> str | None:
    """The number of samples is right, but they are other samples."""
    k = next((k for k in range(e.steps) if has_other_samples(e, k)), None)
    if k is None:
        return None
    if _requested_same_samples(e):
        return (
            "randomness by rank: the ranks asked for the same samples as one process, but what "
            f"they got for step {k + 1} was drawn at random (augmentation)"
        )
    expected = collect_rows(e.oracle, k)
    theirs = [Counter(one.row_hashes) for one in e.free.at(k)]
    right = [rank for rank, rows in enumerate(theirs) if rows and rows <= expected]
    if right:
        wrong = sorted(set(range(e.n)) - set(right))
        return (
            f"randomness by rank: in step {k + 1} the order of samples is one process's on ranks "
            f"{format_list(right)}, but another on {format_list(wrong)}"
        )
    if _count_all_rows(e.free) == _count_all_rows(e.oracle):
        return f"another order: from step {k + 1} on, the same samples come in other batches"
    return f"randomness by rank: the samples of step {k + 1} come from no order of one process"


def _requested_same_samples(e: Evidence) -> bool:
    ends = [rank.end for rank in (*e.oracle.ranks, *e.free.ranks)]
    asked = [end.indices for end in ends if end is not None and end.indices]
    if len(asked) != len(ends):
        return False
    return all(set().union(*theirs) == set(ours) for ours, *theirs in zip(*asked, strict=False))


def _count_all_rows(run: RunRecord) -> Counter[int]:
    return Counter(row for rank in run.ranks for step in rank.steps for row in step.row_hashes)


def _other_initial_parameters(e: Evidence) -> str | None:
    """The initial parameters differ."""
    ours, theirs = e.oracle.at(0)[0], e.free.at(0)
    for rank, one in enumerate(theirs):
        apart, tensor = fingerprint_distance(ours.parameters, one.parameters)
        if apart > e.tolerance.gradient:
            return (
                f"randomness by rank: {tensor} on rank {rank} does not start as it does in one "
                "process (instep.replicate gives all ranks rank 0's parameters)"
            )
    return None


def _other_learning_rates(e: Evidence) -> str | None:
    """The learning rate is scaled, or its schedule is stepped too often."""
    ours, theirs = _first_lrs(e.oracle), _first_lrs(e.free)
    different = [
        k for k in range(e.steps) if learning_rates_at(e.oracle, k) != learning_rates_at(e.free, k)
    ]
    different = [k for k in different if e.is_deterministic_run(k, learning_rates_at)]
    if not different:
        return None
    k = different[0]
    factors = [ratio(theirs[j], ours[j]) for j in range(e.steps) if ours[j]]
    if factors and max(factors) - min(factors) < 1e-6 and k == 0:
        return f"the learning rate is scaled: {factors[0]:.6g} times that of one process"
    for times in (2, 3, *({e.n} - {2, 3})):
        if _is_sped_up(ours, theirs, times):
            return (
                f"the schedule is stepped too often: the learning rates of step {k + 1} and on "
                f"are those that one process has {times} times as late"
            )
    return f"another schedule: the learning rate of step {k + 1} is {theirs[k]} not {ours[k]}"


def _is_sped_up(ours: list[float], theirs: list[float], times: int) -> bool:
    """Whether the distinct rates of `theirs` are every `times`-th of `ours`."""
    levels, ahead = _levels(ours), _levels(theirs)
    expected = levels[::times]
    common = min(len(expected), len(ahead))
    return common > 1 and all(
        abs(a - b) <= 1e-6 * abs(a) for a, b in zip(expected[:common], ahead, strict=False)
    )


def _levels(lrs: list[float]) -> list[float]:
    return [rate for k, rate in enumerate(lrs) if k == 0 or rate != lrs[k - 1]]


def _first_lrs(run: RunRecord) -> list[float]:
    return [run.at(k)[0].lrs[0] if run.at(k)[0].lrs else 0.0 for k in range(run.steps)]


RULES: tuple[Rule, ...] = (
    _rank_dependent_decisions,
    _batch_not_split,
    _larger_batch,
    _batch_of_each_rank,
    _other_step_count,
    _padded_batch,
    _other_samples,
    _other_initial_parameters,
    _other_learning_rates,
    *GRADIENT_RULES,
)
