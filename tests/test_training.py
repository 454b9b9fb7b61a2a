"""Training with the two lines has the numbers of one process."""

import copy
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import instep
from instep.errors import (
    DisagreementError,
    InstepWarning,
    MixedBatchesError,
    ReplicatedTwiceError,
    TrainingError,
    WrongDeviceError,
)
from instep.training import replicas
from instep.training.normalization import batch_statistics
from oracle import compare, same_as_one_process
from pool import RankError, device, ranks, run

pytestmark = pytest.mark.slow


def images(n, classes=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, 6, 6, generator=generator, dtype=dtype)
    y = torch.randint(0, classes, (n,), generator=generator)
    return TensorDataset(x, y)


def small_cnn(dtype=torch.float32):
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 16, 5),
    ).to(dtype)


def classify(log, n=43, batch_size=10, dtype=torch.float32, epochs=3, **loader):
    model = instep.replicate(small_cnn(dtype).to(device()))
    log.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    data = instep.shard(DataLoader(images(n, dtype=dtype), batch_size, **loader))
    for _ in range(epochs):
        for x, y in log.batches(data):
            optimizer.zero_grad()
            loss = cross_entropy(model(x.to(device())), y.to(device()))
            loss.backward()
            log.loss(loss, len(x))
            log.step(optimizer, model)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.nightly), torch.float64], ids=str
)
def test_ragged_batches_and_batch_normalisation_are_those_of_one_process(dtype):
    same_as_one_process(classify, 43, 10, dtype, sizes=(2, 3, 4), dtype=dtype)


def test_batches_smaller_than_the_world_leave_ranks_with_ghosts():
    same_as_one_process(classify, 20, 3, torch.float64, sizes=(4,), dtype=torch.float64)


def classify_shuffled(log):
    classify(log, shuffle=True, drop_last=True, num_workers=2, persistent_workers=True)


def test_shuffled_loaders_with_workers_have_the_order_of_one_process():
    same_as_one_process(classify_shuffled, sizes=(2,))


def penalised(log):
    model = instep.replicate(small_cnn())
    log.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x, y in log.batches(instep.shard(DataLoader(images(23), 10))):
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        loss = cross_entropy(model(x), y) + 0.01 * penalty
        loss.backward()
        log.step(optimizer, model)


def test_a_penalty_on_the_parameters_counts_once():
    same_as_one_process(penalised)


def accumulating(log, synchronise):
    model = instep.replicate(small_cnn())
    log.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    data = instep.shard(DataLoader(images(37), 6))
    for k, (x, y) in enumerate(log.batches(data)):
        last = k % 3 == 2 or k == len(data) - 1
        if synchronise or last:
            (cross_entropy(model(x), y) / 3).backward()
        else:
            with instep.no_sync():
                (cross_entropy(model(x), y) / 3).backward()
        if last:
            log.step(optimizer, model)
            optimizer.zero_grad(set_to_none=k % 2 == 0)


@pytest.mark.parametrize("synchronise", [True, False], ids=["every time", "no_sync"])
def test_accumulation_over_ragged_batches(synchronise):
    same_as_one_process(accumulating, synchronise)


def prefetching(log):
    model = instep.replicate(small_cnn())
    log.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(2):
        batches = iter(instep.shard(DataLoader(images(23), 10)))
        ahead = next(batches, None)
        while ahead is not None:
            x, y = ahead
            x, y = x * 1.0, y.clone()  # as a copy to a device: other tensors
            ahead = next(batches, None)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            log.step(optimizer, model)


def test_a_loop_that_fetches_one_batch_ahead_keeps_batch_and_weight_together():
    assert max(compare(prefetching, size=2).gradient, compare(prefetching, size=3).gradient) < 5e-6


def by_hand(log):
    model = instep.replicate(small_cnn())
    log.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    whole_x, whole_y = images(25).tensors
    for start in range(0, 25, 7):
        x, y = instep.shard((whole_x[start : start + 7], whole_y[start : start + 7]))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        log.step(optimizer, model)


def test_batches_made_by_hand():
    assert compare(by_hand, size=3).gradient < 5e-6


class Branches(nn.Module):
    """Uses one of two heads, never the third."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(108, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 5) for _ in range(3))
        self.heads[2].weight = self.heads[0].weight  # shared

    def forward(self, x, which):
        return self.heads[which](self.body(x.flatten(1)))


def branching(log):
    model = instep.replicate(Branches())
    log.begin(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=0.1)
    for k, (x, y) in enumerate(log.batches(instep.shard(DataLoader(images(40), 9)))):
        optimizer.zero_grad()
        cross_entropy(model(x, which=k % 2), y).backward()
        assert model.heads[2].bias.grad is None
        log.step(optimizer, model)


def test_unused_and_shared_parameters():
    assert compare(branching, size=3).gradient < 5e-6


def thawing(log):
    model = small_cnn()
    model[0].requires_grad_(False)
    model = instep.replicate(model)
    log.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for k, (x, y) in enumerate(log.batches(instep.shard(DataLoader(images(40), 9)))):
        model[0].requires_grad_(k >= 2)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        log.step(optimizer, model)


def test_frozen_parameters_may_thaw():
    assert compare(thawing, size=3).gradient < 5e-6


@ranks(1, 2)
def test_replicate_gives_the_module_itself_and_leaves_its_children_alone():
    model = small_cnn()
    children = [type(m) for m in model.modules()]
    keys = list(model.state_dict())
    alias = model[1]
    assert instep.replicate(model) is model
    assert [type(m) for m in model.modules()] == children
    assert list(model.state_dict()) == keys
    assert model[1] is alias


@ranks(2)
def test_copies_and_pickles_of_a_replica_are_ordinary_models():
    model = instep.replicate(small_cnn())
    x, y = images(4 + instep.rank).tensors
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        cross_entropy(twin(x), y).backward()  # no collective: the ranks' rows differ
        expected = small_cnn()
        expected.load_state_dict(model.state_dict())
        cross_entropy(expected(x), y).backward()
        assert torch.equal(twin[0].weight.grad, expected[0].weight.grad)


@ranks(2, 3)
def test_replicate_starts_from_rank_0():
    torch.manual_seed(instep.rank)
    model = small_cnn()
    model[1].running_mean.fill_(instep.rank)
    instep.replicate(model)
    torch.manual_seed(0)
    expected = small_cnn().state_dict()
    assert all(torch.equal(model.state_dict()[key], expected[key]) for key in expected)


@ranks(2)
def test_an_optimizer_that_exists_already_keeps_working():
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = instep.replicate(model)[0].weight.clone()
    x, y = instep.shard(images(8).tensors)
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert torch.equal(instep.broadcast(model[0].weight, 0), model[0].weight)


@ranks(2)
def test_gradients_asked_for_by_autograd_grad_are_the_ranks_own():
    model = instep.replicate(nn.Linear(3, 1, bias=False))
    x = torch.full((1, 3), float(instep.rank + 1))
    (gradient,) = torch.autograd.grad(model(x).sum(), model.weight)
    assert torch.equal(gradient, x)


@ranks(2)
def test_models_that_are_not_replicated_are_left_alone():
    instep.replicate(nn.Linear(3, 1))
    private = nn.Linear(3, 1, bias=False)
    x = torch.full((1, 3), float(instep.rank + 1))
    private(x).sum().backward()
    assert torch.equal(private.weight.grad, x)


@ranks(3)
def test_two_batches_of_different_weights_in_one_backward_are_an_error():
    model = instep.replicate(nn.Linear(2, 1))
    ten, seven = (instep.shard(torch.ones(n, 2)) for n in (10, 7))
    loss = model(ten).mean() + model(seven).mean()
    with pytest.raises(MixedBatchesError, match="Call backward\\(\\) once for each batch's loss"):
        loss.backward()


@ranks(2)
def test_two_batches_of_the_same_weights_in_one_backward_are_fine():
    model = instep.replicate(nn.Linear(2, 1, bias=False))
    four, eight = (instep.shard(torch.arange(2.0 * n).view(n, 2)) for n in (4, 8))
    (model(four).mean() + model(eight).mean()).backward()
    whole = torch.arange(8.0).view(4, 2).mean(0) + torch.arange(16.0).view(8, 2).mean(0)
    assert torch.allclose(model.weight.grad, whole)


@ranks(1, 3)
def test_a_checkpoint_around_a_replica_draws_the_same_again() -> None:
    model = instep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 2)))
    x = instep.shard(torch.ones(7, 6))
    y, gradients = -x, []
    for call in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        replicas._replica_of[model].steps = 0
        (call(x) * call(y)).mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    torch.testing.assert_close(*gradients)
    with pytest.raises(TrainingError, match="which of several cannot be told"):
        (call(x) * call(x)).mean().backward()


@ranks(3)
def test_masks_of_rows_that_each_rank_has_padded_for_itself_are_told_of() -> None:
    model = instep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 2)))
    two, many = instep.shard(torch.ones(2, 5, 6)), instep.shard(torch.ones(7, 5, 6))
    two = two[:, : 4 + min(instep.rank, 1)]  # rank 0 has no row of it
    for rows in (many, two, many):  # the 2nd, 4th, ... backward compares
        model(rows).sum((1, 2)).mean().backward()
    with pytest.warns(InstepWarning, match=r"of other shapes on other ranks.*INS701"):
        model(many[:, : 3 + instep.rank]).sum((1, 2)).mean().backward()


@ranks(2)
def test_a_weight_is_that_of_one_call_and_not_of_others_in_the_same_backward():
    model = instep.replicate(nn.Linear(2, 1, bias=False))
    x = instep.shard(torch.arange(8.0).view(4, 2))

    def loss(kept, *, state_both=False):
        regulariser = model(x * 2).mean()
        if state_both:
            instep.weight(kept)
        kept_rows = model(x)[:kept].mean()
        instep.weight(kept)
        return regulariser + kept_rows

    loss(2).backward()  # 2 of 4 rows on both ranks: as many as it has
    loss(1 + instep.rank, state_both=True).backward()
    with pytest.raises(MixedBatchesError, match=r"instep.weight was called for some of them only"):
        loss(1 + instep.rank).backward()
    model.zero_grad()
    regulariser, kept_rows = model(x * 2).mean(), model(x)[: 1 + instep.rank].mean()
    instep.weight(1 + instep.rank)
    regulariser.backward()
    kept_rows.backward()
    whole = torch.arange(8.0).view(4, 2)
    expected = 2 * whole.mean(0) + whole[[0, 2, 3]].mean(0)
    torch.testing.assert_close(model.weight.grad[0], expected)


@ranks(1, 2)
def test_replicating_twice_is_an_error_that_names_the_module():
    model = small_cnn()
    instep.replicate(model[1])
    with pytest.raises(ReplicatedTwiceError, match=r"1 \(BatchNorm2d\) is already replicated"):
        instep.replicate(model)


@ranks(2, 3)
def test_a_parameter_that_differs_in_shape_is_named_on_all_ranks():
    wide = 7 if instep.rank == 1 else 6
    with pytest.raises(DisagreementError) as caught:
        instep.replicate(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, wide)))
    assert "disagree about 1.weight" in str(caught.value)
    assert "1.weight (7, 6) torch.float32 on rank 1" in str(caught.value)


@ranks(2, 3)
def test_a_parameter_that_not_all_ranks_have_is_named_on_all_ranks():
    more = [nn.Linear(6, 6)] * (instep.rank == 1)
    with pytest.raises(DisagreementError, match=r"disagree about 1\.weight") as caught:
        instep.replicate(nn.Sequential(nn.Linear(4, 6), *more))
    assert "nothing nothing on rank" in str(caught.value)


@ranks(1)
def test_models_that_cannot_be_replicated_say_why():
    with pytest.raises(WrongDeviceError, match="on meta"):
        instep.replicate(nn.Linear(2, 2, device="meta"))
    with pytest.raises(TrainingError, match="weight has no shape yet; call the model once"):
        instep.replicate(nn.LazyLinear(2))
    with pytest.raises(TypeError, match=r"takes a model .* not list; loaders"):
        instep.replicate([nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="'global' or 'rank', not 'local'"):
        instep.replicate(nn.Linear(2, 2), batch_statistics="local")


@ranks(3)
def test_what_a_ghost_states_as_its_denominator_counts_for_nothing():
    model = instep.replicate(nn.Linear(2, 1, bias=False))
    mine = instep.shard(torch.tensor([[1.0, 2.0], [5.0, 6.0]]))
    for denominator, whole in ((float(len(mine)), [3.0, 4.0]), (None, [6.0, 8.0])):
        model.zero_grad()
        loss = model(mine).sum() if denominator is None else model(mine).mean()
        instep.weight(denominator)
        loss.backward()
        assert model.weight.grad.tolist() == [whole]


@ranks(2)
def test_backward_with_a_graph_is_refused():
    model = instep.replicate(nn.Linear(2, 1))
    with pytest.raises(TrainingError, match=r"that of inputs, take it by torch\.autograd\.grad"):
        model(torch.ones(1, 2)).sum().backward(create_graph=True)


def unaveraged(log):
    model = small_cnn()  # not replicated
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x, y in log.batches(instep.shard(DataLoader(images(23), 10))):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ranks 0, 1 step with different gradients")
            log.step(optimizer, model)


def test_the_oracle_sees_when_gradients_are_not_averaged():
    assert compare(unaveraged, size=2).gradient > 0.1


def fail_on_rank_1():
    assert instep.rank != 1, "on purpose"


def test_the_pool_reports_a_rank_that_fails_and_goes_on():
    with pytest.raises(RankError, match="on purpose"):
        run(2, fail_on_rank_1)
    assert run(2, instep.all_gather_object, 1) == [[1, 1], [1, 1]]


@ranks(2)
def test_a_hook_of_the_users_that_raises_before_an_inner_call_leaves_the_outer_call_alone():
    inner, data = nn.Linear(2, 2, bias=False), torch.arange(12.0).view(6, 2)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Linear(2, 1, bias=False)

        def forward(self, x):
            with pytest.raises(ValueError, match="of the user's"):
                inner(x)
            return self.scale(x)

    model = instep.replicate(Outer())
    instep.replicate(inner)

    def refuse(module, args):
        raise ValueError("of the user's")

    inner.register_forward_pre_hook(refuse, prepend=True)
    model(instep.shard(data)).mean().backward()
    torch.testing.assert_close(model.scale.weight.grad, data.mean(0, keepdim=True))
    with pytest.raises(ValueError, match="of the user's"):
        inner(data)


@ranks(2)
def test_a_copy_of_a_replica_that_trains_alone_is_told_of():
    model = instep.replicate(nn.Linear(3, 3))
    copied, x = copy.deepcopy(model), instep.shard(torch.randn(6, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            copied(x)
        copied.eval()(x)
        copied.train()(torch.randn(6, 3))  # the same on all ranks, for all that is known
    with pytest.warns(InstepWarning, match=r"a copy of a replicated Linear .* \[INS708\]"):
        copied(x)
    averaged = torch.optim.swa_utils.AveragedModel(instep.replicate(nn.BatchNorm1d(3)))
    rows = DataLoader(TensorDataset(torch.randn(6, 3)), 6)
    with pytest.warns(InstepWarning, match=r"its batch statistics stay this rank's .* \[INS708\]"):
        torch.optim.swa_utils.update_bn(instep.shard(rows), averaged)


@ranks(2)
def test_one_that_was_copied_before_is_named_by_its_statistics(monkeypatch):
    monkeypatch.setattr(batch_statistics._has_warned, "value", False)
    model = nn.Sequential(nn.BatchNorm1d(3))
    averaged, replica = copy.deepcopy(model), instep.replicate(model)
    rows = instep.shard(DataLoader(TensorDataset(torch.randn(6, 3)), 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for (x,) in rows:
            replica(x)
            averaged(x)
        torch.optim.swa_utils.update_bn(rows, replica)
        averaged.train()(torch.randn(6, 3))
    with pytest.warns(InstepWarning, match=r"a model that is no replica is called .* \[INS708\]"):
        torch.optim.swa_utils.update_bn(rows, averaged)


@ranks(2)
def test_its_statistics_of_one_row_are_an_error_that_says_so():
    averaged = torch.optim.swa_utils.AveragedModel(instep.replicate(nn.BatchNorm1d(3)))
    rows = instep.shard(DataLoader(TensorDataset(torch.randn(6, 3)), 2))
    told = pytest.raises(TrainingError, match="has one row of the batch")
    with warnings.catch_warnings(), told:
        warnings.simplefilter("ignore")
        torch.optim.swa_utils.update_bn(rows, averaged)


@ranks(2)
@pytest.mark.parametrize("tracks", [True, False])
def test_so_is_one_that_norms_by_a_batch_in_evaluation(tracks):
    replicas._copies.clear()
    norm = nn.BatchNorm1d(3, track_running_stats=tracks)
    copied = copy.deepcopy(instep.replicate(nn.Sequential(norm))).eval()
    text = r"a copy of a replicated Sequential is called with .* its batch statistics .* \[INS708\]"
    with nullcontext() if tracks else pytest.warns(InstepWarning, match=text), torch.no_grad():
        copied(instep.shard(torch.randn(6, 3)))


@ranks(2)
@pytest.mark.parametrize("is_view", [True, False])
def test_so_is_one_that_gets_other_tensors_than_the_loaders(is_view):
    replicas._copies.clear()
    copied = copy.deepcopy(instep.replicate(nn.Linear(3, 3)))
    loader = instep.shard(DataLoader(TensorDataset(torch.randn(6, 3)), 6))
    with pytest.warns(InstepWarning, match=r"its gradients stay this rank's own.* \[INS708\]"):
        _ = [copied(x.view(-1, 3) if is_view else x * 1.0) for (x,) in loader]


@ranks(2)
@pytest.mark.parametrize("kind", ["batch statistics", "dropout masks"])
def test_so_is_a_teacher_in_training_mode_that_sees_another_view_of_the_rows(kind):
    replicas._copies.clear()
    layer = nn.BatchNorm1d(3) if kind == "batch statistics" else nn.Dropout(0.5)
    teacher = copy.deepcopy(instep.replicate(nn.Sequential(nn.Linear(3, 3), layer)))
    for (x,) in instep.shard(DataLoader(TensorDataset(torch.randn(6, 3)), 6)):
        told = pytest.warns(InstepWarning, match=rf"its {kind} stay this rank's own.* \[INS708\]")
        with torch.no_grad(), told:
            teacher(x + 1.0)


@ranks(2)
def test_a_copy_inside_of_a_replica_is_none():
    averaged = instep.replicate(
        torch.optim.swa_utils.AveragedModel(instep.replicate(nn.BatchNorm1d(3)))
    )
    loader = instep.shard(DataLoader(TensorDataset(torch.randn(6, 3)), 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.swa_utils.update_bn(loader, averaged)


@ranks(1, 2)
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_gradients_of_each_sample_are_those_of_torch_func(p):
    model = instep.replicate(nn.Sequential(nn.Linear(3, 4), nn.Dropout(p), nn.Linear(4, 1)))
    x = instep.shard(torch.randn(5, 3, generator=torch.Generator().manual_seed(1)))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, (row[None],)).sum()

    warnings.simplefilter("ignore", InstepWarning)  # dropout under vmap is each rank's own
    of_each = torch.func.vmap(torch.func.grad(loss), (None, 0), randomness="different")
    (weight, *_), expected = of_each(parameters, x).values(), model[2].weight @ model[0].weight
    assert weight.shape == (len(x), 4, 3)
    if not p:
        torch.testing.assert_close(weight, model[2].weight.mT * x[:, None])
        summed = torch.func.vmap(torch.func.vjp(model, x)[1])(torch.ones(1, len(x), 1))[0]
        torch.testing.assert_close(summed[0], expected.expand(len(x), 3))
