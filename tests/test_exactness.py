"""The laws in every corner: failures that were found in peers, or in naive versions of ours."""

import math
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import instep
from instep.distributed.identity import torch_devices
from instep.errors import InstepWarning, TrainingError
from instep.training.draws import replica_draws
from instep.training.losses import divisors
from oracle import compare, play, same_as_one_process
from pool import device, ranks, run

pytestmark = pytest.mark.slow

float64 = torch.float64


def rows(n, width=6, classes=4, dtype=float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, width, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(0, classes, (n,), generator=generator))


def net(width=6, classes=4, norm=True, drop=0.0):
    layers = [nn.Linear(width, 12, bias=not norm)]
    layers += [nn.BatchNorm1d(12)] if norm else []
    layers += [nn.Tanh()] + ([nn.Dropout(drop)] if drop else [])
    return nn.Sequential(*layers, nn.Linear(12, classes)).to(float64)


def train(log, model, data, batch_loss, batch_size=7, epochs=2, optimizer=None, **loader):
    """The loop of most tests: one optimizer, one loss of a model and a batch."""
    model = instep.replicate(model.to(device()))
    log.begin(model)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    batches = instep.shard(DataLoader(data, batch_size, **loader))
    for _ in range(epochs):
        for batch in log.batches(batches):
            optimizer.zero_grad()
            batch_loss(model, *(part.to(device()) for part in batch)).backward()
            log.step(optimizer, model)


def exactly(training, *args, sizes=(3,), **kwargs):
    same_as_one_process(training, *args, sizes=sizes, dtype=float64, **kwargs)


# ------------------------------------------------------------------------------- weights


def class_weighted(log):
    weights = torch.tensor([0.1, 5.0, 1.0, 0.3], dtype=float64, device=device())

    def loss(model, x, y):
        result = cross_entropy(model(x), y, weight=weights)
        instep.weight(weights[y].sum())
        return result

    train(log, net(), rows(40), loss)


def ignoring(log):
    data = rows(40)
    data.tensors[1][5:25] = -1

    def loss(model, x, y):
        result = cross_entropy(model(x), y, ignore_index=-1)
        instep.weight((y != -1).sum())
        # Where a rank has nothing to count its mean is 0/0: a gradient of NaN times no weight.
        return torch.where(result.isnan(), model[0].weight.sum() * 0, result)

    train(log, net(), data, loss)


def ignoring_all_rows_of_a_rank(log):
    data = rows(40)
    data.tensors[1][5:25] = -1

    def loss(model, x, y):
        result = cross_entropy(model(x), y, ignore_index=-1)
        instep.weight((y != -1).sum())
        return result

    train(log, net(norm=False), data, loss)


def keeping_one_row(log):
    data = rows(40)
    data.tensors[1].clamp_(min=1)[3::7] = 0

    def loss(model, x, y):
        kept = (y == 0).to(x.dtype)
        result = (cross_entropy(model(x), y, reduction="none") * kept).sum() / kept.sum()
        instep.weight(kept.sum())
        return result

    train(log, net(), data, loss)


def keeping_nothing_of_a_batch(log):
    data = rows(40)
    data.tensors[1][14:21] = -1

    def loss(model, x, y):
        kept = y != -1
        total = cross_entropy(model(x), y, ignore_index=-1, reduction="sum")
        instep.weight(kept.sum())
        return total / kept.sum().clamp(min=1) + model[0].weight.square().sum() * 1e-2

    train(log, net(), data, loss)


def tokens(log):
    lengths = torch.arange(30, device=device()) % 5 + 1

    def loss(model, x, y):
        length = lengths[: len(y)] + y % 2
        kept = torch.arange(6, device=device())[None] < length[:, None]
        total = model(x.unsqueeze(1).expand(-1, 6, -1).reshape(-1, 6)).sum(1) * kept.flatten()
        instep.weight(kept.sum())
        return total.square().sum() / kept.sum()

    train(log, net(norm=False), rows(30), loss)


def summed(log):
    def loss(model, x, y):
        result = cross_entropy(model(x), y, reduction="sum") / 50
        instep.weight(None)
        return result

    train(log, net(), rows(40), loss)


@pytest.mark.parametrize(
    "training",
    [
        class_weighted,
        ignoring,
        ignoring_all_rows_of_a_rank,
        keeping_one_row,
        keeping_nothing_of_a_batch,
        summed,
    ],
    ids=lambda t: t.__name__,
)
def test_a_stated_weight_makes_other_denominators_exact(training):
    exactly(training)


def test_a_token_mean():
    assert compare(tokens, size=1).gradient == 0  # the loss sees rows by their place in the batch


CLASS_WEIGHTS = torch.tensor([0.1, 5.0, 1.0, 0.3], dtype=float64)
UNSTATED = {
    "class weights": lambda out, y: cross_entropy(out, y, weight=CLASS_WEIGHTS.to(out.device)),
    "kept": lambda out, y: out.square().mean() + out.sum(1)[y > 0].mean(),
    "sum": lambda out, y: cross_entropy(out, y, reduction="sum"),
    "fraction of a sum": lambda out, y: out.square().sum() / 50,
}


def unstated(log, name):
    train(log, net(), rows(40), lambda m, x, y: UNSTATED[name](m(x), y), epochs=1)


@ranks(1, 3)
@pytest.mark.parametrize("name", UNSTATED)
def test_a_loss_whose_divisor_is_not_stated_is_named(name):
    divisors._warned.clear()
    told = pytest.warns(InstepWarning, match="This line calls backward .*INS716")
    with told if instep.world_size > 1 else nullcontext() as warned:
        play(unstated, (name,))
    assert warned is None or warned[0].filename == __file__


def fraction_of_a_sum(log, part, count=61):
    train(log, net(), rows(count), lambda m, x, y: part(m(x), y), batch_size=9, epochs=1)


@ranks(3)
def test_a_sum_over_a_constant_is_named_at_the_first_uneven_batch():
    divisors._warned.clear()
    with pytest.warns(InstepWarning, match=r"instep.weight\(None\), if it is a sum.*INS716"):
        # The ranks have equal numbers of rows until step 7, the last.
        play(fraction_of_a_sum, (lambda out, y: out.square().sum() / 50,))


@ranks(3)
def test_a_sum_over_the_batch_size_is_named_where_all_batches_are_even():
    def summed(out, y):
        return cross_entropy(out, y, reduction="sum") / 9

    divisors._warned.clear()
    with pytest.warns(InstepWarning, match="a loss that is a sum over rows.*INS716"):
        play(fraction_of_a_sum, (summed, 27))  # named at the third, since none is added to it
    divisors._warned.clear()
    play(fraction_of_a_sum, (lambda out, y: out[:, :3].square().sum() / (3 * len(out)), 18))
    play(fraction_of_a_sum, (MEANS["accumulated"], 18))  # over as many batches as ranks


def accumulate_sums(zeros):
    model = instep.replicate(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = instep.shard(DataLoader(TensorDataset(torch.randn(36, 3)), 6))
    for k, (x,) in enumerate(loader):
        (model(x).square().sum() / (len(x) * 3)).backward()
        if k % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not zeros)


@ranks(3)
@pytest.mark.parametrize("zeros", [False, True])
def test_a_sum_over_the_rows_of_as_many_batches_as_ranks_is_none_over_the_batch_size(zeros):
    divisors._warned.clear()
    accumulate_sums(zeros)  # a warning is an error


def over_a_constant(model, x, y):
    return model(x).square().sum() / 50


def of_even_batches(log):
    train(log, net(), rows(12), over_a_constant, batch_size=9, epochs=2)


@ranks(3)
def test_a_sum_over_a_constant_is_named_at_a_batch_of_another_size():
    divisors._warned.clear()
    with pytest.warns(InstepWarning, match=r"instep.weight\(None\), if it is a sum.*INS716"):
        play(of_even_batches, ())


def in_batch(out, y):
    whole = torch.cat(instep.all_gather(out))
    return cross_entropy(whole @ whole.T, torch.arange(len(whole), device=out.device))


def balance(out, y):
    sums = instep.all_reduce(torch.cat([out.exp().sum(0), torch.ones_like(out[:, 0]).sum()[None]]))
    columns = sums[:-1] / sums[-1]
    return cross_entropy(out, y) + columns.square().sum() + columns.relu().mean()


MEANS = {
    "rows of all ranks": in_batch,
    "columns of all ranks": balance,
    "rows": lambda out, y: out.square().sum(1).mean() + cross_entropy(out, y) / 2,
    "each row": lambda out, y: (
        sum(cross_entropy(o[None], t[None]) for o, t in zip(out, y, strict=True)) / len(y)
    ),
    "accumulated": lambda out, y: cross_entropy(out, y, reduction="sum") / len(y) / 3,
    "sum of tasks": lambda out, y: (torch.stack(tasks(out, y)) * (out.square().mean() + 1)).sum(),
    "mean of tasks": lambda out, y: torch.stack(tasks(out, y)).exp().log().mean(),
}


def tasks(out, y):
    return cross_entropy(out, y), out.square().mean(), out.abs().mean()


def stated(log, name):
    train(log, net(), rows(40), lambda m, x, y: MEANS[name](m(x), y), epochs=1)


@ranks(3)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_rows_is_not_named(name):
    divisors._warned.clear()
    play(stated, (name,))  # a warning would be an error


def with_a_teacher(log):
    teacher, frozen = instep.replicate(net(norm=False)), instep.replicate(net(norm=False))
    frozen.requires_grad_(False)
    data = rows(40)
    data.tensors[1][5:25] = -1

    def loss(model, x, y):
        result = cross_entropy(model(x), y, ignore_index=-1)
        with torch.no_grad():
            teacher(x)
        frozen(x)
        instep.weight((y != -1).sum())
        return result

    train(log, net(norm=False), data, loss)


def captured(log):
    features = {}

    def loss(model, x, y):
        if not features:
            model[0].register_forward_hook(lambda layer, args, output: features.update(x=output))
        model(x)
        kept = (x[:, 0] > 0).sum()
        instep.weight(kept)
        return features["x"][x[:, 0] > 0].square().sum() / kept.clamp(min=1)

    train(log, net(norm=False), rows(40), loss)


def root_over_all_ranks(log):
    def loss(model, x, y):
        squares = instep.all_reduce((model(x)[:, 0] - y).square().sum())
        return torch.sqrt(squares / instep.all_reduce(torch.tensor(len(x), device=x.device)))

    train(log, net(norm=False), rows(40), loss)


def penalty_on_the_gradient_of_inputs(log):
    def loss(model, x, y):
        x = x.clone().requires_grad_()
        output = model(x)
        count = instep.all_reduce(torch.tensor(len(x), device=x.device))
        total = cross_entropy(output, y, reduction="sum") / count
        (gradient,) = torch.autograd.grad(total, x, create_graph=True)
        return cross_entropy(output, y) + 10 * gradient.square().sum(1).mean()

    train(log, net(norm=False), rows(40), loss)


@pytest.mark.parametrize(
    "training", [root_over_all_ranks, penalty_on_the_gradient_of_inputs], ids=lambda t: t.__name__
)
def test_what_the_docs_advise_for_losses_that_are_no_means_over_rows(training):
    """docs/ways.md."""
    exactly(training)


@pytest.mark.parametrize("training", [with_a_teacher, captured], ids=lambda t: t.__name__)
def test_a_stated_weight_is_that_of_the_last_forward_in_training(training):
    exactly(training)


def evaluated():
    model = instep.replicate(nn.Linear(6, 3))
    torch.manual_seed(3)
    loader = instep.shard(DataLoader(TensorDataset(torch.randn(14, 6)), 6))
    (x,) = next(iter(loader))
    model(x).sum().backward()
    with torch.no_grad():
        for (x,) in loader:  # the last batch has two rows: only some ranks have one
            model(x)
            instep.weight(len(x))
    return instep.all_reduce(torch.ones(1)).item()


def test_a_weight_that_is_stated_without_gradients_waits_for_no_rank():
    assert run(3, evaluated) == [3.0] * 3


@ranks(2)
def test_a_weight_before_any_forward_is_an_error():
    with pytest.raises(TrainingError, match="call the model first"):
        instep.weight(3)


@ranks(2)
def test_a_weight_that_is_stated_before_the_model_is_called_is_an_error():
    model = instep.replicate(nn.Linear(2, 1))
    for k in range(3):
        x = instep.shard(torch.ones(4, 2))
        early = pytest.raises(TrainingError, match="denominator of the forward before it")
        if k == 1:
            instep.weight(len(x))
        with early if k == 1 else nullcontext():
            loss = model(x).mean()
            if k == 2:
                loss.backward(retain_graph=True)
                instep.weight(len(x))  # of another backward through the same forward
            loss.backward()
    model(x)


# -------------------------------------------------------------------------------- shapes


def cat_real_fake(log):
    def loss(model, x, y):
        both = model(torch.cat([x, x.flip(1) * 2]))
        return cross_entropy(both, torch.cat([y, y]))

    train(log, net(), rows(23), loss)


def rows_of_sequences(log):
    def loss(model, x, y):
        out = model(torch.stack([x, x * 2, x + 1], 1).reshape(-1, 6))
        return cross_entropy(out, y.repeat_interleave(3))

    train(log, net(drop=0.3), rows(23), loss)


@pytest.mark.parametrize("training", [cat_real_fake, rows_of_sequences], ids=lambda t: t.__name__)
def test_inputs_with_several_rows_for_each_sample(training):
    exactly(training, nudge=training is rows_of_sequences)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(6, 8)
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        out, _ = self.cell(x)
        return self.head(self.drop(out)[-1])


def time_first(log):
    def loss(model, x, y):
        return cross_entropy(model(torch.stack([x, x * 2, x + 1, x - 1, -x])), y)

    train(log, Recurrent().to(float64), rows(23), loss)


def test_a_batch_on_the_second_dimension():
    exactly(time_first, nudge=True)


# ------------------------------------------------------------------------- empty blocks


def tiny(log, drop):
    def loss(model, x, y):
        return cross_entropy(model(x), y)

    train(log, net(drop=drop), rows(9), loss, batch_size=3)


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_batches_smaller_than_the_world(drop):
    exactly(tiny, drop, sizes=(4,), nudge=drop > 0)


def exploding(log):
    """On a rank with a ghost everything is NaN, and looked for."""

    def loss(model, x, y):
        result = cross_entropy(model(x), y)
        ghost = log_ghost(x)
        return result * float("nan") if ghost else result

    with torch.autograd.set_detect_anomaly(True):
        train(log, net(), rows(9), loss, batch_size=3)


def log_ghost(x):
    from instep.training.batches.registry import find_block

    block = find_block(x)
    return block is not None and block.is_empty


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_a_ghost_computes_leaves_no_trace():
    exactly(exploding, sizes=(4,))


class RefusesGhosts(Dataset):
    """Fails when rank 0 asks for samples that are rank 1's."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index in (4, 5) and instep.rank == 0:
            raise ValueError("a ghost's error")
        return index


@ranks(2)
def test_a_ghosts_own_error_is_swallowed():
    batches = [[0, 1, 2, 3], [4], [5], [6, 7]]
    loader = instep.shard(DataLoader(RefusesGhosts(), batch_sampler=batches))
    taken = [x.tolist() for x in loader]
    assert taken == ([[0, 1], [0], [0], [6]] if instep.rank == 0 else [[2, 3], [4], [5], [7]])


# --------------------------------------------------------------------------- randomness


class Augmented(Dataset):
    """Random in three ways."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        import random

        import numpy as np

        x, y = rows(23)[index]
        noise = torch.randn(6, dtype=float64) + np.random.normal() + random.gauss(0, 1)
        return x + 0.1 * noise, y


def augmented(log, workers):
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    train(log, net(), Augmented(), lambda m, x, y: cross_entropy(m(x), y), shuffle=True, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_random_in_a_sample_depends_on_the_sample(workers):
    exactly(augmented, workers)


def augmented_epochs(workers):
    torch.manual_seed(5)
    loader = instep.shard(DataLoader(Augmented(), 23, num_workers=workers))
    before = torch.rand(1).item()
    epochs = [next(iter(loader))[0] for _ in range(2)]
    return before, torch.rand(1).item(), epochs


def test_augmentation_is_new_in_each_epoch_and_the_same_with_any_workers():
    ((_, _, (first, second)),) = run(1, augmented_epochs, 0)
    ((_, _, with_workers),) = run(1, augmented_epochs, 2)
    assert not torch.equal(first, second)
    assert torch.equal(first, with_workers[0])
    assert torch.equal(second, with_workers[1])


def dropping(log, kind):
    layer = {
        "units": nn.Sequential(nn.Unflatten(1, (3, 2, 1)), nn.Dropout(0.3)),
        "1d": nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Dropout1d(0.3)),
        "2d": nn.Sequential(nn.Unflatten(1, (3, 2, 1)), nn.Dropout2d(0.3)),
        "3d": nn.Sequential(nn.Unflatten(1, (3, 2, 1, 1)), nn.Dropout3d(0.3)),
        "alpha": nn.AlphaDropout(0.3),
        "feature alpha": nn.Sequential(nn.Unflatten(1, (3, 2)), nn.FeatureAlphaDropout(0.3)),
        "in place": nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3, inplace=True)),
    }[kind]
    model = nn.Sequential(layer, nn.Flatten(), *net(drop=0.5)).to(float64)
    train(log, model, rows(23), lambda m, x, y: cross_entropy(m(x), y))


@pytest.mark.parametrize("kind", ["units", "1d", "2d", "3d", "alpha", "feature alpha", "in place"])
def test_dropout_is_that_of_the_whole_batch(kind):
    exactly(dropping, kind, sizes=(2,), nudge=True)


@ranks(1, 2)
def test_dropout_drops_what_it_should_and_keeps_the_mean():
    model = instep.replicate(nn.Dropout(0.25))
    x = instep.shard(torch.ones(400, 500))
    y = model(x)
    assert y.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert (y == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)
    assert not torch.equal(model(x), y), "a new mask in each step"
    again = instep.all_gather_object(y[0].tolist())
    assert len({tuple(row) for row in again}) == instep.world_size, "no mask twice"


@ranks(1)
def test_alpha_dropout_keeps_mean_and_variance():
    model = instep.replicate(nn.AlphaDropout(0.2))
    y = model(torch.randn(2000, 500, generator=torch.Generator().manual_seed(0)))
    assert y.mean().item() == pytest.approx(0, abs=0.01)
    assert y.var().item() == pytest.approx(1, abs=0.01)
    x = torch.randn(5, 3)
    assert torch.equal(model.eval()(x), x)


@ranks(1, 2)
def test_dropout_functions_have_torchs_defaults():
    class Defaults(nn.Module):
        def forward(self, x):
            f = nn.functional
            feature = f.feature_alpha_dropout(x), f.alpha_dropout(x)
            return f.dropout(x), f.alpha_dropout(x, training=True), *feature

    x = torch.ones(1000)
    dropped, alpha, *same = instep.replicate(Defaults())(x)
    assert 0.4 < (dropped == 0).double().mean().item() < 0.6
    assert 0.4 < (alpha < 0).double().mean().item() < 0.6
    assert all(torch.equal(y, x) for y in same)
    assert torch.equal(x, torch.ones(1000))


@ranks(2)
def test_as_many_masks_are_remembered_as_gradient_checkpointing_may_ask_for():
    model = instep.replicate(nn.Dropout(0.5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_draws, "_MAX_DRAWS", len(replica_draws._drawn) + 2)
        for _ in range(5):
            model(torch.ones(4))
        assert len(replica_draws._drawn) == replica_draws._MAX_DRAWS


@ranks(2)
def test_dropout_may_be_left_to_the_rank_and_is_left_to_models_that_are_no_replicas():
    model = instep.replicate(nn.Dropout(0.5), dropout="rank")
    y = model(instep.shard(torch.ones(4, 500)))
    assert 0.3 < (y == 0).double().mean().item() < 0.7
    torch.manual_seed(7)
    ours = nn.functional.dropout(torch.ones(50), 0.5)
    torch.manual_seed(7)
    assert torch.equal(ours, torch.empty(50).bernoulli_(0.5) * 2)


@ranks(1, 2)
def test_what_a_model_draws_moves_no_other_stream():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    model = instep.replicate(Noisy())
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    noise = model(instep.shard(torch.zeros(4, 3)))
    assert torch.equal(torch.rand(1), expected)
    everybodys = instep.all_gather_object(noise.tolist())
    assert instep.world_size == 1 or everybodys[0] != everybodys[1], "each rank its own noise"


@ranks(1, 2)
def test_what_a_model_draws_without_a_batch_is_each_ranks_own():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    model = instep.replicate(Noisy())
    with pytest.warns(InstepWarning, match="Noisy draws random numbers of its own in its forward"):
        noise = model(torch.zeros(4, 3))
    model(torch.zeros(4, 3))  # said once
    everybodys = instep.all_gather_object(noise.tolist())
    assert instep.world_size == 1 or everybodys[0] != everybodys[1]


def checkpointed(log, reentrant):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = net(classes=6, drop=0.4), net(drop=0.4, norm=False)

        def forward(self, x):
            return self.second(checkpoint(self.first, x, use_reentrant=reentrant))

    def loss(model, x, y):
        return cross_entropy(model(x.requires_grad_()), y)

    train(log, Deep().to(float64), rows(23), loss)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_finds_the_same_masks(reentrant):
    exactly(checkpointed, reentrant, sizes=(2,), nudge=True)


def attending(log):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 8)
            self.attends = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3)
            self.recurs, self.last = nn.LSTM(8, 8, 2, dropout=0.3), nn.Linear(8, 4)

        def forward(self, x):
            y = torch.stack([self.first(x * k) for k in range(3)])
            y = checkpoint(self.attends, y, use_reentrant=False)
            return self.last(
                self.recurs(y)[0].mean(0) + torch.randn(len(x), 8, device=x.device).double()
            )

    train(log, Deep().to(float64), rows(23), lambda m, x, y: cross_entropy(m(x), y))


def test_dropout_of_attention_and_between_recurrent_layers_and_noise():
    exactly(attending, sizes=(3,), nudge=True)


# ----------------------------------------------------------------------------- gradients


def two_players(log):
    g, d = (instep.replicate(net(4, 6)), instep.replicate(net(6, 1)))
    log.begin(g, d)
    opt_g, opt_d = (torch.optim.Adam(m.parameters(), 0.01) for m in (g, d))
    for x, y in log.batches(instep.shard(DataLoader(rows(23), 7))):
        z = x[:, :4] * 2 + y[:, None]
        d_loss = (d(x) - 1).square().mean() + d(g(z).detach()).square().mean()
        opt_d.zero_grad()
        d_loss.backward()
        log.step(opt_d, g, d)
        opt_g.zero_grad()
        (d(g(z)) - 1).square().mean().backward()
        log.step(opt_g, g, d)


def growing(log):
    model = instep.replicate(net())
    log.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for k, (x, y) in enumerate(log.batches(instep.shard(DataLoader(rows(60), 7)))):
        if k == 4:
            torch.manual_seed(instep.rank)  # what is added becomes rank 0's too
            model.append(nn.Linear(4, 4).to(float64))
            optimizer.add_param_group({"params": model[-1].parameters(), "lr": 0.05})
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if k < 4:
            optimizer.step()
        else:
            log.step(optimizer, model)


def clipping(log):
    def loss(model, x, y):
        for p in model.parameters():
            p.register_hook(lambda g: g.clamp(-0.02, 0.02))
        return cross_entropy(model(x), y)

    train(log, net(norm=False), rows(9), loss, batch_size=9, epochs=1)


def clipped_norm(log):
    model = instep.replicate(net())
    log.begin(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for k, (x, y) in enumerate(log.batches(instep.shard(DataLoader(rows(23), 7)))):
        optimizer.zero_grad(set_to_none=k % 2 == 0)
        loss = cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        log.step(optimizer, model)


def scaled(log):
    model = instep.replicate(net())
    log.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in log.batches(instep.shard(DataLoader(rows(23), 7))):
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        log.step(optimizer, model)
        scaler.update()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head((x.to(torch.complex128) @ self.spectrum).abs().float()).double()


def complex_and_mixed(log):
    train(log, Complex(), rows(23), lambda m, x, y: cross_entropy(m(x), y))


def sparse(log):
    net = nn.Sequential(nn.Embedding(10, 5, sparse=True), nn.Flatten(), nn.Linear(5, 4))
    model = instep.replicate(net.to(float64).to(device()))
    log.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _, y in log.batches(instep.shard(DataLoader(rows(23), 7))):
        y = y.to(device())
        optimizer.zero_grad()
        cross_entropy(model(y), y).backward()
        assert model[0].weight.grad.is_sparse
        log.step(optimizer, model)


TRAININGS = [two_players, growing, clipping, clipped_norm, scaled, sparse]


@pytest.mark.parametrize("training", TRAININGS, ids=lambda t: t.__name__)
def test_gradients(training):
    exactly(training)


def test_complex_and_mixed_dtypes():
    same_as_one_process(complex_and_mixed, sizes=(3,))


@ranks(2)
def test_noise_of_a_gpus_generator_is_drawn_by_each_rank_and_leaves_no_trace():
    of_gpu = torch.Generator().manual_seed(0)  # a stand-in

    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 0 + torch.randn(3, generator=of_gpu)

    with pytest.MonkeyPatch.context() as torch_on_a_gpu:
        torch_on_a_gpu.setattr(torch_devices, "own_generator", lambda: of_gpu)
        model = instep.replicate(Noisy(2, 3))
        with pytest.warns(InstepWarning, match="Noisy draws random numbers of its own"):
            noise = model(torch.zeros(1, 2)).detach()
    assert not torch.equal(*instep.all_gather(noise))
    assert of_gpu.get_state().equal(torch.Generator().manual_seed(0).get_state())


def mean_loss(loss, x):
    mean = instep.Mean()
    mean.update(loss, len(x))
    return loss.new_tensor(mean.compute())


CLOSURES = {
    "mean": mean_loss,
    "loss": lambda loss, x: loss,
    "number": lambda loss, x: loss.item(),
}


def lbfgs(log, returned):
    model = instep.replicate(net(norm=False))
    log.begin(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn="strong_wolfe")
    for x, y in log.batches(instep.shard(DataLoader(rows(23), 11))):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return CLOSURES[returned](loss.detach(), x)

        log.step(optimizer, model, closure=closure)


@pytest.mark.parametrize("returned", CLOSURES)
def test_lbfgs(returned):
    assert compare(lbfgs, (returned,), size=3).parameters < 1e-9


@ranks(1, 2)
def test_a_closure_of_lbfgs_whose_value_is_not_the_loss_is_an_error():
    model = instep.replicate(nn.Linear(2, 1))
    x = instep.shard(torch.randn(6, 2))

    def closure():
        (model(x).square().mean() / 2).backward()
        return model(x).square().mean()

    step = torch.optim.LBFGS(model.parameters()).step
    told = pytest.raises(TrainingError, match=r"test_exactness.py:\d+ returned different losses")
    with told if instep.world_size > 1 else nullcontext():
        step(closure)


def penalised_gradient(log):
    model = instep.replicate(net(classes=1))
    log.begin(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for x, _ in log.batches(instep.shard(DataLoader(rows(23), 7))):
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        optimizer.zero_grad()
        ((slope.norm(dim=1) - 1).square().mean() + out.mean()).backward()
        log.step(optimizer, model)


def test_a_gradient_penalty_through_batch_normalisation():
    # Two rows in the last batch: batch statistics of two numbers are ill-conditioned.
    assert compare(penalised_gradient, size=3).gradient < 1e-12


def synchronised(log):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net())
    train(log, model, rows(23), lambda m, x, y: cross_entropy(m(x), y))


def test_models_with_sync_batch_norm_are_accepted_on_the_cpu():
    sameness = compare(synchronised_on_many, size=2)
    assert sameness.gradient < 1e-13


def synchronised_on_many(log):
    if instep.world_size > 1:
        synchronised(log)
    else:  # torch's own refuses the CPU
        train(log, net(), rows(23), lambda m, x, y: cross_entropy(m(x), y))


# ---------------------------------------------------------------------------------- data


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows(23))


class Batches(IterableDataset):
    def __iter__(self):
        x, y = rows(23).tensors
        return iter(zip(x.split(7), y.split(7), strict=True))


def other_loaders(log, kind):
    model = instep.replicate(net())
    log.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = {
        "iterable": lambda: DataLoader(Stream(), 7),
        "iterable with a worker": lambda: DataLoader(Stream(), 7, num_workers=1),
        "batch_size=None": lambda: DataLoader(Batches(), batch_size=None),
        "a class of its own": lambda: type("Own", (DataLoader,), {})(rows(23), 7),
    }[kind]()
    for x, y in log.batches(instep.shard(loader)):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        log.step(optimizer, model)


@pytest.mark.parametrize(
    "kind", ["iterable", "iterable with a worker", "batch_size=None", "a class of its own"]
)
def test_loaders_whose_batches_are_cut(kind):
    exactly(other_loaders, kind)


def resume(state):
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata's own
        loader = instep.shard(StatefulDataLoader(rows(40), 8, shuffle=True))
    if state is not None:
        loader.load_state_dict(state)
    taken, states = [], []
    for x, _ in loader:
        taken.append(instep.all_gather_object(x[:, 0].tolist()))
        states.append(loader.state_dict())
    return taken, states


@ranks(2)
def test_a_stateful_loader_goes_on_where_it_was():
    taken, states = resume(None)
    rest, _ = resume(states[1])
    assert rest == taken[2:]


def zipped(log):
    model = instep.replicate(net())
    log.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    one = instep.shard(DataLoader(rows(23), 7, shuffle=True))
    other = instep.shard(DataLoader(rows(33), 10, shuffle=True))
    for (x, y), (u, _) in zip(log.batches(one), log.batches(other), strict=True):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        (0.1 * model(u).square().mean()).backward()
        log.step(optimizer, model)


def test_two_loaders_in_one_loop():
    exactly(zipped)


def test_a_loader_inside_a_loader():
    assert compare(nested, size=3).gradient < 1e-13


def nested(log):
    model = instep.replicate(net(norm=False))
    log.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    outer = instep.shard(DataLoader(rows(20), 9))
    inner = instep.shard(DataLoader(rows(12), 5))
    for x, y in log.batches(outer):
        for k, (u, v) in enumerate(inner):
            (0.01 * cross_entropy(model(u), v)).backward()
            if k == 1:
                break
        cross_entropy(model(x), y).backward()
        log.step(optimizer, model)
        optimizer.zero_grad()


def odd_collate(samples):
    names = [f"name {int(y)}" for _, y in samples]
    return {
        "x": torch.stack([x for x, _ in samples]),
        "more": (torch.tensor([int(y) for _, y in samples]), names),
        "n": "constant",
    }


def collated(log):
    model = instep.replicate(net())
    log.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = instep.shard(DataLoader(rows(23), 7, collate_fn=odd_collate))
    for batch in loader:
        y, names = batch["more"]
        assert names == [f"name {int(v)}" for v in y]
        optimizer.zero_grad()
        cross_entropy(model(batch["x"]), y).backward()
        log.step(optimizer, model)


def test_nested_batches_with_other_things_than_tensors():
    assert compare(collated, size=3).gradient < 1e-13


@ranks(1, 3)
def test_total_len_is_the_number_of_samples():
    assert instep.shard(DataLoader(rows(23), 7)).total_len == 23


@ranks(2)
def test_batches_taken_by_hand_and_left_early():
    loader = instep.shard(DataLoader(rows(23), 7, shuffle=True))
    first = next(iter(loader))
    second = next(iter(loader))
    assert not torch.equal(first[0], second[0]), "each iter() is an epoch"
    iterator = iter(loader)
    assert sum(1 for _ in iterator) == len(loader) == math.ceil(23 / 7)


# ------------------------------------------------------------------------------ compiled


def compiled(log, backend):
    model = instep.replicate(net(drop=0.3).to(device()))
    log.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fast = torch.compile(model, backend=backend)
    for x, y in log.batches(instep.shard(DataLoader(rows(24), 6))):
        optimizer.zero_grad()
        cross_entropy(fast(x.to(device())), y.to(device())).backward()
        log.step(optimizer, model)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend):
    assert compare(compiled, (backend,), size=2).gradient < 1e-13


@ranks(1, 2)
def test_checkpointed_dropout_outside_of_replicas_is_computed_again_with_its_own_mask():
    model = instep.replicate(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    model(instep.shard(torch.ones(4, 4)))
    x = torch.ones(64, requires_grad=True)
    y = checkpoint(lambda x: nn.functional.dropout(x * 1, 0.5), x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad, y)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.last(self.drop(self.drop(self.first(x))))

    def encode(self, x):
        return self.drop(nn.functional.dropout(self.first(x), 0.3))


def drawn_around_a_short_batch(how):
    torch.manual_seed(3)
    model = instep.replicate(Encoder().to(float64))
    loader = instep.shard(DataLoader(rows(14), 6))  # the last batch has two rows
    found = []

    def evaluate():
        model.train(how == "training mode").drop.train()
        mean = instep.Mean()
        with torch.no_grad():
            for x, _ in loader:
                mean.update(model.encode(x) if how == "method" else model(x))
                mean.update(model(x))
        found.append(mean.compute())
        model.train()

    for _ in range(2):
        evaluate()
        for x, y in loader:
            cross_entropy(model.last(model.encode(x)), y).backward()
            cross_entropy(model(x), y).backward()
    grads = [p.grad.norm().item() for p in model.parameters()]
    return [*found, *grads, torch.rand(()).item()]


@pytest.mark.parametrize("how", ["training mode", "evaluation mode", "method"])
def test_what_is_drawn_for_a_batch_that_ranks_skip_leaves_all_in_step(how):
    (alone,) = run(1, drawn_around_a_short_batch, how)
    assert len({*alone}) == len(alone)
    for of_rank in run(3, drawn_around_a_short_batch, how):
        assert of_rank == pytest.approx(alone, rel=1e-9)


@ranks(1, 2)
def test_draws_in_evaluation_are_again_those_after_the_same_seed():
    model = instep.replicate(Encoder().to(float64)).eval()
    model.drop.train()
    loader, found = instep.shard(DataLoader(rows(14), 6)), []
    for _ in range(2):
        torch.manual_seed(1)
        with torch.no_grad():
            found.append(torch.cat([model(x) for x, _ in loader]))
    assert torch.equal(*found)
    with torch.no_grad():
        assert not torch.equal(found[0], torch.cat([model(x) for x, _ in loader]))
