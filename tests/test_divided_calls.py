"""Unedited trainings: the script sees whole batches, the outermost module calls are divided."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations

import instep
from instep.distributed.communication.transport import transport
from instep.errors import MixedSumsError
from instep.process.patching import PatchHandle
from instep.training.blocks import Block
from instep.unedited.patch_table import SHARDED_CALL_PATCHES
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.compare.rank_mismatch import first_mismatch
from instep.unedited.sharded_call.compare.rounding import tolerance
from instep.unedited.sharded_call.run import sharded_output
from instep.unedited.sharded_call.run.random_numbers import GlobalBatchRandomMode
from instep.unedited.sharded_call.run.sharded_output import ShardedOutput
from oracle import Log, same_as_one_process
from pool import ranks, talking_over

Training = Callable[[Log], None]
DIVIDED: list[Training] = []
WHOLE: list[Training] = []


def divided(training: Training) -> Training:
    """The numbers of one process, and every module of it divided."""
    DIVIDED.append(training)
    return training


def whole(training: Training) -> Training:
    """The numbers of one process, and its module computed whole on every rank."""
    WHOLE.append(training)
    return training


LARGE = {
    "large_outputs_that_only_a_loss_looks_at": 0,
    "large_outputs_that_everybody_looks_at": 0,
    "outputs_just_large_enough": 13 * 3 * 8,  # of 13 rows, but not of 12
}


def unedited(log: Log, training: Training, is_divided: bool) -> None:
    """Play `training` as `instep run` would: divided where there are other ranks."""
    ranks = torch.distributed.is_initialized()
    patched = PatchHandle(SHARDED_CALL_PATCHES if ranks else ())
    modules.reset()
    sharded_output.LARGE = LARGE.get(training.__name__, 2**20)
    try:
        training(log)
    finally:
        patched.remove()
    if ranks:
        work = modules.call_counts
        assert (work.whole == 0) == is_divided, work
        assert work.sharded > 0 or not is_divided, work


@pytest.mark.parametrize("training", DIVIDED, ids=lambda t: t.__name__)
def test_it_is_divided_and_has_the_numbers_of_one_process(training: Training) -> None:
    sizes = (2, 3) if training is classifier else (3,)
    same_as_one_process(unedited, training, True, sizes=sizes, dtype=torch.float64, nudge=True)


@pytest.mark.parametrize("training", WHOLE, ids=lambda t: t.__name__)
def test_what_cannot_be_divided_is_whole_on_every_rank(training: Training) -> None:
    same_as_one_process(unedited, training, False, sizes=(3,), dtype=torch.float64, nudge=True)


def batches(steps: int = 4, *, rows: int = 12) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for k in range(steps):
        x = torch.randn(rows + k % 2, 6, generator=generator).double()
        yield x, torch.randint(3, (rows + k % 2,), generator=generator)


def train(
    log: Log,
    model: nn.Module,
    step: Callable[[Tensor, Tensor], Tensor],
    *others: nn.Module,
    rows: int = 12,
    steps: int = 4,
    lr: float = 0.1,
    fused: bool | None = None,
) -> None:
    """The loop that most scripts have."""
    everything = (model.double(), *(other.double() for other in others))
    parameters = [p for m in everything for p in m.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=fused)
    log.begin(*everything)
    for x, y in batches(steps, rows=rows):
        optimizer.zero_grad()
        loss = step(x, y)
        loss.backward()
        log.loss(loss)
        log.step(optimizer, *everything)


def mlp(*middle: nn.Module, out: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, out))


class Around(nn.Module):
    """An mlp, for a forward of its own."""

    def __init__(self, *middle: nn.Module, out: int = 3) -> None:
        super().__init__()
        self.body = mlp(*middle, out=out)


# -------------------------------------------------------------------- divided


@divided
def classifier(log: Log) -> None:
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.3))
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@divided
def a_model_that_gets_another_dtype_after_its_first_step(log: Log) -> None:
    model = mlp()
    model(torch.ones(12, 6)).sum().backward()
    model.double().zero_grad()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@divided
def variational_autoencoder_with_a_summed_loss(log: Log) -> None:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_variance = self.encoder(x).chunk(2, 1)
            z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
            return self.decoder(z), mean, log_variance

    model = VAE()

    def step(x: Tensor, y: Tensor) -> Tensor:
        again, mean, log_variance = model(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return F.mse_loss(again, x, reduction="sum") + divergence

    train(log, model, step, lr=1e-3)


@divided
def transforms_of_functions(log: Log) -> None:
    """torch.func's transforms see the model whole; what calls it without them is divided."""
    model = mlp()

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

    def step(x: Tensor, y: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        slopes = torch.func.grad(loss)(weights, x, y)
        adapted = {name: weight - 0.1 * slopes[name] for name, weight in weights.items()}
        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)
        return loss(adapted, x, y) + sum(slope.square().mean() for slope in each.values())

    train(log, model, step)


@divided
def generative_adversarial_networks(log: Log) -> None:
    generator = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6)
    ).double()
    critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)).double()
    of_g = torch.optim.SGD(generator.parameters(), lr=0.1)
    of_c = torch.optim.SGD(critic.parameters(), lr=0.1)
    log.begin(generator, critic)
    for real, _ in batches():
        noise = torch.randn(len(real), 4).double()
        ones, zeros = torch.ones(len(real), 1).double(), torch.zeros(len(real), 1).double()
        of_c.zero_grad()
        fake = generator(noise)
        loss = F.binary_cross_entropy_with_logits(critic(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
        loss.backward()
        of_c.step()
        of_g.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
        loss.backward()
        log.loss(loss)
        log.step(of_g, generator, critic)


@divided
def gradient_penalty(log: Log) -> None:
    critic = mlp(out=1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        between = (x * torch.rand(len(x), 1).double()).requires_grad_()
        scores = critic(between)
        (slope,) = torch.autograd.grad(scores.sum(), between, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() + critic(x).mean()

    train(log, critic, step)


@divided
def gradient_penalty_through_batch_statistics(log: Log) -> None:
    critic = mlp(nn.BatchNorm1d(8), out=1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).square().sum(), x, create_graph=True)
        return slope.square().mean()

    train(log, critic, step, lr=1e-3)


@divided
def meta_learning(log: Log) -> None:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(g.square().sum() for g in gradients)

    train(log, model, step, lr=1e-2)


@divided
def backward_with_a_graph(log: Log) -> None:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        with warnings.catch_warnings(action="ignore"):  # `.grad` keeps its graph alive
            loss.backward(create_graph=True)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return loss + sum(g.square().sum() for g in gradients)

    train(log, model, step, lr=1e-2)


@divided
def backward_to_some_of_the_parameters(log: Log) -> None:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward(inputs=[model[0].weight], retain_graph=True)
        assert model[0].weight.grad is not None
        assert model[0].bias.grad is None
        return loss

    train(log, model, step)


@divided
def language_model_with_carried_state(log: Log) -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(8, 7)
            self.rnn = nn.LSTM(5, 8, 2)

        def forward(
            self, tokens: Tensor, state: tuple[Tensor, Tensor]
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            out, state = self.rnn(self.embedding(tokens), state)
            return self.head(out).view(-1, 7), state

    model = Language().double()
    tokens = torch.randint(7, (21, 12), generator=torch.Generator().manual_seed(1))
    state = (torch.zeros(2, 12, 8).double(), torch.zeros(2, 12, 8).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    log.begin(model)
    for at in range(0, 20, 5):
        state = (state[0].detach(), state[1].detach())
        optimizer.zero_grad()
        scores, state = model(tokens[at : at + 5], state)
        loss = F.cross_entropy(scores, tokens[at + 1 : at + 6].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        log.loss(loss)
        log.step(optimizer, model)


@divided
def dropout_inside_of_a_recurrent_layer(log: Log) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(2, 8, 2, dropout=0.4, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x.view(len(x), 3, 2))[0][:, -1])

    model = Last()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@divided
def transformer_with_dropout(log: Log) -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return model(x.unsqueeze(1).expand(-1, 4, -1).contiguous()).square().mean()

    train(log, model, step)


@divided
def loss_over_kept_tokens_inside_of_forward(log: Log) -> None:
    class Own(Around):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.body(x)
            return scores, F.cross_entropy(scores, y, ignore_index=1)

    model = Own(nn.Dropout(0.1))
    train(log, model, lambda x, y: model(x, y)[1])


@divided
def weighted_loss_and_a_penalty_inside_of_forward(log: Log) -> None:
    class Own(Around):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2]))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            penalty = sum(p.square().sum() for p in self.parameters())
            return self.criterion(self.body(x), y) + 0.1 * penalty

    model = Own()
    train(log, model, lambda x, y: model(x, y))


@divided
def mean_by_hand_inside_of_forward(log: Log) -> None:
    class Own(Around):
        def forward(self, x: Tensor) -> Tensor:
            return (self.body(x) - x).square().mean()

    model = Own(out=6)
    train(log, model, lambda x, y: model(x))


@divided
def penalty_computed_by_the_script(log: Log) -> None:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        penalty = sum(p.abs().sum() for p in model.parameters())
        return F.cross_entropy(model(x), y) + 0.1 * penalty

    train(log, model, step)


@divided
def accumulation(log: Log) -> None:
    model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log.begin(model)
    for k, (x, y) in enumerate(batches(6)):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        log.loss(loss)
        if k % 2:
            log.step(optimizer, model)
            optimizer.zero_grad(set_to_none=k > 2)


@divided
def closures_of_lbfgs(log: Log) -> None:
    model = mlp().double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    log.begin(model)
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        log.loss(closure())
        log.step(optimizer, model, closure=closure)


@divided
def siamese_calls_in_one_backward(log: Log) -> None:
    model = mlp()
    train(log, model, lambda x, y: (model(x) - model(x.flip(1))).square().mean())


@divided
def encoder_and_decoder_called_apart(log: Log) -> None:
    encoder, decoder = mlp(nn.BatchNorm1d(8), out=4), nn.Linear(4, 6)
    train(log, encoder, lambda x, y: F.mse_loss(decoder(encoder(x)), x), decoder)


@divided
def adversarial_examples(log: Log) -> None:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        F.cross_entropy(model(x), y).backward()
        assert x.grad is not None
        model.zero_grad()
        return F.cross_entropy(model(x.detach() + 0.1 * x.grad.sign()), y)

    train(log, model, step)


@divided
def a_loss_that_couples_the_batch(log: Log) -> None:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        p, one_hot = model(x).softmax(1), F.one_hot(y, 3)
        return 1 - 2 * (p * one_hot).sum() / (p.sum() + one_hot.sum())

    train(log, model, step)


@divided
def normed_weights(log: Log) -> None:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)),
        nn.Tanh(),
        nn.utils.spectral_norm(nn.Linear(8, 8)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(8, 3)),
    )
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@divided
def moving_average_of_the_weights(log: Log) -> None:
    model = mlp(nn.BatchNorm1d(8)).double()
    average = copy.deepcopy(model).requires_grad_(False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for theirs, ours in zip(average.parameters(), model.parameters(), strict=True):
                theirs.lerp_(ours, 0.1)
            target = average(x)
        return F.mse_loss(model(x), target) + F.cross_entropy(model(x), y)

    train(log, model, step)


@divided
def update_by_hand(log: Log) -> None:
    model = mlp().double()
    nothing = torch.optim.SGD(model.parameters(), lr=0.0)
    log.begin(model)
    for x, y in batches():
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        log.loss(loss)
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad
        log.step(nothing, model)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 0.5


@divided
def own_autograd_function(log: Log) -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _Scaled.apply(x)

    model = mlp(Half())
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


class _Adjoint(torch.autograd.Function):
    """Saves no graph: backward calls the model again, as adjoint methods do."""

    @staticmethod
    def forward(
        ctx: Any, model: nn.Module, create_graph: bool, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.again = model, create_graph, x, parameters
        return model(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        model, create_graph, x, parameters = ctx.again
        with torch.enable_grad():
            y = model(x)
        found = torch.autograd.grad(y, parameters, grads, create_graph=create_graph)
        return None, None, None, *(gradient.detach() for gradient in found)


@divided
def gradients_that_a_backward_asks_for(log: Log) -> None:
    model = mlp(out=6)

    def step(x: Tensor, y: Tensor) -> Tensor:
        again = _Adjoint.apply(model, len(x) % 2 == 0, x, *model.parameters())
        return F.mse_loss(again, x) + model(x).square().mean()

    train(log, model, step)


@divided
def hooks_on_gradients(log: Log) -> None:
    model = mlp()
    model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@divided
def sparse_embedding(log: Log) -> None:
    table = nn.Embedding(6, 3, sparse=True).double()
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    log.begin(table)
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(table(x.argmax(1)), y)
        loss.backward()
        log.loss(loss)
        log.step(optimizer, table)


@divided
def channels_last_under_a_fused_optimizer(log: Log) -> None:
    model = nn.Sequential(
        nn.Unflatten(1, (2, 1, 3)), nn.Conv2d(2, 3, (1, 2)), nn.Conv2d(3, 3, (1, 2)), nn.Flatten()
    )
    model.to(memory_format=torch.channels_last)
    train(log, model, lambda x, y: F.cross_entropy(model(x), y), fused=True)


class FusedDropout(nn.Module):
    """As nn.Dropout on a GPU, where the mask has the order in memory of what is dropped."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, 0.3, self.training)[0]


@divided
def fused_dropout_of_channels_last(log: Log) -> None:
    model = nn.Sequential(
        nn.Unflatten(1, (2, 1, 3)), nn.Conv2d(2, 3, (1, 2)), FusedDropout(), nn.Flatten()
    )
    model.to(memory_format=torch.channels_last)
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@divided
def checkpointed_layers(log: Log) -> None:
    class Saving(Around):
        def __init__(self) -> None:
            super().__init__(nn.BatchNorm1d(8), nn.Dropout(0.2), out=8)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            body = torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)
            return self.head(body)

    model = Saving()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@divided
def frozen_backbone(log: Log) -> None:
    backbone, head = mlp(nn.BatchNorm1d(8), out=8), nn.Linear(8, 3)
    backbone.requires_grad_(False)
    train(log, backbone, lambda x, y: F.cross_entropy(head(backbone(x)), y), head)


@divided
def evaluation_in_between(log: Log) -> None:
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.5))

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            right = (model(x).argmax(1) == y).double().mean()
        model.train()
        return F.cross_entropy(model(x), y) * (1 + right)

    train(log, model, step)


@divided
def data_parallel(log: Log) -> None:
    model = nn.DataParallel(mlp(nn.BatchNorm1d(8)))
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


class Speaking(Around):
    """Tokens in, (rows, 3, 7) logits out."""

    def __init__(self) -> None:
        super().__init__(out=21)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).view(-1, 3, 7)


def tokens(y: Tensor) -> Tensor:
    return torch.stack((y, y + 1, y * 2), 1)


@divided
def large_outputs_that_only_a_loss_looks_at(log: Log) -> None:
    model = Speaking()

    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, 7), tokens(y).view(-1), ignore_index=2)
        if isinstance(logits, ShardedOutput):
            assert logits.full is None
        return loss + F.cross_entropy(logits.transpose(1, 2), tokens(y))

    train(log, model, step)


@divided
def large_outputs_that_everybody_looks_at(log: Log) -> None:
    model, other = Speaking(), nn.Linear(7, 2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        with torch.no_grad():
            right = (logits.argmax(2) == tokens(y)).double().mean()
        loss = F.mse_loss(logits, logits.detach() * 0.5, reduction="sum") * right
        loss = loss + _Scaled.apply(logits).square().mean() + other(logits).square().mean()
        clipped = model(x)
        clipped[clipped > 0.5] = 0.0
        return loss + clipped.sum() * 0.1

    train(log, model, step, other, lr=1e-2)


class Shift(nn.Module):
    """With one row, its parameter and its input get the very same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


@divided
def one_gradient_for_a_parameter_and_for_the_call_before(log: Log) -> None:
    before, shift, after = nn.Linear(6, 8), Shift(), nn.Linear(8, 3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(after(shift(before(x)).tanh()), y)

    train(log, before, step, shift, after, rows=3)


@divided
def one_gradient_for_a_parameter_and_for_the_script(log: Log) -> None:
    shift, after, seen = Shift(), nn.Linear(8, 3), [torch.zeros(1)]

    def step(x: Tensor, y: Tensor) -> Tensor:
        shifted = shift(x.repeat(1, 2)[:, :8])
        loss = F.cross_entropy(after(shifted.tanh()), y) * (1 + seen[-1].square().sum())
        shifted.register_hook(lambda grad: seen.append(grad))
        return loss

    train(log, shift, step, after, rows=3)


@divided
def one_gradient_for_a_parameter_and_for_the_layer_before(log: Log) -> None:
    model = mlp(Shift())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INSTEP_BUCKET_MIB", "0")  # each parameter travels by itself
        train(log, model, lambda x, y: F.cross_entropy(model(x), y), rows=3)


@divided
def outputs_just_large_enough(log: Log) -> None:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)
        if torch.distributed.is_initialized():
            assert isinstance(scores, ShardedOutput) == (len(x) == 13)
        return F.cross_entropy(scores, y)

    train(log, model, step)


# ---------------------------------------------------- whole on every rank


@divided
def units_that_are_drawn(log: Log) -> None:
    class Boltzmann(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.visible = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            chances = self.hidden(x).sigmoid()
            drawn = torch.bernoulli(chances).detach() + chances - chances.detach()
            seen = self.visible(drawn)
            chosen = chances.detach().gather(1, torch.multinomial(chances.detach(), 1))
            return seen + torch.normal(seen.detach(), chosen)

    model = Boltzmann()
    train(log, model, lambda x, y: F.mse_loss(model(x), x))


@divided
def a_parameter_that_comes_in_as_an_argument(log: Log) -> None:
    class Scaled(Around):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.body(x) * scale

    model, scales = Scaled(), nn.ParameterList([nn.Parameter(torch.ones(3))])
    train(log, model, lambda x, y: F.cross_entropy(model(x, scales[0]), y), scales)


@whole
def batches_smaller_than_the_ranks(log: Log) -> None:
    model = mlp()
    train(log, model, lambda x, y: F.cross_entropy(model(x[:1]), y[:1]), rows=1)


@whole
def a_batch_now_and_then_that_is_smaller_than_the_ranks(log: Log) -> None:
    model, calls = mlp(nn.Dropout(0.3)), [0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        rows = 2 if calls[0] == 3 else len(x)
        return F.cross_entropy(model(x[:rows]), y[:rows])

    train(log, model, step)


@whole
def tensors_kept_in_attributes(log: Log) -> None:
    class Keeping(Around):
        def forward(self, x: Tensor) -> Tensor:
            scores = self.body(x)
            self.penalty = scores.square().mean()
            return scores

    model = Keeping()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y) + model.penalty)


@whole
def draws_from_numpy(log: Log) -> None:
    class Noisy(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x + torch.from_numpy(np.random.randn(*x.shape)))

    np.random.seed(0)
    model = Noisy()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@whole
def couples_the_batch_in_its_forward(log: Log) -> None:
    class Coupled(Around):
        def forward(self, x: Tensor) -> Tensor:
            scores = self.body(x)
            return scores - scores.mean(0)

    model = Coupled()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@whole
def couples_larger_batches(log: Log) -> None:
    class Coupled(Around):
        def forward(self, x: Tensor) -> Tensor:
            scores = self.body(x)
            return scores - scores.mean(0) if len(x) == 13 else scores

    model = Coupled()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@whole
def keeps_a_mean_of_its_rows(log: Log) -> None:
    class Centring(Around):
        centre: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.body(x - self.centre)
            self.centre.lerp_(x.detach().mean(0), 0.1)
            return scores

    model = Centring()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / grads[0].norm()


@whole
def couples_the_batch_in_its_backward(log: Log) -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _Normed.apply(x)

    model = mlp(Layer())
    train(log, model, lambda x, y: F.cross_entropy(model(x), y), lr=1e-2)


@whole
def hooks_on_its_parts(log: Log) -> None:
    model = mlp()
    seen: dict[str, Tensor] = {}
    model[0].register_forward_hook(lambda module, args, out: seen.update(features=out))

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + seen["features"].square().mean()

    train(log, model, step)


@whole
def hooks_on_all_modules(log: Log) -> None:
    model, seen = mlp(), []

    def step(x: Tensor, y: Tensor) -> Tensor:
        seen.clear()
        handle = nn.modules.module.register_module_forward_hook(lambda m, a, o: seen.append(o))
        scores = model(x)
        handle.remove()
        return F.cross_entropy(scores, y) + seen[0].square().mean()

    train(log, model, step)


@whole
def divides_by_something_else_than_its_rows(log: Log) -> None:
    class Masked(Around):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return ((self.body(x) - x).square().mean(1) * mask).sum() / mask.sum()

    model, calls = Masked(out=6), [0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return model(x, torch.ones(len(x)).double() if calls[0] < 6 else (y > 0).double())

    train(log, model, step, steps=6)


@whole
def divides_by_what_the_first_batches_do_not_show(log: Log) -> None:
    class Ignoring(Around):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            kept = (y != 2).double()  # the trial's zeros are kept, too
            return (F.cross_entropy(self.body(x), y, reduction="none") * kept).sum() / kept.sum()

    model, calls = Ignoring(), [0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return model(x[:12], (y if calls[0] == 4 else y.clamp(max=1))[:12])

    train(log, model, step)


@whole
def divides_by_what_only_another_number_of_rows_shows(log: Log) -> None:
    class Ignoring(Around):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            kept = (y != 2).double()
            return (F.cross_entropy(self.body(x), y, reduction="none") * kept).sum() / kept.sum()

    model, calls = Ignoring(), [0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return model(x[:10], y[:10]) if calls[0] == 6 else model(x[:12], y[:12].clamp(max=1))

    train(log, model, step, steps=6)


@whole
def reaches_for_a_parameter_outside(log: Log) -> None:
    scale = nn.Parameter(torch.ones(3).double())

    class Reaching(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) * scale

    model, other = Reaching(), nn.ParameterList([scale])
    train(log, model, lambda x, y: F.cross_entropy(model(x), y), other)


@whole
def changes_its_input(log: Log) -> None:
    class Changing(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.mul_(0.5))

    model = Changing()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y) + x.square().mean())


@whole
def fails_for_some_numbers_of_rows(log: Log) -> None:
    class Pairing(Around):
        def __init__(self) -> None:
            super().__init__(out=8)
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            paired = self.body(x)
            if len(x) % 2 == 0:  # on some ranks only
                paired = paired.view(2, -1, 8).flip(0).view(-1, 8)
            return self.norm(paired)

    model = Pairing()
    train(log, model, lambda x, y: model(x).exp().mean(), lr=1e-2)


@divided
def dropout_that_begins_late(log: Log) -> None:
    dropout = nn.Dropout(0.0)
    model = mlp(dropout)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        dropout.p += 0.2
        return loss

    train(log, model, step)


@divided
def half_precision_with_a_scaler(log: Log) -> None:
    model, scaler = mlp(nn.LayerNorm(8)).double(), torch.amp.GradScaler("cpu", init_scale=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log.begin(model)
    for k, (x, y) in enumerate(batches(6)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=k == 2):
            loss = F.cross_entropy(model(x), y) / 2
        scaler.scale(loss).backward()
        log.loss(loss)
        if k % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            log.step(torch.optim.SGD(model.parameters(), lr=0.0), model)
            optimizer.zero_grad()


@divided
def compiled(log: Log) -> None:
    model = mlp(nn.BatchNorm1d(8))
    fast = torch.compile(model, backend="eager")
    train(log, model, lambda x, y: F.cross_entropy(fast(x), y))


@ranks(2)
def test_rows_on_their_ranks_are_an_ordinary_tensor_to_everybody_else() -> None:
    whole = torch.arange(20.0).view(5, 4)
    block = Block(instep.rank, instep.world_size, 5)

    def fresh() -> ShardedOutput:
        return ShardedOutput.of(whole[block.start : block.stop].clone(), block, transport())

    assert fresh().shape == (5, 4)
    assert len(fresh()) == 5
    assert fresh().view(-1).full is None
    assert torch.equal(fresh(), whole)
    assert torch.equal(fresh().view(-1)[3:8], whole.view(-1)[3:8])
    assert torch.equal(torch.cat((fresh(), fresh())), torch.cat((whole, whole)))
    assert (fresh().numpy() == whole.numpy()).all()
    assert (np.asarray(fresh()) == whole.numpy()).all()
    assert fresh().tolist() == whole.tolist()
    assert repr(fresh()) == repr(whole)
    for again in (pickle.loads(pickle.dumps(fresh())), copy.deepcopy(fresh()), fresh().clone()):
        assert type(again) is Tensor
        assert torch.equal(again, whole)
    changed = fresh()
    changed[0] = 0.0
    changed.mul_(2)
    assert changed.sum() == 2 * whole[1:].sum()


class CouplesLater(nn.Linear):
    """After some calls its rows begin to depend on each other."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        y = super().forward(input)
        self.__class__.calls += 1
        return y - y.mean(0) if self.calls > 10 else y


@ranks(2)
def test_a_sampled_call_finds_what_is_no_longer_the_same() -> None:
    CouplesLater.calls = 0
    model, x = CouplesLater(4, 3), torch.randn(6, 4)
    with dividing() as log:
        outputs = [model(x) for _ in range(11)]
    for found in outputs[-2:]:
        assert found.shape == (6, 3)
        assert torch.allclose(found.mean(0), torch.zeros(3), atol=1e-6)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (9, 2)
    if instep.rank == 0:
        assert "every rank computes CouplesLater whole: its outputs" in log.getvalue()
        assert "(calls 2 to 9 were divided)" in log.getvalue()


@contextlib.contextmanager
def dividing() -> Iterator[io.StringIO]:
    """Inside, module calls are divided; gives what is said about it."""
    log = io.StringIO()
    patched = PatchHandle(SHARDED_CALL_PATCHES)
    modules.reset()
    try:
        with contextlib.redirect_stderr(log):
            yield log
    finally:
        patched.remove()


@ranks(3)
def test_rounding_that_a_module_enlarges_is_told_from_other_numbers() -> None:
    """Normalisation of features that are nearly alike enlarges rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32, eps=1e-12), nn.Linear(32, 4)
    )
    x = torch.rand(64) + 1e-3 * torch.randn(9, 64)
    exact = copy.deepcopy(model).double()(x.double())
    before = [parameter.clone() for parameter in model.parameters()]
    with dividing():
        y = model(x)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (1, 0)
    assert 1e-5 < (y - exact).norm() / exact.norm() < 1e-1
    assert all(map(torch.equal, before, model.parameters()))
    y.sum().backward()


def refused(module: nn.Module, x: Tensor, what: str) -> None:
    """Its outputs or gradients are seen not to be the same when it is divided."""
    with dividing() as log:
        module(x)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (0, 1)
    if instep.rank == 0:
        name = type(module).__name__
        assert f"computes {name} whole: its {what} are not those of the whole" in log.getvalue()


@pytest.mark.parametrize(("dtype", "little"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
@ranks(2)
def test_rows_that_know_a_little_of_each_other_are_not_taken_for_rounding(
    dtype: torch.dtype, little: float
) -> None:
    class Coupled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
            y = super().forward(input)
            return y - little * y.mean(0)

    refused(Coupled(6, 3, dtype=dtype), torch.randn(8, 6, dtype=dtype), "outputs")


@ranks(3)
def test_where_little_but_rounding_is_left_every_rank_computes_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32, eps=1e-12))
    with dividing(), torch.no_grad():
        model(torch.rand(64) + 1e-6 * torch.randn(9, 64))
    assert modules.call_counts.whole > 0


@pytest.mark.parametrize("learning", [range(5), range(5, 9)])
@ranks(2)
def test_a_gradient_that_only_the_whole_or_only_its_parts_have_is_noticed(learning: range) -> None:
    class Fickle(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
            bias = self.bias if len(input) in learning else self.bias.detach()
            return F.linear(input, self.weight, bias)

    refused(Fickle(6, 3), torch.randn(8, 6), "gradients")


@ranks(2)
def test_a_wrong_gradient_of_what_came_in_is_noticed() -> None:
    class Coupled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
            return super().forward(_Normed.apply(input))

    refused(Coupled(6, 3), torch.randn(8, 6, requires_grad=True), "gradients")


@ranks(2)
def test_a_wrong_gradient_is_not_taken_for_that_of_half_precision() -> None:
    class Coupled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
            return _Normed.apply(super().forward(input))

    with torch.autocast("cpu", torch.bfloat16):
        refused(Coupled(6, 3), torch.randn(8, 6), "gradients")


@ranks(2)
def each_rank_another() -> None:
    models, x = [nn.Linear(4, 3) for _ in range(2)], torch.randn(6, 4)
    with dividing():
        outputs = [model(x) for model in models]
        with pytest.raises(MixedSumsError, match="another rank"):
            outputs[instep.rank].sum().backward()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_sums_of_different_modules_gradients_are_an_error(backend: str) -> None:
    with talking_over(backend):
        each_rank_another()


def test_rounding_on_a_gpu_is_that_of_tf32_unless_the_script_forbids_it() -> None:
    assert tolerance(torch.float32, "cuda") == tolerance(torch.float16)
    assert tolerance(torch.float64, "cuda") == tolerance(torch.float64)
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before, convolutions.fp32_precision = convolutions.fp32_precision, "ieee"
    try:
        assert tolerance(torch.float32, "cuda") == tolerance(torch.float32)
    finally:
        convolutions.fp32_precision = before


def test_attention_without_dropout_draws_nothing_and_asks_for_no_other_rows() -> None:
    q, k, v = torch.randn(3, 2, 1, 5, 4).requires_grad_()
    expected = F.scaled_dot_product_attention(q, k, v)
    with GlobalBatchRandomMode(Block(0, 2, 4), 0, None):  # type: ignore[arg-type]  # no way to ask anybody
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), expected)


@ranks(2)
def channels_last() -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    with dividing():
        model(torch.randn(4, 3, 5, 5)).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_gradients_lie_in_memory_as_their_parameters_do(backend: str) -> None:
    with talking_over(backend):
        channels_last()


@ranks(3)
def test_evaluation_in_inference_mode_is_divided() -> None:
    model, x = mlp(nn.BatchNorm1d(8)).eval(), torch.randn(7, 6)
    whole = model(x)
    with dividing(), torch.inference_mode():
        assert torch.allclose(model(x), whole)
        assert torch.allclose(model(x), whole)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (2, 0)


@ranks(3)
def test_one_row_tells_nothing_of_batches_of_many() -> None:
    model, many = mlp(nn.BatchNorm1d(8)).eval(), torch.randn(7, 6)
    with dividing() as log, torch.no_grad():
        for x in (many[:1], many, many[:1], many):
            model(x)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (2, 2)
    if instep.rank == 0:
        assert log.getvalue().count("\n") == 1
        assert "whole where a batch has fewer rows than there are ranks;" in log.getvalue()


@ranks(2)
def test_that_a_batch_is_small_is_said_once_and_not_of_every_part() -> None:
    model, x = nn.Sequential(nn.Sequential(nn.Linear(6, 6)), mlp(nn.ReLU())), torch.randn(1, 6)
    with dividing() as log:
        for _ in range(3):
            model(x)
    if instep.rank == 0:
        assert log.getvalue() == (
            "instep: every rank computes Sequential whole where a batch has fewer rows than "
            "there are ranks; other batches are not affected.\n"
        )


@ranks(2)
def test_what_fails_for_some_rows_is_told_with_its_exception() -> None:
    with dividing() as log:
        nn.Linear(6, 3)(torch.randn(6))  # no batch, but one sample
    if instep.rank == 0:
        assert log.getvalue() == (
            "instep: every rank computes Linear whole: it cannot be computed for some of its rows "
            "(RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x3 and 6x3)).\n"
        )


@ranks(2)
def test_ranks_that_differ_are_told_so() -> None:
    x = torch.randn(6, 4)
    torch.manual_seed(instep.rank)  # as from the clock
    model = nn.Linear(4, 3)
    with dividing() as log:
        assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))
        model.load_state_dict(instep.broadcast_object(model.state_dict()))
        model.train(False)(x + instep.rank)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (0, 2)
    if instep.rank == 0:
        said = log.getvalue()
        assert "Linear whole: its parameters are not the same on rank 1 as on rank 0 (" in said
        assert "it is called with arguments that are not the same on rank 1 as on rank 0 (" in said


@ranks(2)
def test_ranks_that_round_differently_are_alike() -> None:
    """On unlike processors, or on GPUs, what each rank computes for itself has other bits."""
    x = torch.randn(6, 4)
    model = nn.Sequential(nn.Linear(4, 30_000), nn.Linear(30_000, 3))
    with dividing() as log, torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-6 * instep.rank)
        model(x * (1 + 1e-6 * instep.rank))
    assert log.getvalue() == ""
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (1, 0)


@pytest.mark.parametrize(
    ("value", "other", "same"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.ones(70_000), torch.ones(70_000).index_fill(0, torch.tensor([69_999]), 2.0), False),
        (torch.ones(3), torch.ones(3, 1), False),
        (torch.ones(3), torch.ones(3).double(), False),
        (torch.zeros(3), torch.zeros(3), True),
        (torch.zeros(3), torch.tensor([0.0, 1e-9, 0.0]), False),
        (torch.ones(2) * 1j, torch.ones(2) * -1j, False),
        (torch.empty(0), torch.empty(0), True),
        (1.0, 1.0 + 1e-9, False),
        ("train", "train", True),
        ("train", 3, False),
        (["a", "b"], ["a", "b"], True),
        (["a", "b"], ["a", "c"], False),
    ],
)
@ranks(2)
def test_what_counts_as_the_same_on_all_ranks(value: Any, other: Any, same: bool) -> None:
    mine = [torch.ones(2), other if instep.rank else value]
    why = first_mismatch(nn.Linear(1, 1), mine, transport())
    assert (why is None) is same
