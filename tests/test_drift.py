"""Parameters, buffers and hyper-parameters that differ between ranks are named."""

import os
import re
import warnings
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, count

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import forked_jobs
import instep
from instep.distributed.communication.transport import get_transport
from instep.errors import DriftError, InstepWarning, NonFiniteGradError
from instep.process.patching import Patch, PatchHandle
from instep.training.batches import loop_ends, progress
from instep.training.drift import ddp, non_finite
from instep.training.drift.bit_sums import bit_sums, combine, is_comparable
from instep.training.drift.comparison import is_compared_step
from instep.training.drift.rank0_values import take_rank0_values
from pool import ranks, run, talking_over
from sharded_training import sharding

pytestmark = pytest.mark.slow


@contextmanager
def variable(name, value):
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Training:
    """A few steps of a small model; `step` is the number of the step that runs."""

    def __init__(self, *, every="100", lr=0.1, optimizer=torch.optim.SGD, **options):
        with variable("INSTEP_DRIFT_STEPS", every):
            torch.manual_seed(0)
            layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
            self.model = instep.replicate(nn.Sequential(*layers), **options)
        self.optimizer = optimizer(self.model.parameters(), lr)
        self.batch = torch.randn(12, 4), torch.randint(0, 3, (12,))
        self.step = 0

    def run(self, steps):
        for _ in range(steps):
            self.step += 1
            x, y = instep.shard(self.batch)
            self.optimizer.zero_grad()
            cross_entropy(self.model(x), y).backward()
            self.optimizer.step()


# ---------------------------------------------------------------------------------- pure


def test_the_ranks_compare_often_at_first_and_then_every_so_many_steps():
    assert [s for s in range(1, 402) if is_compared_step(s, 100)] == [
        *(2, 4, 8, 16, 32, 64),
        *(100, 200, 300, 400),
    ]
    assert [s for s in range(1, 6) if is_compared_step(s, 1)] == [1, 2, 3, 4, 5]
    assert not any(is_compared_step(s, 0) for s in range(1000))


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
        *(torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex128),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (64, 3)])
def test_a_checksum_sees_every_change_of_one_element(dtype, shape):
    ones = torch.ones(shape).to(dtype)
    before = bit_sums([ones]).tolist()
    flat = ones.view(-1)
    for k in range(len(flat)):
        flat[k] = 0
        assert bit_sums([ones]).tolist() != before
        flat[k] = 1
    assert bit_sums([ones]).tolist() == before


def test_a_checksum_depends_on_the_values_and_not_on_where_they_lie():
    base = torch.randn(6, 5)
    shifted = torch.cat([torch.zeros(1), base.flatten()])[1:].view(6, 5)
    assert shifted.storage_offset() == 1
    same = bit_sums([base.t(), base.t().contiguous()])
    assert same[0] == same[1]
    assert combine(bit_sums([base, -base])) != combine(bit_sums([-base, base]))
    assert combine(bit_sums([])) == 0


def test_tensors_without_bits_of_their_own_are_not_compared():
    assert is_comparable(nn.Parameter(torch.ones(2)))
    assert not is_comparable(torch.ones(2, device="meta"))
    assert not is_comparable(torch.eye(2).to_sparse())


# ------------------------------------------------------------------------- explicit door


def change_a_parameter(at, *, on=1, by=0.5, every="100"):
    training = Training(every=every)
    training.run(at)
    if instep.world.rank == on:
        with torch.no_grad():
            training.model[3].weight[0, 0] += by
    with pytest.raises(DriftError) as caught:
        training.run(400)
    return str(caught.value), training.step


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_parameter_that_one_rank_has_changed_is_named(backend):
    with talking_over(backend):
        answers = run(3, change_a_parameter, 70)
    message, step = answers[0]
    assert answers == [(message, step)] * 3
    assert step == 100
    assert message.startswith(
        "parameter 3.weight of rank 1 differs from that of ranks 0, 2 since a step between 64 and "
        "100, by up to 0."
    )


def test_the_step_is_named_if_the_ranks_compare_in_every_one():
    message, step = run(2, change_a_parameter, 4, every="1")[0]
    assert step == 5
    assert "of rank 1 differs from that of rank 0 since a step between 4 and 5, by" in message
    assert "by up to 0.5. Something" in message


def learning_rates():
    training = Training(lr=0.1 * (1 + (instep.world.rank == 2)))
    with pytest.raises(DriftError) as caught:
        training.run(3)
    return str(caught.value), training.step


def test_learning_rates_that_differ_are_named_rather_than_what_they_lead_to():
    message, step = run(3, learning_rates)[0]
    assert step == 2
    assert message == (
        "lr of SGD for 0.weight is not the same on all ranks (ranks 0, 1: 0.1; rank 2: 0.2), since "
        "a step between 1 and 2. Set it to one value, whatever the rank and its data are."
    )


def with_a_criterion(how):
    training = Training()
    criterion = nn.Linear(3, 3 + (how == "own" and instep.rank))
    if how == "replicated":
        instep.replicate(criterion)
    training.optimizer.add_param_group({"params": criterion.parameters()})
    for _ in range(8):
        x, y = instep.shard(training.batch)
        training.optimizer.zero_grad()
        cross_entropy(criterion(training.model(x)), y).backward()
        if how == "summed":
            for parameter in criterion.parameters():
                parameter.grad = instep.all_reduce(parameter.grad, "mean")
        training.optimizer.step()


@pytest.mark.parametrize("how", ["alone", "replicated", "summed", "own"])
def test_a_trained_parameter_in_no_replica_is_named_where_it_differs(how):
    if how != "alone":
        run(2, with_a_criterion, how)
        return
    with pytest.raises(
        AssertionError, match=r"DriftError: parameter 6 of SGD \(which is in no rep"
    ):
        run(2, with_a_criterion, how)


def through_a_replica(how):
    with variable("INSTEP_DRIFT_STEPS", "100"):
        model = instep.replicate(nn.Linear(4, 3)).requires_grad_(how == "beside")
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    prompt = nn.Parameter(torch.zeros(len(x) // 2 if how == "rows" else 1, 4))
    trained = [[prompt], model.parameters()] if how == "beside" else [[prompt]]
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in trained]
    if instep.rank == 0:  # a probe of this rank's changes nothing
        probe = nn.Linear(2, 1)
        probing = torch.optim.SGD(probe.parameters(), lr=0.1)
    for _ in range(8):
        mine, target = instep.shard((x.clone(), y.clone()))
        for optimizer in optimizers:
            optimizer.zero_grad()
        cross_entropy(model(mine + prompt), target).backward()
        if how == "summed":
            prompt.grad = instep.all_reduce(prompt.grad)
        for optimizer in optimizers:
            optimizer.step()
        if instep.rank == 0:
            probe(torch.ones(1, 2)).sum().backward()
            probing.step()


@pytest.mark.parametrize("how", ["alone", "beside", "summed", "rows"])
def test_what_is_trained_through_a_replica_is_compared(how):
    if how in ("summed", "rows"):
        run(2, through_a_replica, how)
        return
    with pytest.raises(AssertionError, match=r"parameter 0 of SGD \(which is in no replica"):
        run(2, through_a_replica, how)


@ranks(2)
def test_an_optimizer_that_is_gone_does_not_count():
    training = Training(lr=0.1 * (1 + instep.world.rank))
    training.run(1)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    training.optimizer = torch.optim.AdamW(training.model.parameters(), 0.01)
    training.run(3)
    training.optimizer.param_groups[0]["betas"] = (0.9, 0.99 + 0.001 * instep.world.rank)
    with pytest.raises(DriftError, match=r"betas of AdamW for 0.weight .*rank 0: \(0.9, 0.99\)"):
        training.run(5)


@ranks(2)
def test_nor_do_optimizers_of_models_that_are_gone():
    kept = []
    for fold in range(3):
        training = Training(lr=0.1 * (fold + 1))
        training.run(2)
        if fold == instep.world.rank:  # a rank has those of another fold than the other rank
            kept.append(training.optimizer)
        del training.model
    kept.clear()


@ranks(3)
def test_a_model_in_ddp_is_compared_at_the_beginning_of_a_forward():
    torch.manual_seed(0)
    patch = Patch(DistributedDataParallel, "__init__", ddp.follow)
    with variable("INSTEP_DRIFT_STEPS", "4"), PatchHandle([patch]):
        model = DistributedDataParallel(nn.Linear(4, 2))
    for step in range(4):
        model(torch.ones(2, 4)).sum().backward()
        if step == 2 and instep.rank == 1:
            model.module.bias.data += 1
    with torch.no_grad():  # not a step, and not compared
        model(torch.ones(2, 4))
    with pytest.raises(DriftError, match=r"parameter bias of rank 1 .*between 2 and 4, by up to 1"):
        model(torch.ones(2, 4))


@ranks(3)
def test_a_step_that_one_rank_leaves_out_of_a_loop_with_ddp_is_named():
    patch = Patch(DistributedDataParallel, "__init__", ddp.follow)
    with variable("INSTEP_DRIFT_STEPS", "4"), PatchHandle([patch]):
        model = DistributedDataParallel(nn.Linear(4, 2))
    data = torch.utils.data.TensorDataset(torch.randn(60, 4))
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, 2, sampler=sampler)
    for k, (x,) in enumerate(loader):
        if k == 3 and instep.rank == 0:
            next(iter(loader))  # to show it
        if k < 6:
            model(x).sum().backward()
    with pytest.raises(DriftError, match=r"ranks 0, 2: \d+; rank 1: \d+.*between 4 and 8"):
        each(model, loader, step=2)


def from_a_loader(data):
    return instep.shard(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 6))


def by_hand(data):
    return ([instep.shard(batch)] for batch in data.split(6))


def each(model, batches, step):
    for k, (x,) in enumerate(batches):
        if instep.rank != 1 or k != step:
            model(x).mean().backward()


def accumulated(model, batches, step):
    for k, (x,) in enumerate(batches):
        with instep.no_sync() if k % 2 == 0 else nullcontext():
            if instep.rank != 1 or k != step:
                model(x).sum().backward()


def with_a_hook(model, batches, step):
    model.weight.register_hook(torch.clone)
    each(model, batches, step)


def caught(model, batches, step):
    def refuse(module, args):
        if instep.rank == 1 and next(calls) == step:
            raise FloatingPointError

    calls = count()
    model.register_forward_pre_hook(refuse)
    for (x,) in batches:
        with suppress(FloatingPointError):
            model(x).sum().backward()


def twice(model, batches, step):
    for k, (x,) in enumerate(batches):
        for _ in range(2 if k == step and instep.rank == 1 else 1):
            model(x).mean().backward()


@ranks(3)
@pytest.mark.parametrize("batches", [from_a_loader, by_hand])
@pytest.mark.parametrize(
    ("train", "step"), [(each, 0), (each, 3), (accumulated, 2), (with_a_hook, 3), (caught, 3)]
)
def test_a_batch_that_one_rank_leaves_out_is_found_in_the_next_sum(batches, train, step):
    with variable("INSTEP_DRIFT_STEPS", "0"):
        model = instep.replicate(nn.Linear(4, 2))
    found = r"different numbers \(ranks 0, 2: 0; rank 1: 1\)"
    advice = r'such as instep.all_reduce\(loss.detach\(\), "mean"\)'  # a sum grows with the ranks
    with pytest.raises(DriftError, match=rf"{found}.* {advice}"):
        train(model, batches(torch.randn(60, 4)), step)


@ranks(3)
@pytest.mark.parametrize("batches", [from_a_loader, by_hand])
def test_a_backward_that_one_rank_alone_calls_is_found_in_the_next_sum(batches):
    with variable("INSTEP_DRIFT_STEPS", "0"):
        model = instep.replicate(nn.Linear(4, 2))
    found = r"\(the number of the batch of this backward on ranks 0, 2: 3; rank 1: 2\)"
    with pytest.raises(DriftError, match=rf"{found}: .* called backward more often"):
        twice(model, batches(torch.randn(60, 4)), 1)


@ranks(2)
def test_the_last_batch_of_an_epoch_that_one_rank_leaves_out_is_found_in_the_next_epoch():
    model = instep.replicate(nn.Linear(4, 2))
    loader = from_a_loader(torch.randn(60, 4))
    two_epochs = chain(loader, loader)
    with pytest.raises(DriftError, match=r"different epochs of a loader .rank 0: 1; rank 1: 2"):
        each(model, two_epochs, step=9)


@ranks(2)
def test_batches_that_all_ranks_leave_out_or_use_twice_are_no_error():
    model, torn = instep.replicate(nn.Linear(4, 2)), torch.randn(15, 4)
    for loader in (from_a_loader(torch.randn(60, 4)), from_a_loader(torn), by_hand(torn)):
        for k, (x,) in enumerate(loader):
            for _ in range(k % 3):
                model(x).mean().backward()
        if instep.rank == 0:  # an evaluation of one rank
            with torch.no_grad():
                model(next(iter([x]))).sum()
    model(x).mean().backward()
    assert progress.current.counts()[1] == 6


@ranks(2)
def test_steps_with_gradients_that_are_not_summed_are_compared():
    with variable("INSTEP_DRIFT_STEPS", "100"):
        model = instep.replicate(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches):
        for x in batches:
            loss = model(x).square().sum()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad
            optimizer.step()

    same = [torch.ones(2, 4)] * 5
    train(same)
    with pytest.raises(DriftError, match=r"parameter weight of rank . differs .*between 4 and 8"):
        train([torch.ones(2, 4) + instep.rank, *same])


@ranks(2)
def test_an_optimizer_of_one_rank_alone_changes_nothing_for_the_others():
    training = Training(every="4")
    training.run(1)
    if instep.rank == 0:
        probe = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
        for _ in range(3):
            probe(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    training.run(8)


@ranks(2)
def test_differences_of_rounding_are_a_warning_and_only_one():
    training = Training(every="1")
    training.run(2)
    if instep.world.rank == 1:
        with torch.no_grad():
            for layer in training.model[0], training.model[3]:
                layer.weight.mul_(1 + 1e-6)
    text = r"0.weight (of Sequential )?of rank 1 .* more .*no more than rounding.*goes on"
    with pytest.warns(InstepWarning, match=text) as said:
        training.run(2)
    assert [each.filename for each in said] == [__file__]


@ranks(3)
def test_what_ranks_have_computed_by_themselves_becomes_that_of_rank_0():
    training = Training(optimizer=torch.optim.Adam)
    training.run(2)
    model, state = training.model, training.optimizer.state[training.model[3].weight]
    with torch.no_grad():
        for tensor in (model[0].weight, model[1].running_mean, state["exp_avg"]):
            tensor += instep.rank
    take_rank0_values(get_transport())
    training.run(2)
    assert {*instep.all_gather_object(state["exp_avg"].sum().item())} == {
        state["exp_avg"].sum().item()
    }
    if instep.rank == 1:
        state["more"] = torch.ones(2)
    with torch.no_grad():
        model[0].weight += instep.rank
    take_rank0_values(get_transport())
    with pytest.raises(DriftError, match=r"parameter 0\.weight of ranks 1, 2 differ"):
        training.run(4)


@ranks(2)
def test_a_buffer_of_a_replica_is_a_warning():
    training = Training(every="1")
    training.model.register_buffer("seen", torch.zeros(2))
    training.model.seen.add_(instep.world.rank)
    with pytest.warns(InstepWarning, match="buffer seen of rank 1 differs"):
        training.run(1)
    training.run(2)


@ranks(2)
def test_a_model_that_was_dropped_in_accumulation_may_live_longer_on_a_rank():
    with variable("INSTEP_DRIFT_STEPS", "1"):
        dropped, following = (instep.replicate(nn.Linear(3, 1)) for _ in range(2))
    with instep.no_sync():
        dropped(torch.ones(2, 3)).mean().backward()
    kept = [dropped] * instep.world.rank
    del dropped
    for _ in range(2):
        following(torch.ones(2, 3)).mean().backward()
    assert len(kept) == instep.world.rank


@ranks(3)
def test_training_without_a_fault_compares_in_silence():
    for options in ({}, {"batch_statistics": "rank"}, {"compression": "bf16"}):
        Training(every="1", optimizer=torch.optim.AdamW, lr=0.01, **options).run(12)


@ranks(2)
def test_models_of_several_types_and_orders_in_memory_compare_equal():
    with variable("INSTEP_DRIFT_STEPS", "1"):
        model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Flatten(), nn.Linear(80, 3))
        model = instep.replicate(model.to(memory_format=torch.channels_last).double())
    model.register_buffer("spectrum", torch.zeros(3, dtype=torch.complex64))
    model.register_buffer("positions", torch.arange(7))
    model.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())
    for _ in range(3):
        model(instep.shard(torch.randn(4, 3, 4, 4).double())).mean().backward()


@ranks(2)
def test_gradients_that_are_accumulated_count_as_one_step():
    training = Training(every="2")
    training.optimizer.param_groups[0]["lr"] = 0.1 * (1 + instep.world.rank)
    for _ in range(3):
        with instep.no_sync():
            x, y = instep.shard(training.batch)
            cross_entropy(training.model(x), y).backward()
    training.run(1)
    with pytest.raises(DriftError):
        training.run(1)


# -------------------------------------------------------------- gradients that are not finite


def spoiled(rank, where, *, mode="warn"):
    """Three steps; in the second one, something of `rank` is not finite. Returns what it said."""
    non_finite.reset()
    training = Training(batch_statistics="rank")
    said = []
    with variable("INSTEP_NAN", mode), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in (1, 2, 3):
            spoils = step == 2 and instep.world.rank == rank
            x, y = instep.shard(training.batch)
            training.optimizer.zero_grad()
            if spoils and where == "sample":
                x = x.clone()
                x[0, 1] = float("nan")
            out = training.model(x)
            if spoils and where == "gradient":
                out.register_hook(lambda grad: grad * float("inf"))
            cross_entropy(out, y).backward()
            if where == "skipped" and step == 2:
                training.model[3].weight.grad.fill_(float("nan"))
                training.optimizer.zero_grad()
            try:
                training.optimizer.step()
            except NonFiniteGradError as error:
                said.append(f"error: {error}")
                break
            if mode == "error" and step == 2:
                break
    return said + [str(warning.message) for warning in seen]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("where", ["sample", "gradient"])
def test_a_gradient_that_is_not_finite_names_rank_parameter_and_samples(backend, where):
    with talking_over(backend):
        first, said, silent = run(3, spoiled, 1, where)
    assert silent == []
    assert [text[:33] for text in first] == ["the parameter 3.bias itself is no"]  # in step 3
    assert len(said) == 1
    assert said[0].startswith("on rank 1 the gradient of 3.bias and those of 5 more parameters are")
    assert "from samples 4 to 7 of the batch of 12, in step 2; the optimizer steps" in said[0]
    assert said[0].endswith("Training goes on. [INS702]")


def test_it_can_be_an_error():
    answers = run(2, spoiled, 0, "sample", mode="error")
    assert answers[0][0].startswith("error: on rank 0 the gradient of 3.bias and those of 5 more")
    assert answers[1] == []


def test_it_can_be_ignored():
    assert run(2, spoiled, 0, "sample", mode="off") == [[], []]


def test_gradients_with_which_no_optimizer_steps_are_no_warning():
    assert run(2, spoiled, 0, "skipped") == [[], []]


@ranks(2)
def test_a_loss_scaler_that_skips_the_step_is_no_warning():
    non_finite.reset()
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            x, y = instep.shard(training.batch)
            training.optimizer.zero_grad()
            scaler.scale(cross_entropy(training.model(x), y) * 1e6).backward()
            scaler.step(training.optimizer)
            scaler.update()
    assert scaler.get_scale() < 2.0**126
    assert all(p.isfinite().all() for p in training.model.parameters())


@ranks(2)
def test_a_parameter_that_is_not_finite_already_is_named():
    non_finite.reset()
    training = Training()
    with torch.no_grad():
        training.model[3].bias[1] = float("inf")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        training.run(1)
    said = [str(warning.message)[:59] for warning in seen]
    expected = "the parameter 3.bias itself is not finite, in step 1; an ea"
    assert said == [expected] * (instep.world.rank == 0)


# ------------------------------------------------------------------------- unedited scripts


def unedited(fault, every="1"):
    """What `instep run` makes of a script; `fault(model, optimizer, step)` runs in each step."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    x, y = torch.randn(12, 4), torch.randint(0, 3, (12,))
    with variable("INSTEP_DRIFT_STEPS", every), sharding():
        for step in range(1, 11):
            fault(model, optimizer, step)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


def no_fault(model, optimizer, step):
    return None


def another_bias(model, optimizer, step):
    if step == 5 and instep.world.rank == 0:
        model[0].bias.data[2] -= 1


def another_buffer(model, optimizer, step):
    if step == 5:
        model[1].running_mean[2] -= float(instep.world.rank == 1)


def another_rate(model, optimizer, step):
    if step == 5:
        optimizer.param_groups[0]["lr"] = 0.01 + 0.001 * (instep.world.rank == 1)


def named_by(fault):
    with pytest.raises(DriftError) as caught:
        unedited(fault)
    return str(caught.value)


@ranks(3)
def test_an_unedited_script_without_a_fault_compares_in_silence():
    unedited(no_fault)
    unedited(no_fault, every="0")


@pytest.mark.parametrize(
    ("fault", "start"),
    [
        (another_bias, "parameter 0.bias of rank 0 differs from that of ranks 1, 2 since a step"),
        (another_buffer, "buffer 1.running_mean of rank 1 differs from that of ranks 0, 2 since"),
        (another_rate, "lr of AdamW for 0.weight is not the same on all ranks (ranks 0, 2: 0.01;"),
    ],
)
def test_what_differs_in_an_unedited_script_is_named(fault, start):
    messages = run(3, named_by, fault)
    assert len({*messages}) == 1
    assert messages[0].startswith(start)
    assert "since a step between 4 and 5" in messages[0]


class Centred(nn.Module):
    """Moves a parameter by the mean of its rows, if that is large."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        mean = nn.functional.adaptive_avg_pool1d(
            x.reshape(1, -1), 1
        ).squeeze()  # which torch reduces itself
        self.layer.bias.data -= (mean - 1e9).clamp(min=0)  # larger than in a trial
        return self.layer(x)


def notes_on_centred():
    model = Centred()
    x, y = torch.randn(12, 4), torch.randint(0, 3, (12,))
    with variable("INSTEP_DRIFT_STEPS", "1"), sharding():
        try:
            for step in range(1, 20):
                far = 1e10 * x.abs() if step == 7 else x
                cross_entropy(model(far), y).backward()
        except DriftError as error:
            return error.__notes__
    return []


@ranks(2)
def test_a_forward_that_changes_parameters_by_data_is_named():
    (note,) = notes_on_centred()
    assert note.startswith("instep: Centred names `.data`. If its forward changes a parameter so,")


SCRIPT = """\
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    x = torch.randn(12, 4)
    if step == 3:
        x[6, 1] = float("inf")
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), torch.randint(0, 2, (12,))).backward()
    optimizer.step()
"""


@pytest.mark.launch
@pytest.mark.parametrize(
    ("mode", "status"), [pytest.param("warn", 0, marks=pytest.mark.nightly), ("error", 1)]
)
def test_in_an_unedited_script_the_rank_is_named_too(tmp_path, mode, status):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    variables = {"INSTEP_NAN": mode, "INSTEP_DIVIDE": "always", "CUDA_VISIBLE_DEVICES": ""}
    job = forked_jobs.run("run", "-n", "2", script, env={**os.environ, **variables})
    assert job.returncode == status, job.stderr
    assert (
        "on rank 1 the gradient of 2.bias and those of 3 more parameters are not finite, from "
        "samples 6 to 11 of the batch of 12, in step 4"
    ) in job.stderr
    if mode == "error":
        assert 'train.py", line 11' in job.stderr


WHOLE_SCRIPT = """\
import torch
from torch import nn
class Flip(nn.Module):  # mixes the rows of a batch, so that it is computed whole
    def forward(self, x):
        return x + x.flip(0)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), Flip(), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(6):
    x = torch.randn(12, 4)
    if step == 3:
        x[6, 1] = float("inf")
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), torch.randint(0, 2, (12,))).backward()
    optimizer.step()
"""


@pytest.mark.launch
@pytest.mark.parametrize(
    ("size", "mode", "status"),
    [(1, "warn", 0), pytest.param(2, "warn", 0, marks=pytest.mark.nightly), (2, "error", 1)],
)
def test_calls_that_are_computed_whole_are_checked_too(tmp_path, size, mode, status):
    script = tmp_path / "train.py"
    script.write_text(WHOLE_SCRIPT)
    environ = {**os.environ, "INSTEP_NAN": mode, "CUDA_VISIBLE_DEVICES": ""}
    job = forked_jobs.run("run", "-n", str(size), script, env=environ)
    assert job.returncode == status, job.stderr
    said = "the gradient of 3.bias and those of 3 more parameters are not finite, in step 4; the"
    assert job.stderr.count(said) == 1
    if mode == "error":
        assert 'train.py", line 15' in job.stderr
    else:
        assert f"instep: {said}" in job.stderr
        assert f"Training goes on at {script}:15. [INS702]" in job.stderr


TWO_LINES = """\
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import instep

mode = sys.argv[1]
torch.manual_seed(0)
data = TensorDataset(torch.randn(23, 4), torch.randn(23, 1))
loader = instep.shard(DataLoader(data, batch_size=8))
tested = instep.shard(DataLoader(data, batch_size=8))
model, own = nn.Linear(4, 1), nn.Linear(4, 1)
if "not replicated" not in mode:
    model = instep.replicate(model)

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if model is own:
            for p in model.parameters():
                p.grad = instep.all_reduce(p.grad)
        optimizer.step()  # here

for epoch in range(2):
    train(model)
    if (instep.rank == 0 and f"evaluated alone {epoch}" in mode) or mode == "legal":
        with torch.no_grad():
            for x, y in tested:  # there
                model(x)
if mode == "legal":
    train(own)
    if instep.rank == 0:
        train_alone = nn.Linear(4, 1)
        torch.optim.SGD(train_alone.parameters(), 0.1).step()
        next(iter(tested))
    with instep.single_process_scope() as here:
        if here:
            train(nn.Linear(4, 1))
"""


@pytest.mark.launch
@pytest.mark.parametrize(
    ("mode", "codes"),
    [
        ("not replicated, evaluated alone 0", {"INS718": "here", "INS719": "there"}),
        pytest.param("evaluated alone 1", {"INS719": "there"}, marks=pytest.mark.nightly),
        ("legal", {}),
    ],
)
def test_what_a_rank_does_with_its_own_rows_only_is_named(tmp_path, mode, codes):
    script = tmp_path / "train.py"
    script.write_text(TWO_LINES)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    job = forked_jobs.run("run", "-n", "2", script, mode, env=environ)
    assert job.returncode == 0, job.stderr
    lines = TWO_LINES.splitlines()
    found = dict(re.findall(r"train\.py:(\d+): InstepWarning: .*\[(INS\d+)\]", job.stderr))
    shown = {code: int(line) for line, code in found.items()}
    expected = {
        code: next(n for n, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))
        for code, mark in codes.items()
    }
    assert shown == expected, job.stderr


@ranks(2)
def test_loaders_of_a_world_that_has_failed_are_not_counted_in_the_next():
    if instep.rank == 0:
        loop_ends.number_loader()
    loop_ends.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            loop_ends.note_end(loop_ends.number_loader())
            instep.barrier()
