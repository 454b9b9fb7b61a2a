"""`instep verify`: what it tells of honest, chaotic and sabotaged trainings."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import verify_records as made
from forked import Forked
from instep import cli
from instep.errors import (
    CommandLineError,
    ScriptFailedError,
    ScriptLateError,
    StepsError,
    VerificationError,
)
from instep.verify import verdict as verdict_module
from instep.verify import verification
from instep.verify.causes import find_cause
from instep.verify.compare import (
    compare_gradients,
    compare_losses,
    compare_runs,
    distance,
    fingerprint_distance,
)
from instep.verify.divergence import FLOAT32, FLOAT64, HALF, Divergence, find_divergence
from instep.verify.files import file_copies
from instep.verify.files.restored import put_back
from instep.verify.recording import changes
from instep.verify.recording.fingerprints import fingerprint, hash_rows
from instep.verify.recording.module_calls import ModuleCallRecorder, find_module_calls
from instep.verify.recording.recorder import Recorder
from instep.verify.recording.records import (
    Fingerprint,
    RankSummary,
    RunPlan,
    StepRecord,
    global_loss,
    read_run,
)
from instep.verify.recording.tensor_names import TensorNames
from instep.verify.report import format_json, format_table
from instep.verify.runs import (
    PERTURBED,
    REVERSED,
    InstepRunStarter,
    MultiRankRuns,
    ScriptRunner,
    SingleRankRuns,
    choose_pinned_steps,
    run_multi_rank,
    run_single_rank,
    run_with_rounding,
)
from instep.verify.verdict import (
    Verdict,
    choose_tolerance,
    compare_with_python,
    find_nondeterministic,
    is_usable_noise,
    make_report,
)
from instep.verify.verification import compare_with_rounding, run_and_report, verify_script

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "verify_scripts"
TRAIN = str(SCRIPTS / "train.py")
DIGITS = str(Path(__file__).parents[1] / "examples" / "digits.py")
launch = pytest.mark.launch
nightly = pytest.mark.nightly


# -------------------------------------------------------------------------- causes, by rule


def cause(n, change=made.nothing, spoil=None, **runs):
    """The cause that is told; a case without a parting would be no case."""
    e = made.evidence(n, change, spoil, **runs)
    assert find_divergence(e) is not None
    return find_cause(e)


def test_an_honest_run_has_no_parting_and_no_cause():
    for n in (1, 2, 3, 5):
        e = made.evidence(n)
        assert find_divergence(e) is None
        assert find_cause(e) is None


def test_unsplit_batches_are_told_though_gradients_agree():
    told = cause(2, lambda r, k, s: {"samples": made.BATCHES[k]})
    assert told.startswith("a batch that was not split: in step 1 each of 2 ranks computed all 8")


def of_own_batches(rank, k, step):
    size = made.BATCHES[k]
    return {"samples": size, "row_hashes": tuple(range(1000 * rank, 1000 * rank + size))}


def test_batches_of_each_rank_are_not_called_unsplit():
    assert cause(2, free=made.run(2, of_own_batches, steps=2)) == (
        "a batch that is 2 times larger: in step 1 the ranks computed 16 samples, one process 8, "
        "and made 2 steps instead of 3 (instep.shard divides the batch size that the script gives)"
    )
    rows = made.honest(0, 1, 0).row_hashes
    told = cause(2, lambda r, k, s: {"samples": 8, "row_hashes": rows} if k == 0 else {})
    assert told.startswith("a batch that was not split: in step 1")


def test_augmented_batches_of_the_same_samples_are_unsplit():
    free = made.run(2, of_own_batches)
    ends = [replace(rank, end=replace(rank.end, indices=((0, 1),))) for rank in free.ranks]
    told = cause(2, free=replace(free, ranks=tuple(ends)))
    assert told.startswith("a batch that was not split: in step 1")


def of_whole_batches(rank, k, step):
    """What a rank of an unedited script records."""
    oracle = made.honest(0, 1, k)
    return {
        "whole": True,
        "samples": oracle.samples,
        "row_hashes": oracle.row_hashes,
        "losses": oracle.losses,
        "computed": step.samples,
    }


def test_whole_batches_on_every_rank_of_an_unedited_script_are_no_parting():
    e = made.evidence(3, of_whole_batches)
    assert find_divergence(e) is None
    assert e.free.samples_per_rank == made.run(3).samples_per_rank


def test_a_rank_of_an_unedited_script_with_another_batch_is_a_parting():
    def other_on_one(rank, k, step):
        changed = {"samples": 5, "row_hashes": step.row_hashes} if (rank, k) == (1, 1) else {}
        return of_whole_batches(rank, k, step) | changed

    divergence = find_divergence(made.evidence(2, other_on_one))
    assert (divergence.step, divergence.what) == (2, "samples")


def test_one_unsplit_batch_is_enough():
    told = cause(2, lambda r, k, s: {"samples": 7} if k == 2 else {})
    assert told.startswith("a batch that was not split: in step 3")


def test_a_padded_tail_is_told():
    def pad(rank, k, step):
        return {"samples": 4, "row_hashes": (*step.row_hashes, 200)[:4]} if k == 2 else {}

    told = cause(2, pad)
    assert told.startswith("a padded tail: the 7 samples of step 3 cannot be divided evenly by 2")


def test_a_tail_padded_with_samples_of_another_batch_is_told():
    def pad(rank, k, step):
        return {"samples": 4, "row_hashes": (*step.row_hashes, 0)[:4]} if k == 2 else {}

    assert cause(2, pad).startswith("a padded tail: the 7 samples of step 3")


def test_samples_from_nowhere_are_told():
    def add(rank, k, step):
        return {"samples": 4, "row_hashes": (*step.row_hashes, -1)[:4]} if k == 2 else {}

    assert cause(2, add) == "samples were added: 8 instead of 7 in step 3"


def test_dropped_samples_are_told():
    told = cause(
        2, lambda r, k, s: {"samples": 3, "row_hashes": s.row_hashes[:3]} if k == 2 else {}
    )
    assert told == "samples were dropped: 6 of the 7 in step 3 were computed"


def other(step, rows):
    """A step with other samples has another loss."""
    return {"row_hashes": tuple(rows), "losses": ((step.losses[0][0] + 0.3, step.losses[0][1]),)}


def test_another_order_is_told():
    def swapped(rank, k, step):
        return other(step, made.honest(rank, 2, 1 - k).row_hashes) if k < 2 else {}

    assert cause(2, swapped).startswith("another order: from step 1 on")


def test_an_order_of_one_rank_is_told_as_randomness_by_rank():
    told = cause(2, lambda r, k, s: other(s, (row + 1000 * r for row in s.row_hashes)))
    assert told.startswith("randomness by rank: in step 1 the order of samples is one process's on")
    assert told.endswith("ranks 0, but another on 1")


def test_samples_of_no_order_are_told_as_randomness_by_rank():
    told = cause(2, lambda r, k, s: other(s, (row + 1000 * (r + 1) for row in s.row_hashes)))
    assert told.startswith("randomness by rank: the samples of step 1 come from no order")


def test_samples_that_one_process_does_not_repeat_are_not_held_against_ranks():
    noise = made.run(1, lambda r, k, s: other(s, (row + 7 for row in s.row_hashes)))
    e = made.evidence(2, lambda r, k, s: other(s, (row + 9 for row in s.row_hashes)), noise=noise)
    assert find_divergence(e) is None


def test_inputs_that_differ_by_rounding_are_no_other_samples():
    """One model's output is another one's input."""
    e = made.evidence(2, lambda r, k, s: {"row_hashes": tuple(row + 9 for row in s.row_hashes)})
    assert find_divergence(e) is None


def test_other_initial_parameters_are_told_by_name():
    def start(rank, k, step):
        other = {**step.parameters, "bias": Fingerprint(3.0, 2.5)}
        return {"parameters": other} if rank == 1 and k == 0 else {}

    assert cause(2, start).startswith("randomness by rank: bias on rank 1 does not start as")


def test_ranks_that_agree_but_start_elsewhere_are_told():
    def start(rank, k, step):
        return {"parameters": {**step.parameters, "bias": Fingerprint(3.0, 2.5)}} if k == 0 else {}

    assert cause(2, start).startswith("randomness by rank: bias on rank 0 does not start as")


def test_a_scaled_learning_rate_is_told():
    told = cause(2, lambda r, k, s: {"lrs": (2 * s.lrs[0],)})
    assert told == "the learning rate is scaled: 2 times that of one process"


def test_a_schedule_that_is_stepped_too_often_is_told():
    told = cause(3, lambda r, k, s: {"lrs": (0.1 * 0.9 ** (2 * k),)})
    assert told.startswith("the schedule is stepped too often: the learning rates of step 2")
    assert "2 times as late" in told


def test_an_adaptive_schedule_that_one_process_does_not_repeat_is_no_parting():
    noise = made.run(1, lambda r, k, s: {"lrs": (0.01,)})
    assert find_divergence(made.evidence(2, lambda r, k, s: {"lrs": (0.02,)}, noise=noise)) is None


def test_decisions_that_differ_by_rank_are_told():
    told = cause(2, lambda r, k, s: {"lrs": (0.1 * 0.5**r,)} if k else {})
    assert told.startswith(
        "decisions that differ by rank: the learning rate of step 2 is 0.1, 0.05"
    )
    free = made.run(2)
    free = replace(
        free, ranks=(free.ranks[0], replace(free.ranks[1], steps=free.ranks[1].steps[:2]))
    )
    assert cause(2, free=free) == "decisions that differ by rank: the ranks made 3, 2 steps"


def test_another_number_of_steps_is_told():
    assert cause(2, free=made.run(2, steps=2)) == "another number of steps: 2 instead of 3"


def test_a_script_that_every_rank_runs_as_it_is_is_told_with_its_reason():
    reason = "it asks Lightning for devices=2"

    def left_alone(record):
        ends = [replace(rank, end=replace(rank.end, opt_out=reason)) for rank in record.ranks]
        return replace(record, ranks=tuple(ends))

    assert cause(2, free=left_alone(made.run(2, steps=2))) == (
        f"a batch for each rank: every rank runs the script as it is, since {reason}; its batch is "
        "then up to 2 times larger: 2 steps instead of 3"
    )
    larger = made.run(2, lambda r, k, s: {"samples": 6})
    assert cause(2, free=left_alone(larger)).endswith("larger: 12 samples in step 1 instead of 8")
    own = left_alone(made.run(2, of_own_batches))
    assert cause(2, free=own).endswith("larger: 16 samples in step 1 instead of 8")
    unknown = made.run(2, lambda r, k, s: {"samples": 0})
    assert cause(2, free=left_alone(unknown)).endswith(
        f"since {reason}; its batch is then up to 2 times larger"
    )
    whole = made.run(2, lambda r, k, s: {"samples": made.BATCHES[k]})
    assert cause(2, free=left_alone(whole)) == (
        f"2 identical runs: every rank runs the script as it is, since {reason}, and computed all "
        "8 samples of step 1"
    )


def test_randomness_of_the_model_is_told():
    oracle = made.run(1, lambda r, k, s: {"uses_random": True})
    told = cause(2, spoil=lambda k, g: g + 0.3, oracle=oracle)
    assert told.startswith("randomness by rank: the model draws random numbers (dropout, noise)")


@pytest.mark.parametrize(
    ("change", "spoil", "told"),
    [
        (
            made.nothing,
            lambda k, g: g * 2,
            "a sum taken for a mean: the gradient of step 1 is 2 times",
        ),
        (
            lambda rank, k, step: {"gradients": {"weight": Fingerprint(4.0 + rank, 1.0)}},
            lambda k, g: g + 0.3,
            "gradients are not averaged over the ranks",
        ),
        (
            made.nothing,
            lambda k, g: g + 0.3 * (k == 2),
            "a mean of means: in step 3 the ranks hold 3, 4 samples",
        ),
    ],
)
def test_what_no_random_number_does_is_told_of_models_that_draw_some(change, spoil, told):
    oracle = made.run(1, lambda r, k, s: {"uses_random": True})
    assert cause(2, change, spoil, oracle=oracle).startswith(told)


def test_unsynchronised_batch_norm_is_told():
    def local(rank, k, step):
        return {
            "buffers": {**step.buffers, "1.running_mean": Fingerprint(1.0, 0.1 * k + 0.2 * rank)}
        }

    told = cause(2, local, lambda k, g: g + 0.3)
    assert told.startswith("BatchNorm is not synchronised: in step 1 1.running_mean on rank 1")


def test_gradients_that_are_not_averaged_are_told():
    def own(rank, k, step):
        return {"gradients": {**step.gradients, "weight": Fingerprint(4.0 + rank, 1.0)}}

    told = cause(2, own, lambda k, g: g + 0.3)
    assert told.startswith("gradients are not averaged over the ranks: in step 1 that of weight")


def times(factor, ranks=(1,)):
    """The gradient of the weight is so many times what it is elsewhere, on these ranks."""

    def change(rank, k, step):
        value = Fingerprint(*(factor * each for each in step.gradients["weight"]))
        return {"gradients": {**step.gradients, "weight": value}} if rank in ranks else {}

    return change


def tilted(rank, k, step):
    size, projection = step.gradients["weight"]
    value = {"weight": Fingerprint(size, projection + 0.01)}
    return {"gradients": {**step.gradients, **value}} if rank == 1 and k == 1 else {}


def dropped(rank, k, step):
    return {"gradients": {"bias": step.gradients["bias"]}} if rank == 1 else {}


@pytest.mark.parametrize(
    ("n", "change", "place"),
    [
        (2, times(1.5), "step 1 that of weight on rank 1 is 1.5 times that on rank 0"),
        (2, times(1.5, [0]), "step 1 that of weight on rank 0 is 1.5 times that on rank 1"),
        (5, times(2.0, [0, 3]), "step 1 that of weight on ranks 0, 3 is 2 times that on rank 1"),
        (2, times(1 + 2e-5), "step 1 that of weight on rank 1 is 1 times that on rank 0"),
        (3, tilted, "step 2 that of weight on rank 1 is not that on rank 0"),
        (3, dropped, "step 1 that of weight on rank 1 is 0 times that on rank 0"),
    ],
)
def test_gradients_that_are_changed_by_rank_after_they_are_averaged_are_told(n, change, place):
    """Whatever becomes of the parameters: rank 0's gradient of the pinned steps may be right."""
    replicated = RankSummary(replicated=frozenset({"weight", "bias"}))
    free = made.run(n, change)
    free = replace(free, ranks=tuple(replace(rank, end=replicated) for rank in free.ranks))
    told = cause(n, free=free)
    assert told == (
        f"gradients are changed by rank: in {place}, though it was averaged over the ranks; "
        "something changes, drops or scales it there only"
    )
    assert find_divergence(made.evidence(n, free=made.run(n, change))) is None  # of own parameters


@pytest.mark.parametrize("drawn", [False, True])
def test_a_loss_that_is_scaled_on_one_rank_is_told(drawn):
    """Also of a model with dropout: its loss is that of one process all the same."""
    losses = [(1.5, 2.6), (2.2, 1.1), (1.9, 1.4)]

    def of_rank(factor):
        def loss(rank, k, step):
            (_, share), scale = step.losses[0], factor if rank == 1 else 1.0
            return {"losses": ((losses[k][rank] * scale, share),)}

        return loss

    whole = [
        global_loss([rank.steps[k] for rank in made.run(2, of_rank(1.0)).ranks]) for k in range(3)
    ]
    oracle = made.run(1, lambda r, k, s: {"losses": ((whole[k], 1.0),), "uses_random": drawn})
    told = cause(2, of_rank(1.1), lambda k, g: g + 0.3, oracle=oracle)
    assert told == (
        "the loss is scaled by rank: on rank 1 it is 1.1 times what it is in one process"
    )


def test_a_change_on_one_rank_between_steps_is_told():
    def touched(rank, k, step):
        other = {**step.parameters, "bias": Fingerprint(3.0, 9.0)}
        return {"parameters": other} if rank == 1 and k == 1 else {}

    told = cause(2, touched)
    assert told == (
        "the ranks hold different parameters: before step 2 something changes bias on some ranks "
        "only"
    )


@pytest.mark.parametrize("n", [2, 3])
def test_a_buffer_that_is_another_one_after_training_is_told(n):
    """Of two ranks the one whose buffer is not that of one process is named."""

    def end(run, odd):
        said = {"mean": Fingerprint(1.0, 0.5)}, {"mean": Fingerprint(1.0, 0.6)}
        ends = (RankSummary(buffers=said[rank == odd]) for rank in range(run.n))
        both = zip(run.ranks, ends, strict=True)
        return replace(run, ranks=tuple(replace(rank, end=end) for rank, end in both))

    told = cause(n, oracle=end(made.run(1), None), free=end(made.run(n), 0))
    place = "after training mean on rank 0 is not that on rank 1"
    assert told.startswith(f"buffers differ by rank: {place}; something computes it")
    assert find_divergence(made.evidence(n, free=end(made.run(n), None))) is None


def test_buffers_of_modules_that_one_rank_calls_are_not_compared():
    """Rank 0 may evaluate a copy of the model."""

    def add(rank, k, step):
        return {"buffers": step.buffers | {"Copy.mean": Fingerprint(1.0, k)}} if rank == 0 else {}

    assert find_divergence(made.evidence(2, add)) is None


@pytest.mark.parametrize(("factor", "words"), [(3, "3 times"), (1 / 3, "1/3 of")])
def test_a_sum_taken_for_a_mean_is_told(factor, words):
    told = cause(3, spoil=lambda k, g: g * factor)
    assert told.startswith("a sum taken for a mean: the gradient of step 1 is " + words)


def test_a_mean_of_means_is_told_where_only_ragged_batches_differ():
    told = cause(2, spoil=lambda k, g: g + 0.02 if k == 2 else g)
    assert told.startswith("a mean of means: in step 3 the ranks hold 3, 4 samples")


def test_a_weighted_mean_taken_for_a_mean_is_told():
    told = cause(
        2, lambda r, k, s: {"losses": ((1.0 + r, s.losses[0][1]),)}, lambda k, g: g + 0.1 * k + 0.1
    )
    assert told.startswith("a sum or a weighted mean taken for a mean: in step 1 the ranks' losses")


def test_what_no_rule_explains_has_no_cause():
    assert cause(2, spoil=lambda k, g: g + 0.1 * (k + 1)) is None


def test_the_first_parting_names_step_and_tensor():
    divergence = find_divergence(made.evidence(2, spoil=lambda k, g: g + 0.1 if k == 1 else g))
    assert isinstance(divergence, Divergence)
    assert (divergence.n, divergence.step, divergence.what) == (2, 2, "gradient")
    assert divergence.tensor in ("weight", "bias")


# ------------------------------------------------------------------------------ comparing


def test_a_gap_is_relative_to_the_whole_gradient_and_finds_a_factor():
    ours = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([0.0, 4.0])}
    reference = made.run(1, gradients={0: ours})
    (diff,) = compare_gradients(
        reference, made.run(2, gradients={0: {n: 2 * t for n, t in ours.items()}})
    )
    assert diff.difference == pytest.approx(1.0)
    assert diff.scale == pytest.approx(2.0)
    assert diff.rest == pytest.approx(0.0, abs=1e-12)
    assert diff.tensor == "b"


def test_a_missing_gradient_counts_as_zeros():
    ours = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    reference = made.run(1, gradients={0: ours})
    (diff,) = compare_gradients(reference, made.run(2, gradients={0: {"a": ours["a"]}}))
    assert diff.difference == pytest.approx(0.8)
    assert diff.tensor == "b"


def test_a_small_tensor_cannot_hide_behind_a_large_one():
    ours = {"large": torch.full((9,), 1e4), "small": torch.full((9,), 1e-3)}
    theirs = {"large": ours["large"], "small": ours["small"] * 1.5}
    noise = {"large": ours["large"] * (1 + 1e-7), "small": ours["small"] * (1 + 1e-6)}
    reference, spoilt = made.run(1, gradients={0: ours}), made.run(2, gradients={0: theirs})
    (diff,) = compare_gradients(reference, spoilt, [made.run(1, gradients={0: noise})])
    assert diff.difference < FLOAT32.gradient
    assert diff.hidden == "small"
    rounding = {"large": ours["large"], "small": ours["small"] * 1.5}
    assert (
        compare_gradients(reference, spoilt, [made.run(1, gradients={0: rounding})])[0].hidden
        is None
    )


def test_what_is_not_finite_is_equal_to_itself_only():
    nan, one = torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.0])
    assert distance({"x": nan}, {"x": nan.clone()}) == 0.0
    assert distance({"x": one}, {"x": nan}) == math.inf
    assert distance({"x": one / 0}, {"x": one / 0}) == 0.0
    assert distance({"x": one / 0}, {"x": -one / 0}) == math.inf
    e = made.evidence(2, spoil=lambda k, g: g * math.nan)
    assert find_divergence(e) is not None
    losses = made.run(1, lambda r, k, s: {"losses": ((math.nan, None),)})
    assert max(compare_losses(losses, losses)) == 0.0
    assert max(compare_losses(made.run(1), losses)) == math.inf
    assert max(compare_losses(losses, made.run(1))) == math.inf


def test_a_difference_is_seen_beside_what_is_not_finite():
    def with_mask(n, mean, weight):
        mask = torch.tensor([0.0, -math.inf])
        buffers = {"mask": mask, "1.running_mean": torch.full((4,), mean)}
        parameters = {"weight": torch.tensor([weight, 2.0]), "dead": torch.tensor([math.nan])}
        initial = {"weight": torch.zeros(2), "dead": torch.tensor([math.nan])}
        return made.run(n, buffers=buffers, parameters=parameters, initial=initial)

    oracle = with_mask(1, 1.0, 0.0)
    same = compare_runs(oracle, with_mask(2, 1.0, 0.0), [])
    assert (same.parameters, same.moved, same.buffers) == (0.0, 0.0, 0.0)
    assert compare_runs(oracle, with_mask(2, 1.5, 0.0), []).buffers == pytest.approx(0.5)
    other = compare_runs(oracle, with_mask(2, 1.0, 1.0), [])
    assert (other.parameters, other.moved) == pytest.approx((0.5, 0.5))
    ours = {"dead": Fingerprint(math.nan, math.nan), "weight": Fingerprint(2.0, 1.0)}
    theirs = ours | {"weight": Fingerprint(2.0, 2.0)}
    assert fingerprint_distance(ours, theirs) == (0.5, "weight")


def test_a_loss_that_has_almost_vanished_is_measured_by_the_largest_one():
    def losses(last):
        return made.run(1, lambda r, k, s: {"losses": ((last if k else 2.0, None),)})

    assert max(compare_losses(losses(1e-9), losses(3e-9))) == pytest.approx(1e-7)
    assert max(compare_losses(losses(1.0), losses(1.5))) == pytest.approx(0.5)


def test_buffers_of_whole_numbers_must_be_equal():
    other = made.run(
        2, buffers={"1.running_mean": torch.ones(4), "1.num_batches_tracked": torch.tensor(4)}
    )
    assert compare_runs(made.run(1), made.run(2), []).buffers == 0.0
    assert compare_runs(made.run(1), other, []).buffers == math.inf


def test_the_loss_of_the_global_batch_weighs_ranks_by_their_samples():
    ranks = [StepRecord(losses=((1.0, 0.25),)), StepRecord(losses=((2.0, 0.75),))]
    assert global_loss(ranks) == pytest.approx(1.75)
    ghost = [StepRecord(losses=((1.0, 1.0),)), StepRecord(losses=((math.nan, 0.0),))]
    assert global_loss(ghost) == 1.0
    unknown = [StepRecord(losses=((1.0, None),)), StepRecord(losses=((2.0, None),))]
    assert global_loss(unknown) == 1.5
    accumulated = [StepRecord(losses=((1.0, 0.5), (2.0, 0.5)))] * 2
    assert global_loss(accumulated) == 3.0
    assert global_loss([StepRecord(), StepRecord()]) is None


def test_fingerprints_measure_distances():
    generator = torch.Generator().manual_seed(1)
    ratios = []
    for _ in range(200):
        a, b = torch.randn(2, 3000, generator=generator)
        apart = fingerprint(a).projection - fingerprint(b).projection
        ratios.append(apart**2 / float((a - b).square().sum()))
    assert 0.7 < sum(ratios) / len(ratios) < 1.4
    assert fingerprint(torch.tensor([3.0, 4.0])).norm == 5.0


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
)
def test_row_hashes_belong_to_rows(dtype):
    rows = torch.arange(35).view(5, 7).fmod(6).to(dtype)
    rows[0, 0] = 1
    hashes = hash_rows(rows)
    assert hash_rows(rows.flip(0)) == hashes[::-1]
    assert hash_rows(rows[2:4]) == hashes[2:4]
    assert len({tuple(row.tolist()) for row in rows}) == len(set(hashes))
    assert hash_rows(torch.rand(3, 10_000)) != hash_rows(torch.rand(3, 10_000))


def test_names_come_from_the_modules_that_are_called():
    names = TensorNames()
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    names.register(first)
    names.register(second)
    optimizer = torch.optim.SGD(
        [*first.parameters(), *second.parameters(), nn.Parameter(torch.ones(1))]
    )
    assert [name for name, _ in names.parameters(optimizer)] == [
        *("weight", "bias", "Linear.weight", "Linear.bias"),
        "optimizer0.group0.4",
    ]


# --------------------------------------------------------------------------------- verdicts


def alone(oracle=None, **fields):
    oracle = oracle or made.run(1)
    return replace(SingleRankRuns(oracle, oracle, None, oracle, PERTURBED, ""), **fields)


def shifted(n, size):
    """A run that ends this far off, relative to the distance moved."""
    end = {name: t * (1 + size) for name, t in made.run(1).parameters.items()}
    return made.run(n, parameters=end)


def test_equal_runs_are_the_same():
    report = make_report(alone(), [MultiRankRuns(made.run(n), made.run(n)) for n in (2, 3)])
    assert report.verdict is Verdict.SAME
    assert report.cause is report.divergence is None


def test_the_report_is_printed_also_where_its_file_cannot_be_written(monkeypatch, capsys):
    report = make_report(alone(), [MultiRankRuns(made.run(2), made.run(2))])
    monkeypatch.setattr(verification, "verify_script", lambda *_: report)
    with pytest.raises(CommandLineError, match="No space left on device"):
        run_and_report(["train.py"], [1, 2], start=None, json="/dev/full")
    assert capsys.readouterr().out.endswith("SAME\n")


@pytest.mark.parametrize(
    ("noise", "verdict"),
    [(0.0, "DIFFERENT"), (0.001, "DIFFERENT"), (0.02, "SAME WITHIN ITS OWN NOISE")],
)
def test_other_parameters_are_measured_by_the_scripts_own_noise(noise, verdict):
    runs = alone(noise=shifted(1, noise))
    report = make_report(runs, [MultiRankRuns(made.run(2), shifted(2, 0.05))])
    assert str(report.verdict) == verdict


def test_buffers_within_their_noise_excuse_no_parameters():
    def noisy(n, parameters, mean):
        buffers = {
            "1.running_mean": torch.full((4,), mean),
            "1.num_batches_tracked": torch.tensor(3),
        }
        return replace(shifted(n, parameters), buffers=buffers)

    runs = alone(noise=noisy(1, 0.001, 1.02))
    for off, verdict in ((0.002, "SAME WITHIN ITS OWN NOISE"), (0.5, "DIFFERENT")):
        report = make_report(runs, [MultiRankRuns(made.run(2), noisy(2, off, 1.03))])
        assert str(report.verdict) == verdict


def test_a_plot_without_matplotlib_is_refused_before_the_script_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # an import of it fails
    script = tmp_path / "train.py"
    script.write_text("")
    code = cli.main(["verify", "-n", "2", "--plot", str(tmp_path / "loss.png"), str(script)])
    assert code == 2
    assert "--plot needs matplotlib. Install it with: pip install" in capsys.readouterr().err


def test_a_drift_is_found_where_it_begins():
    def drift(rank, k, step):
        moved = {**step.parameters, "bias": Fingerprint(3.0, 2.0 + k + 0.5)}
        return {"parameters": moved} if k > 1 else {}

    report = make_report(
        alone(),
        [MultiRankRuns(made.run(2), replace(shifted(2, 0.1), ranks=made.run(2, drift).ranks))],
    )
    assert (report.divergence.step, report.divergence.what, report.divergence.tensor) == (
        3,
        "parameters",
        "bias",
    )
    report = make_report(alone(), [MultiRankRuns(made.run(2), shifted(2, 0.1))])
    assert (report.divergence.step, report.divergence.what) == (3, "parameters")
    buffers = {"1.running_mean": torch.ones(4) * 2, "1.num_batches_tracked": torch.tensor(3)}
    report = make_report(alone(), [MultiRankRuns(made.run(2), made.run(2, buffers=buffers))])
    assert (report.divergence.what, report.divergence.tensor) == ("buffers", "1.running_mean")


def test_noise_does_not_excuse_a_wrong_gradient_or_unsplit_batches():
    runs = alone(noise=shifted(1, 0.5))
    gradients = {0: {name: g * 1.0001 for name, g in made.gradient(0).items()}}
    wrong = MultiRankRuns(made.run(2, gradients=gradients), made.run(2))
    assert make_report(runs, [wrong]).verdict is Verdict.DIFFERENT
    unsplit = made.run(2, lambda r, k, s: {"samples": made.BATCHES[k]})
    assert make_report(runs, [MultiRankRuns(unsplit, unsplit)]).verdict is Verdict.DIFFERENT


@pytest.mark.parametrize(("rounding", "verdict"), [(1e-6, "DIFFERENT"), (5e-4, "WITHIN ITS OWN")])
def test_a_gradient_is_measured_by_what_rounding_alone_does_to_it(rounding, verdict):
    def off(n, size, at):
        gradients = {k: {"weight": made.gradient(k)["weight"]} for k in range(3)}
        gradients[at]["weight"] = gradients[at]["weight"] * (1 + size)
        return made.run(n, gradients=gradients)

    runs = alone(again=off(1, 0.0, 0), rounded=(off(1, 1e-7, 0), off(1, rounding, 2)))
    report = make_report(runs, [MultiRankRuns(off(2, 1e-3, 1), made.run(2))])
    assert verdict in str(report.verdict)


def test_a_gradient_is_judged_without_autocast_and_with_it():
    def off(n, size):
        gradients = {k: {m: g * (1 + size) for m, g in made.gradient(k).items()} for k in range(3)}
        return made.run(n, gradients=gradients)

    half = made.run(1, lambda r, k, s: {"half_precision": "bfloat16"})
    rounded = off(1, 0.02)
    runs = alone(half, again=made.run(1), rounded=(rounded,))
    assert make_report(runs, [MultiRankRuns(off(2, 0.1), made.run(2))]).verdict is Verdict.NOISE
    runs = replace(runs, full=replace(runs, again=made.run(1), rounded=(), autocast=False))
    for with_it, without, expected in (
        (0.1, 1e-7, Verdict.SAME),
        (0.1, 1e-3, Verdict.DIFFERENT),
        (0.5, 1e-7, Verdict.DIFFERENT),
    ):
        report = make_report(runs, [MultiRankRuns(off(2, with_it), made.run(2), off(2, without))])
        assert report.verdict is expected
        assert report.autocast is (with_it == 0.5)


def test_a_later_gradient_is_no_excuse_for_an_earlier_one(monkeypatch):
    """What no state holds may be further off after some steps."""
    monkeypatch.setattr(verdict_module, "PINNED", 1)

    def off(n, size, step):
        gradients = {k: made.gradient(k) for k in range(3)}
        gradients[step] = {name: g * (1 + size) for name, g in gradients[step].items()}
        return made.run(n, gradients=gradients)

    runs = alone(rounded=(off(1, 1e-3, 2),))
    for step, expected in ((2, Verdict.NOISE), (0, Verdict.DIFFERENT)):
        report = make_report(runs, [MultiRankRuns(off(2, 5e-3, step), made.run(2))])
        assert report.verdict is expected


def test_the_report_says_in_which_steps_a_mistake_would_be_seen():
    stopped = [replace(rank, end=RankSummary(whole=False)) for rank in made.run(1).ranks]
    runs = alone(replace(made.run(1), ranks=tuple(stopped)))
    text = format_table(make_report(runs, [MultiRankRuns(made.run(2), made.run(2))]))
    assert "gradients were compared in steps 1 to 3 of 3, the loss, the parameters and" in text
    assert "stopped after step 3, and later ones were not seen" in text


def test_the_worst_of_several_verdicts_counts():
    bad = MultiRankRuns(made.run(3), shifted(3, 0.1))
    report = make_report(alone(), [MultiRankRuns(made.run(2), made.run(2)), bad])
    assert report.verdict is Verdict.DIFFERENT
    assert [str(j.verdict) for j in report.results] == ["SAME", "DIFFERENT"]


def test_one_process_that_does_not_repeat_itself_is_not_compared():
    again = made.run(
        1, lambda r, k, s: {"gradients": {"weight": Fingerprint(1.0, 1.0)}} if k else {}
    )
    report = make_report(alone(again=again), [MultiRankRuns(made.run(2), made.run(2))])
    assert report.verdict is Verdict.DIFFERENT
    assert report.results == ()
    assert report.cause.startswith("non-deterministic kernels")
    other_state = made.run(
        1, lambda r, k, s: {"generator_hash": "x", "gradients": {"weight": Fingerprint(1.0, 1.0)}}
    )
    assert find_nondeterministic(alone(again=other_state)).startswith(
        "not deterministic (seed the script)"
    )


def test_tolerance_follows_the_dtype():
    assert choose_tolerance(made.run(1)) == FLOAT32
    wide = {"weight": torch.ones(2, dtype=torch.float64)}
    assert choose_tolerance(made.run(1, parameters=wide)) == FLOAT64
    mixed = wide | {"bias": torch.ones(2)}
    assert choose_tolerance(made.run(1, parameters=mixed)) == FLOAT32
    half = mixed | {"scale": torch.ones(2, dtype=torch.bfloat16)}
    assert choose_tolerance(made.run(1, parameters=half)) == HALF
    computed = made.run(
        1, lambda r, k, s: {"half_precision": "bfloat16" * (k == 2)}, parameters=wide
    )
    assert choose_tolerance(computed) == HALF


def test_reversed_batches_serve_as_noise_only_if_they_change_the_rounding():
    oracle = made.run(1)

    def backwards(factor):
        return made.run(1, gradients={0: {n: g * factor for n, g in made.gradient(0).items()}})

    assert is_usable_noise(oracle, backwards(1 + 1e-6))
    assert not is_usable_noise(oracle, backwards(1.0))
    assert not is_usable_noise(oracle, backwards(1.1))


def test_the_first_ragged_batch_is_pinned_too():
    assert choose_pinned_steps(made.run(1)) == (0, 1, 2)
    steps = tuple(StepRecord(samples=8 if k != 9 else 3) for k in range(12))
    long = replace(made.run(1), ranks=(replace(made.run(1).ranks[0], steps=steps),))
    assert choose_pinned_steps(long) == (0, 1, 2, 3, 4, 6, 8, 9, 11)


@pytest.mark.parametrize(
    ("count", "tail", "doubled"),
    [(799, 9, []), (800, 9, [199]), (3300, 9, [199, 399, 799]), (1200, 420, [199, 399, 420])],
)
def test_later_steps_are_pinned_as_far_as_the_runs_of_gradients_go(count, tail, doubled):
    steps = tuple(StepRecord(samples=3 if k == tail else 8) for k in range(count))
    long = replace(made.run(1), ranks=(replace(made.run(1).ranks[0], steps=steps),))
    assert [k for k in choose_pinned_steps(long) if k >= 100] == doubled


def test_the_reports_hold_what_they_promise():
    report = make_report(alone(), [MultiRankRuns(made.run(2), shifted(2, 0.1))])
    value = json.loads(format_json(report))
    promised = {"verdict", "runs", "gradient_difference", "loss_difference", "cause", "noise"}
    assert promised | {"max_relative_difference", "first_divergence"} <= value.keys()
    assert value["verdict"] == "DIFFERENT"
    assert value["max_relative_difference"] == pytest.approx(0.1, rel=1e-4)
    assert [run["n"] for run in value["runs"]] == [1, 2]
    assert value["runs"][1]["samples_per_rank"] == [11, 12]
    assert {"seconds", "steps", "final_loss"} <= value["runs"][1].keys()
    assert "DIFFERENT" in format_table(report)
    assert "11 12" in format_table(report)


def test_that_nothing_was_divided_is_said():
    whole = made.run(2, lambda r, k, s: {"samples": made.BATCHES[k]})
    undivided = "at n = 2 every rank computed every sample"
    report = replace(
        make_report(alone(), [MultiRankRuns(made.run(2), made.run(2))]), oracle=made.run(1)
    )
    assert undivided not in format_table(report)
    result = replace(report.results[0], run=whole)
    assert undivided in format_table(replace(report, results=(result,)))
    different = replace(result, verdict=Verdict.DIFFERENT)
    assert undivided not in format_table(replace(report, results=(different,)))


@pytest.mark.parametrize(("divided", "said"), [(0, True), (3, False), (None, False)])
def test_that_nothing_was_divided_is_said_where_no_samples_were_seen(divided, said):
    def unseen(n, end):
        run = made.run(n, lambda r, k, s: {"samples": 0})
        return replace(run, ranks=tuple(replace(rank, end=end) for rank in run.ranks))

    unedited = unseen(2, RankSummary(divided=divided))
    report = make_report(alone(unseen(1, RankSummary())), [MultiRankRuns(unedited, unedited)])
    assert report.verdict is Verdict.SAME
    assert ("at n = 2 every rank computed every sample" in format_table(report)) is said


@pytest.mark.parametrize("divided", [0, 3])
def test_that_only_modules_within_were_divided_is_said(divided):
    def whole(n):
        run = made.run(n, lambda r, k, s: {"samples": made.BATCHES[k]})
        end = RankSummary(divided=divided)
        return replace(run, ranks=tuple(replace(rank, end=end) for rank in run.ranks))

    report = make_report(alone(made.run(1)), [MultiRankRuns(made.run(2), made.run(2))])
    result = replace(report.results[0], run=whole(2))
    text = format_table(replace(report, results=(result,)))
    assert ("at n = 2 every rank computed every sample" in text) is (divided == 0)
    assert ("modules within them were divided" in text) is (divided > 0)


def test_a_backward_from_an_edge_of_the_graph_has_no_loss(tmp_path):
    recorder = Recorder(RunPlan(), tmp_path, 0)
    weights = torch.ones(2, requires_grad=True)
    edge = get_gradient_edge(weights.sum())
    recorder._backward(torch.autograd.backward, edge, torch.ones(()))
    assert recorder._losses == []
    recorder._backward(torch.autograd.backward, weights.sum())
    assert recorder._losses == [(2.0, None)]
    recorder.finish()


class Answer:
    def __init__(self, loss):
        self.loss = loss


@pytest.mark.parametrize("kind", [Answer, lambda loss: SimpleNamespace(inner=Answer(loss))])
def test_a_loss_inside_of_an_object_is_traced_to_its_call(kind):
    class Model(nn.Linear):
        def forward(self, batch):
            return kind(super().forward(torch.dropout(batch.inner.loss, 0.5, True)).mean())

    calls = ModuleCallRecorder(TensorNames(), lambda parameters: None)
    batch = SimpleNamespace(inner=Answer(torch.ones(5, 2)))
    output = calls._outside(nn.Module.__call__, Model(2, 1), batch)
    loss = getattr(output, "inner", output).loss
    (call,) = find_module_calls([loss * 2])
    assert (call.samples, call.uses_random) == (5, True)


# -------------------------------------------------------- real trainings, on forked ranks


@pytest.fixture(scope="module")
def solo(tmp_path_factory):
    """One process's runs of the training script, by its arguments."""
    known = {}

    def runs_of(*arguments):
        if arguments not in known:
            folder = tmp_path_factory.mktemp("alone")
            runner = ScriptRunner([TRAIN, *arguments], folder, Forked())
            known[arguments] = run_single_rank(runner, None, is_usable_noise)
        return known[arguments]

    return runs_of


def judged(n, arguments, alone, folder):
    runner = ScriptRunner([TRAIN, *arguments], folder, Forked())
    return compare_with_rounding(runner, alone, [run_multi_rank(runner, n, None, alone)])


def test_an_honest_training_is_the_same(solo, tmp_path):
    runs = solo()
    assert runs.noise_by == REVERSED
    report = judged(3, (), runs, tmp_path)
    assert report.verdict is Verdict.SAME
    assert "the samples come in another order" in report.compare_with_python
    assert sum(report.results[0].run.samples_per_rank) == 88


@pytest.mark.parametrize(
    ("indices", "offset", "said"),
    [
        ((), 1000, "the samples have other contents: random augmentation of a sample is drawn"),
        ((), 1, "the samples come in another order"),
        (((0, 1),), 1000, "random augmentation of a sample is drawn"),
        (((1, 0),), 1000, "the samples come in another order"),
    ],
)
def test_other_samples_than_plain_python_s_are_said_to_be_in_another_order_if_they_are(
    indices, offset, said
):
    def end(run, indices):
        (rank,) = run.ranks
        return replace(run, ranks=(replace(rank, end=replace(rank.end, indices=indices)),))

    plain = made.run(1, lambda r, k, s: {"row_hashes": tuple(h + offset for h in s.row_hashes)})
    ours, theirs = end(made.run(1), indices and ((0, 1),)), end(plain, indices)
    assert compare_with_python(ours, theirs, FLOAT32).startswith(said)


def test_an_augmentation_that_leaves_some_samples_as_they_are_is_no_other_order():
    def flip(rank, k, step):
        first, *others = step.row_hashes
        return {"row_hashes": (first + 1000, *others)}

    said = compare_with_python(made.run(1), made.run(1, flip), FLOAT32)
    assert said.startswith("random augmentation of a sample is drawn from a stream of its own")


def at_night(*kinds):
    return [pytest.param(kind, marks=pytest.mark.nightly) for kind in kinds]


@pytest.mark.parametrize(
    "kind", [*("dropout", "stated_class_weights"), *at_night("augmentation", "stated_sum")]
)
def test_what_instep_reaches_is_the_same(kind, solo, tmp_path):
    assert judged(3, (kind,), solo(kind), tmp_path).verdict is Verdict.SAME


AT_ZERO = """
import torch, instep
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
with torch.no_grad():
    model[0].weight[:, 1] = model[0].weight[:, 0]
    model[0].bias.zero_()
model = instep.replicate(model)
optimizer = torch.optim.SGD(model.parameters(), 0.0)
for step in range(3):
    x = instep.shard(torch.tensor([1.0, -1.0]).repeat(4, 1))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
"""Units that are on or off by rounding."""


def test_units_that_flip_by_rounding_are_found_in_one_process(solo, tmp_path):
    script = tmp_path / "zero.py"
    script.write_text(AT_ZERO)
    runner = ScriptRunner([str(script)], tmp_path, Forked())
    runs = run_with_rounding(runner, run_single_rank(runner, None, is_usable_noise))
    for rounded in runs.rounded:
        diffs = compare_gradients(runs.again, rounded)
        assert [diff.step for diff in diffs] == [0, 1, 2]
        assert all(diff.difference > 0.1 for diff in diffs)
    (tmp_path / "honest").mkdir()
    runner = ScriptRunner([TRAIN], tmp_path / "honest", Forked())
    honest = run_with_rounding(runner, solo())
    assert all(
        diff.difference < FLOAT32.gradient
        for rounded in honest.rounded
        for diff in compare_gradients(honest.again, rounded)
    )


SABOTAGED_CORES = [
    ("never_reduced", 2, "gradients are changed by rank: in step 1 that of"),
    ("mean_of_means", 3, "a mean of means: in step 1 the ranks hold 2, 3, 3 samples"),
    ("summed", 2, "a sum taken for a mean: the gradient of step 1 is 2 times"),
    ("unsplit", 2, "a batch that was not split"),
    ("padded", 3, "a padded tail: the 8 samples of step 1"),
    ("dropped", 3, "samples were dropped: 6 of the 8"),
    ("shuffled_by_rank", 2, "randomness by rank: in step 1 the order of samples is one process's"),
    ("shuffled_by_size", 2, "another order"),
]
SABOTAGED_SCRIPTS = [
    ("not_replicated", 2, "gradients are not averaged over the ranks"),
    ("not_sharded", 2, "a batch that was not split"),
    ("seed_by_rank", 2, "randomness by rank: 0.weight on rank 1 does not start"),
    ("schedule_by_ranks", 2, "the schedule is stepped too often"),
    ("scaled_rate", 2, "the learning rate is scaled: 2 times"),
    ("distributed_sampler", 3, "another number of steps: 16 instead of 12"),
    ("stepped_by_rank", 2, "the ranks hold different parameters: before step 2"),
    ("stops_early", 2, "another number of steps: 1 instead of 12"),
]


BY_DAY = {
    *("shuffled_by_rank", "not_sharded", "schedule_by_ranks"),
    *("scaled_rate", "distributed_sampler", "stops_early"),
}


@pytest.mark.parametrize(
    ("sabotage", "n", "told"),
    [
        pytest.param(*case, marks=() if case[0] in BY_DAY else nightly)
        for case in SABOTAGED_CORES + SABOTAGED_SCRIPTS
    ],
)
def test_sabotage_is_different_with_the_right_cause(sabotage, n, told, solo, tmp_path):
    report = judged(n, (sabotage,), solo(), tmp_path)
    assert report.verdict is Verdict.DIFFERENT
    assert report.divergence is not None
    assert report.cause.startswith(told)


def test_a_gradient_that_adam_normalises_on_one_rank_is_different(solo, tmp_path):
    """The parameters stay those of one process within the noise, on all ranks."""
    report = judged(2, (*CHAOTIC, "gradient_by_rank"), solo(*CHAOTIC), tmp_path)
    assert report.verdict is Verdict.DIFFERENT
    assert (report.divergence.what, report.divergence.step) == ("gradient", 7)
    assert report.cause.startswith("gradients are changed by rank: in step 7 that of")
    assert "on rank 1 is 1.5 times that on rank 0, though" in report.cause


def test_a_buffer_that_is_changed_on_one_rank_is_different(solo, tmp_path):
    """No gradient depends on it, and rank 0's buffers are those of one process."""
    report = judged(2, (*CHAOTIC, "buffer_by_rank"), solo(*CHAOTIC), tmp_path)
    assert report.verdict is Verdict.DIFFERENT
    assert (report.divergence.what, report.divergence.step) == ("buffers", 8)
    assert report.cause.startswith(
        "buffers differ by rank: in step 8 1.running_var on rank 1 is not that on rank 0; something"
    )


@pytest.mark.parametrize("sabotage", ["unsynchronised_norm", *at_night("rank_statistics")])
def test_unsynchronised_batch_norm_is_different(sabotage, solo, tmp_path):
    report = judged(2, ("--norm", "--optimizer=Adam", sabotage), solo(*CHAOTIC), tmp_path)
    assert report.verdict is Verdict.DIFFERENT
    assert report.cause.startswith("BatchNorm is not synchronised: in step 1 1.running_")


# One process sees these too: its own runs are of the same sabotaged script.
SUMMED = "a sum taken for a mean: the gradient of step 1 is 1/2 of"
SABOTAGED_LOSSES = [
    pytest.param("sum", SUMMED, marks=nightly),
    pytest.param(
        "class_weights",
        "a sum or a weighted mean taken for a mean: in step 1 the ranks' losses",
        marks=nightly,
    ),
    pytest.param(
        "dropout_by_rank",
        "randomness by rank: the model draws random numbers (dropout, noise) in step 1",
        marks=nightly,
    ),
    (
        "augmented_by_rank",
        "randomness by rank: the ranks asked for the same samples as one process",
    ),
    ("plateau", "decisions that differ by rank: the learning rate of step"),
]


@pytest.mark.parametrize(("sabotage", "told"), SABOTAGED_LOSSES)
def test_what_ranks_cannot_do_alike_is_different(sabotage, told, solo, tmp_path):
    report = judged(2, (sabotage,), solo(sabotage), tmp_path)
    assert report.verdict is Verdict.DIFFERENT
    assert report.cause.startswith(told)


def test_an_unseeded_script_is_told_so_and_not_compared(solo):
    report = make_report(solo("unseeded"), [])
    assert report.verdict is Verdict.DIFFERENT
    assert report.cause.startswith("not deterministic: two runs of one process differ from step 1")


CHAOTIC = ("--norm", "--optimizer=Adam")


def test_adam_with_a_bias_before_batch_norm_is_not_different(solo, tmp_path):
    """That bias has no gradient but rounding, of which Adam makes steps."""
    report = judged(3, CHAOTIC, solo(*CHAOTIC), tmp_path)
    assert report.verdict is Verdict.NOISE
    assert report.max_difference.gradient < FLOAT32.gradient
    assert report.max_difference.moved > FLOAT32.run


IN_HALF = (*CHAOTIC, "--half")


def test_adam_makes_steps_of_what_is_rounded_to_half_precision(solo, tmp_path):
    """A batch in another order has the same products of bfloat16, and shows none of this."""
    runs = solo(*IN_HALF)
    assert (runs.noise_by, runs.oracle.half_precision) == (PERTURBED, "bfloat16")
    report = judged(2, IN_HALF, runs, tmp_path)
    assert report.verdict is Verdict.NOISE
    assert report.noise.moved > 0.02
    assert report.max_difference.gradient < FLOAT32.gradient  # without autocast
    assert "computes in bfloat16 by autocast: gradients were compared without it" in format_table(
        report
    )


@pytest.mark.parametrize("sabotage", ["loss_by_rank", *at_night("never_reduced", "summed", "sum")])
def test_half_precision_does_not_excuse_a_wrong_gradient(sabotage, solo, tmp_path):
    alone = solo(*IN_HALF, *({sabotage} & {"sum"}))
    report = judged(2, (*IN_HALF, sabotage), alone, tmp_path)
    assert report.verdict is Verdict.DIFFERENT
    if sabotage == "loss_by_rank":
        assert report.cause.startswith("the loss is scaled by rank: on rank 1 it is 1.1 times")


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.05), ("float16", 0.05), ("", 0.0)])
def test_parameters_are_changed_so_that_some_round_otherwise(dtype, share):
    before = torch.randn(10000, generator=torch.Generator().manual_seed(1))
    after = before.clone()
    changes.perturb([after], 1, dtype)
    assert 0.0 < ((after - before) / before).abs().mean() < torch.finfo(torch.bfloat16).eps / 10
    half = getattr(torch, dtype or "bfloat16")
    found = (after.to(half) != before.to(half)).double().mean()
    assert found == pytest.approx(share, abs=0.02)


@pytest.mark.nightly
def test_lbfgs_is_the_same_in_float64():
    report = verify_script([str(SCRIPTS / "lbfgs.py")], [3], start=Forked())
    assert report.verdict is not Verdict.DIFFERENT
    assert report.max_difference.gradient < FLOAT64.gradient
    assert report.results[0].run.samples_per_rank == [10, 10, 11]


@pytest.mark.nightly
def test_the_digits_example_is_the_same_at_2_3_and_5():
    report = verify_script(
        [DIGITS, "--epochs", "1", "--batch-size", "128"], [1, 2, 3, 5], start=Forked()
    )
    assert [str(j.verdict) for j in report.results] == ["SAME"] * 3
    assert [sum(j.run.samples_per_rank) for j in report.results] == [1437] * 3


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind",
    [*("accumulate", "clip"), *at_night("two_models", "autocast")],
)
def test_other_loops_are_the_same(kind):
    report = verify_script([str(SCRIPTS / "loops.py"), kind], [3], start=Forked())
    assert report.verdict is not Verdict.DIFFERENT
    assert sum(report.results[0].run.samples_per_rank) == sum(report.oracle.samples_per_rank)


def test_an_endless_script_stops_at_the_steps_asked_for(tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    report = verify_script([str(script)], [2], steps=3, start=Forked())
    assert report.verdict is Verdict.SAME
    assert [run.steps for run in (report.oracle, report.results[0].run)] == [3, 3]


ENDLESS = """
import torch, instep
torch.manual_seed(0)
model = instep.replicate(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
while True:
    x = instep.shard(torch.arange(12.0).view(4, 3) / 12)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


def test_the_exit_code_is_0_for_the_same_and_1_for_different(tmp_path, capsys):
    assert run_and_report([TRAIN], [2], Forked(), 2) == 0
    assert capsys.readouterr().out.endswith("\nSAME\n")
    picture, report = tmp_path / "curves.png", tmp_path / "report.json"
    assert run_and_report([TRAIN, "not_sharded"], [2], Forked(), 2, str(report), str(picture)) == 1
    assert "likely cause: a batch that was not split" in capsys.readouterr().out
    assert json.loads(report.read_text())["first_divergence"]["step"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------ real launches


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "instep", "verify", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        **options,
    )


@launch
@nightly
@pytest.mark.timeout(120)
def test_the_command_verifies_a_script_with_explicit_calls(tmp_path):
    report, script = tmp_path / "report.json", tmp_path / "endless.py"
    script.write_text(ENDLESS)
    told = command("-n", "2", "--steps", 2, "--json", report, script)
    assert told.stdout.endswith("\nSAME\n"), told.stderr
    assert told.returncode == 0
    assert json.loads(report.read_text())["runs"][1]["samples_per_rank"] == [4, 4]


@launch
def test_a_failing_rank_is_reported_with_n_and_its_traceback(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('no good')\n")
    RunPlan().write(tmp_path)
    with pytest.raises(ScriptFailedError) as caught:
        InstepRunStarter()(2, tmp_path, [str(script)], None)
    told = str(caught.value)
    assert told.startswith("the script fails at n = 2, after 0, 0 steps on its ranks:\n")
    assert 'fails.py", line 3, in <module>\n' in told
    assert told.endswith("ValueError: no good")
    assert "entry.py" not in told


@launch
def test_a_script_that_refuses_its_options_is_reported_with_its_words(tmp_path, capfd):
    script = tmp_path / "options.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    assert cli.main(["verify", "-n", "2", str(script), "--unknown"]) == 2
    told = capfd.readouterr().err
    assert "options.py: error: unrecognized arguments: --unknown\ninstep: rank 0" in told


@launch
def test_a_script_that_asks_a_question_is_told_that_nobody_answers(tmp_path, capfd):
    script = tmp_path / "asks.py"
    script.write_text("input('name? ')\n")
    assert cli.main(["verify", "-n", "2", str(script)]) == 2
    told = capfd.readouterr().err
    assert "the script fails at n = 1" in told
    assert "reads its standard input or needs a terminal" in told


@launch
def test_a_script_that_does_not_end_is_ended(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text("import signal\nsignal.pause()\n")
    RunPlan().write(tmp_path)
    with pytest.raises(ScriptLateError, match="has not ended at n = 2 after 1 seconds"):
        InstepRunStarter()(2, tmp_path, [str(script)], 1.0)


def test_a_script_without_training_is_refused(tmp_path):
    script = tmp_path / "idle.py"
    script.write_text("print('nothing to learn')\n")
    with pytest.raises(StepsError, match=r"makes no step of a torch\.optim optimizer at n = 1"):
        verify_script([str(script)], [2], start=Forked())


def test_a_killed_rank_leaves_what_it_had(tmp_path):
    RunPlan().write(tmp_path)
    script = tmp_path / "dies.py"
    script.write_text(
        ENDLESS.replace("while True:", "import os\nfor k in range(9):\n    k < 2 or os._exit(3)")
    )
    with pytest.raises(ScriptFailedError, match="after 2 steps"):
        Forked()(1, tmp_path, [str(script)], None)
    assert read_run(tmp_path, 1, 0.0).steps == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0,2", "x.py"], "-n takes numbers of ranks such as 1,2,3, not '0,2'"),
        (["-n", "two", "x.py"], "not 'two'"),
        (["-n", "2", "--steps", "0", "x.py"], "--steps takes a whole number from 1 up, not '0'"),
        (["-n", "2", "nowhere.py"], "nowhere.py: there is no such file"),
        (["-n", "2", "--json", "/nowhere/x.json", __file__], "cannot write /nowhere/x.json"),
        (["-n", "2"], "nothing to run"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments, words):
    told = command(*arguments)
    assert told.returncode == 2
    assert words in told.stderr
    assert told.stderr.count("\n") == 1


def test_it_is_started_once_and_not_by_each_task_of_a_launcher():
    tasks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    local = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    told = command("-n", "1,2", __file__, env=os.environ | tasks | local)
    assert told.returncode == 2
    assert "starts all ranks itself, and 2 tasks run it at once" in told.stderr


def test_instep_run_starts_without_torch():
    program = "import sys, instep.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# ------------------------------------------------------------------------ the script's files

CHANGES = """
import ctypes, os, shutil, subprocess
from pathlib import Path

Path("written").write_text("new")
with open("appended", "a") as log:
    log.write("more")
with open("inside", "r+b") as file:
    file.write(b"X")
os.truncate("truncated", 1)
os.replace(shutil.copy("written", "draft"), "replaced")
os.unlink("removed")
os.rename("folder", "elsewhere")
Path("elsewhere/deep/file").write_text("new")
os.unlink("link")
Path("link").mkdir()
Path("link/file").write_text("new")
shutil.rmtree("tree")
Path("tree").write_text("a file now")
Path("outer/new").mkdir(parents=True)
assert ctypes.CDLL(None).creat(b"by_c", 0o644) > 0
os.chmod("mode", 0o400)
os.link("linked", "second_name")
Path("second_name").write_text("new")
os.chdir("outer")
os.open("../relative", os.O_TRUNC | os.O_RDONLY)
os.symlink("../behind_a_link", "to_it")
Path("to_it").write_text("new")
subprocess.run("echo more >> ../by_a_command; mv ../moved ../elsewhere/moved", shell=True)
if os.fork() == 0:
    Path("../forked").write_text("new")
    os._exit(0)
os.wait()
"""
CHANGED = (
    *("written", "appended", "inside", "truncated", "replaced", "removed", "folder/deep/file"),
    *("tree/a", "tree/b/c", "outer/old", "by_c", "mode", "linked", "relative"),
    *("behind_a_link", "by_a_command", "moved", "forked"),
)


def tree_of(folder):
    """Each path below a folder: its mode, and its content, or the target of a link."""
    return {
        str(path): (
            path.lstat().st_mode,
            path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes(),
        )
        for path in folder.rglob("*")
    }


def run_put_back(folder, text, **options):
    """Run a text as a script in `folder`; whether it succeeds."""
    command = [sys.executable, "-c", text]
    with tempfile.TemporaryDirectory(prefix="instep-") as copies, put_back(Path(copies)) as start:
        return start(command, cwd=folder, **options).wait() == 0


def test_a_run_changes_no_file(tmp_path):
    for name in CHANGED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"old content of {name}")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "tree" / "b").chmod(0o711)
    os.utime(tmp_path / "replaced", (1, 1))
    (tmp_path / "other_name").hardlink_to(tmp_path / "written")
    before = tree_of(tmp_path)
    for _ in range(2):  # the second run begins with the same files
        assert run_put_back(tmp_path, CHANGES)
        assert tree_of(tmp_path) == before
    assert (tmp_path / "replaced").stat().st_mtime == 1
    assert (tmp_path / "other_name").samefile(tmp_path / "written")


def test_what_cannot_be_copied_is_not_changed(tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_copies, "copy", fail)
    (tmp_path / "last.pt").write_text("old")
    with pytest.raises(VerificationError, match=r"cannot keep a copy of .*last\.pt .*No space"):
        run_put_back(tmp_path, "open('last.pt', 'w')", stderr=subprocess.DEVNULL)
    assert (tmp_path / "last.pt").read_text() == "old"


def test_where_the_kernel_does_not_tell_of_changes_nothing_runs(tmp_path, capfd):
    assert not run_put_back(tmp_path, NESTED)
    told = capfd.readouterr().err
    assert "the kernel does not tell here which files the script changes (" in told
    assert "With --overwrite each run" in told
    assert not (tmp_path / "made").exists()


NESTED = """
from pathlib import Path
from instep.verify.files.restored import put_back
Path("copies").mkdir()
with put_back(Path("copies")) as start:  # the kernel has one such filter for a process only
    start(["touch", "made"])
"""


def test_on_another_machine_than_those_whose_calls_are_known_nothing_runs(tmp_path):
    """As programs for 32 bits see this one."""
    text = f"import ctypes; ctypes.CDLL(None).personality({PER_LINUX32}){NESTED}"
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    told = done.stderr.splitlines()[-1]
    assert re.search(r"changes \(\[Errno 38\] not on a machine of the kind (i686|armv8l)\)", told)
    assert not (tmp_path / "made").exists()


PER_LINUX32 = 8

RESUMES = """
import os
import re
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(torch.load("last.pt"), 3):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    torch.save(step + 1, "last.pt")
    torch.save(step + 1, "new.pt")
"""


@launch
def test_a_run_leaves_the_checkpoint_from_which_it_resumes(tmp_path, monkeypatch):
    script, records = tmp_path / "resumes.py", tmp_path / "records"
    script.write_text(RESUMES)
    records.mkdir()
    RunPlan().write(records)
    monkeypatch.chdir(tmp_path)
    torch.save(1, "last.pt")
    InstepRunStarter()(2, records, [str(script)], None)
    assert read_run(records, 2, 0.0).steps == 2
    assert torch.load("last.pt") == 1
    assert not Path("new.pt").exists()
