"""Unedited trainings: the script sees whole batches, the outermost module calls are sharded."""

from __future__ import annotations

import copy
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, distributions, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.run.sharded_output import ShardedOutput
from oracle import Log, same_as_one_process
from pool import device, talking_over
from sharded_training import (
    SHARDED,
    WHOLE,
    Around,
    Normed,
    Training,
    With,
    batches,
    mlp,
    sharded,
    train,
    unedited,
    whole,
)

pytestmark = pytest.mark.slow

# -------------------------------------------------------------------- sharded


@sharded
def classifier(log: Log) -> None:
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.3))
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@whole
def two_calls_before_one_backward_of_which_the_first_is_whole(log: Log) -> None:
    norm = (nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten())
    model = nn.Sequential(*norm, *mlp())

    def step(x: Tensor, y: Tensor) -> Tensor:
        few = model(x[:1]).square().mean()  # fewer rows than ranks
        return few + F.cross_entropy(model(x), y)

    train(log, model, step)


@sharded
def a_model_that_gets_another_dtype_after_its_first_step(log: Log) -> None:
    model = mlp()
    model(torch.ones(12, 6)).sum().backward()
    model.double().zero_grad()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@sharded
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


def transforms_of_functions(log: Log) -> None:
    """torch.func's transforms see the model whole; what calls it without them is sharded."""
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


@sharded
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


@sharded
def gradient_penalty(log: Log) -> None:
    critic = mlp(out=1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        between = (x * torch.rand(len(x), 1).double()).requires_grad_()
        scores = critic(between)
        (slope,) = torch.autograd.grad(scores.sum(), between, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() + critic(x).mean()

    train(log, critic, step)


@sharded
def gradient_penalty_through_batch_statistics(log: Log) -> None:
    critic = mlp(nn.BatchNorm1d(8), out=1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).square().sum(), x, create_graph=True)
        return slope.square().mean()

    train(log, critic, step, lr=1e-3)


@sharded
def meta_learning(log: Log) -> None:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(g.square().sum() for g in gradients)

    train(log, model, step, lr=1e-2)


@sharded
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


@sharded
def backward_to_some_of_the_parameters(log: Log) -> None:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward(inputs=[model[0].weight], retain_graph=True)
        assert model[0].weight.grad is not None
        assert model[0].bias.grad is None
        return loss

    train(log, model, step)


@sharded
def backward_from_an_edge_of_the_graph(log: Log) -> None:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        edge = get_gradient_edge(loss)
        torch.autograd.backward(edge, torch.ones_like(loss), retain_graph=True)
        return loss

    train(log, model, step)


@sharded
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
    generator = torch.Generator(device()).manual_seed(1)
    tokens = torch.randint(7, (21, 12), generator=generator, device=device())
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


class BalancedExperts(nn.Module):
    """Its means go over all rows, and the sum of their product over the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 6, 3))

    def places(self, chosen: Tensor) -> Iterable[Tensor]:
        """Of the tokens of each expert."""
        return [(chosen == k).nonzero()[:, 0] for k in range(4)]

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.stack((x, x * 2), 1).view(-1, 6)
        shares = self.gate(tokens).softmax(-1)
        chosen = shares.argmax(-1)
        scores = tokens.new_zeros(len(tokens), 3)
        for k, at in enumerate(self.places(chosen)):
            found = tokens[at] @ self.experts[k]
            scores = scores.index_add(0, at, shares[at, k, None] * found)
        used = F.one_hot(chosen, 4).to(x.dtype).mean(0)
        balance = 4 * (used * shares.mean(0)).sum()
        scores = scores.view(len(x), 2, 3).mean(1)
        return scores, F.cross_entropy(scores, y) + 0.01 * balance


class ExpertsByCounts(BalancedExperts):
    """Its counts are of its own rows."""

    def places(self, chosen: Tensor) -> Iterable[Tensor]:
        return chosen.argsort().split(F.one_hot(chosen, 4).sum(0).tolist())


@sharded
def experts_with_a_balanced_load(log: Log) -> None:
    model = BalancedExperts()
    train(log, model, lambda x, y: model(x, y)[1])


@sharded
def experts_that_get_their_rows_by_counts(log: Log) -> None:
    model = ExpertsByCounts()
    train(log, model, lambda x, y: model(x, y)[1])


@sharded
def packed_sequences(log: Log) -> None:
    """The longest one is in the last row: those of other ranks are padded to it, too."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(2, 4, batch_first=True, bidirectional=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            packed = pack_padded_sequence(
                x.view(len(x), 3, 2), lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            rows, found = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            assert rows.shape[1] == 3
            return self.head(rows), found

    model = Tagger()

    def step(x: Tensor, y: Tensor) -> Tensor:
        lengths = torch.where(torch.arange(len(y), device=y.device) == len(y) - 1, 3, 1 + y % 2)
        scores, found = model(x, lengths)
        assert torch.equal(found.cpu(), lengths.cpu())
        return F.cross_entropy(scores.sum(1), y)

    train(log, model, step)


@sharded
def dropout_inside_of_a_recurrent_layer(log: Log) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(2, 8, 2, dropout=0.4, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x.view(len(x), 3, 2))[0][:, -1])

    model = Last()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@sharded
def transformer_with_dropout(log: Log) -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return model(x.unsqueeze(1).expand(-1, 4, -1).contiguous()).square().mean()

    train(log, model, step)


@sharded
def loss_over_kept_tokens_inside_of_forward(log: Log) -> None:
    class Own(Around):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.body(x)
            return scores, F.cross_entropy(scores, y, ignore_index=1)

    model = Own(nn.Dropout(0.1))
    train(log, model, lambda x, y: model(x, y)[1])


@sharded
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


@sharded
def mean_by_hand_inside_of_forward(log: Log) -> None:
    class Own(Around):
        def forward(self, x: Tensor) -> Tensor:
            return (self.body(x) - x).square().mean()

    model = Own(out=6)
    train(log, model, lambda x, y: model(x))


@sharded
def penalty_computed_by_the_script(log: Log) -> None:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        penalty = sum(p.abs().sum() for p in model.parameters())
        return F.cross_entropy(model(x), y) + 0.1 * penalty

    train(log, model, step)


@sharded
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


@sharded
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


@sharded
def siamese_calls_in_one_backward(log: Log) -> None:
    model = mlp()
    train(log, model, lambda x, y: (model(x) - model(x.flip(1))).square().mean())


@sharded
def encoder_and_decoder_called_apart(log: Log) -> None:
    encoder, decoder = mlp(nn.BatchNorm1d(8), out=4), nn.Linear(4, 6)
    train(log, encoder, lambda x, y: F.mse_loss(decoder(encoder(x)), x), decoder)


@sharded
def adversarial_examples(log: Log) -> None:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        F.cross_entropy(model(x), y).backward()
        assert x.grad is not None
        model.zero_grad()
        return F.cross_entropy(model(x.detach() + 0.1 * x.grad.sign()), y)

    train(log, model, step)


@sharded
def a_loss_that_couples_the_batch(log: Log) -> None:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        p, one_hot = model(x).softmax(1), F.one_hot(y, 3)
        return 1 - 2 * (p * one_hot).sum() / (p.sum() + one_hot.sum())

    train(log, model, step)


@sharded
def normed_weights(log: Log) -> None:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)),
        nn.Tanh(),
        nn.utils.spectral_norm(nn.Linear(8, 8)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(8, 3)),
    )
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@sharded
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


@sharded
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


@sharded
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


@sharded
def gradients_that_a_backward_asks_for(log: Log) -> None:
    model = mlp(out=6)

    def step(x: Tensor, y: Tensor) -> Tensor:
        again = _Adjoint.apply(model, len(x) % 2 == 0, x, *model.parameters())
        return F.mse_loss(again, x) + model(x).square().mean()

    train(log, model, step)


class _Solved(torch.autograd.Function):
    """A fixed point, whose backward calls the layer until the gradient stays as it is."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(40):
            z = layer(z) + x
        ctx.layer = layer
        ctx.save_for_backward(z)
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (z,) = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        total, change = grads[0], grads[0]
        while change.abs().max() > 1e-18:
            with torch.enable_grad():
                y = ctx.layer(z)
            (change,) = torch.autograd.grad(y, z, change)
            total = total + change
        with torch.enable_grad():
            y = ctx.layer(z)
        return None, total, *torch.autograd.grad(y, tuple(ctx.layer.parameters()), total)


@sharded
def a_backward_that_calls_a_layer_as_often_as_its_rows_need(log: Log) -> None:
    class Balanced(Around):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
            with torch.no_grad():
                self.layer[0].weight.mul_(0.3)

        def forward(self, x: Tensor) -> Tensor:
            solved = _Solved.apply(self.layer, x, *self.layer.parameters())
            return self.body(solved)

    model = Balanced()
    scale = torch.logspace(0, -6, 60, device=device()).unsqueeze(1)  # small ones need fewer calls
    train(log, model, lambda x, y: (model(x).square() * scale[: len(x)]).mean())


@sharded
def hooks_on_gradients(log: Log) -> None:
    model = mlp()
    model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@sharded
def hooks_on_gradients_that_come_after_the_forward(log: Log) -> None:
    model, engine = mlp(), torch.autograd.Variable._execution_engine

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        handles = [p.register_hook(lambda g: g.clamp(-0.01, 0.01)) for p in model[0].parameters()]
        loss.register_hook(lambda _: engine.queue_callback(remove))

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return loss

    train(log, model, step)


class Experts(nn.Module):
    """An expert sees the rows of one sign, and is not called where there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 3)
        for k, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0) == k).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out


@sharded
def hooks_on_gradients_of_experts_that_some_ranks_do_not_call(log: Log) -> None:
    model = Experts()
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g.clamp(-0.05, 0.05))
    train(log, model, lambda x, y: F.cross_entropy(model(x[x[:, 0].argsort()]), y))


@sharded
def hooks_on_gradients_that_a_backward_does_not_compute(log: Log) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [head(x) for head in self.heads]

    model = Heads()
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g.clamp(-0.05, 0.05))
    train(log, model, lambda x, y: F.cross_entropy(model(x)[0], y))


@sharded
def gradients_of_experts_that_the_script_asks_for(log: Log) -> None:
    model = Experts()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x[x[:, 0].argsort()]), y)
        slopes = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        return loss + 0.1 * sum(slope.square().sum() for slope in slopes)

    train(log, model, step)


@sharded
def gradients_of_one_output_with_regard_to_another(log: Log) -> None:
    """As StyleGAN2 asks for them, for the length of its paths."""

    class Styled(Around):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            style = self.body[0](x).tanh()
            return self.body[2](style), style

    model = Styled()

    def step(x: Tensor, y: Tensor) -> Tensor:
        scores, style = model(x)
        style.retain_grad()
        (slope,) = torch.autograd.grad(scores.square().sum(), style, create_graph=True)
        scores.logsumexp(1).sum().backward(retain_graph=True)
        assert style.grad is not None
        log.loss(style.grad.square().sum())
        return F.cross_entropy(scores, y) + slope.square().mean()

    train(log, model, step)


@sharded
def gradients_retained_for_what_a_module_takes(log: Log) -> None:
    """The comparison of the first call asks for the gradients of its arguments, too."""
    model, head = mlp(out=8), nn.Linear(8, 3)
    retained = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        hidden = model(x).tanh()
        hidden.retain_grad()
        retained.append(hidden)
        loss = F.cross_entropy(head(hidden), y)
        assert hidden.grad is None
        return loss

    train(log, model, step, head)
    for hidden in retained:
        log.loss(hidden.grad.square().sum())


@sharded
def gradients_of_several_rows_at_once(log: Log) -> None:
    """As torch.autograd.functional.jacobian(vectorize=True) takes them."""
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        scores = model(x)
        rows = torch.eye(scores.shape[1], dtype=scores.dtype)[:, None].expand(-1, *scores.shape)
        loss = F.cross_entropy(scores, y)
        for create_graph in (False, True):
            slopes, unused = torch.autograd.grad(
                scores,
                [x, torch.zeros((), requires_grad=True)],
                rows,
                retain_graph=True,
                create_graph=create_graph,
                allow_unused=True,
                is_grads_batched=True,
            )
            assert unused is None
            assert slopes.shape == (scores.shape[1], *x.shape)
            log.loss(slopes.square().sum())
        return loss + slopes.square().mean()

    train(log, model, step)


@sharded
def gradients_of_several_losses_by_vmap(log: Log) -> None:
    model = mlp()
    parameters = list(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = torch.stack([F.cross_entropy(model(x), y), model(x).square().mean()])

        def take(row: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad([losses], parameters, [row], retain_graph=True)

        for slopes in torch.vmap(take)(torch.eye(2, dtype=x.dtype)):
            log.loss(slopes.square().sum())
        return losses.sum()

    train(log, model, step)


@sharded
def gradients_with_every_argument(log: Log) -> None:
    """As WGAN-GP asks for them."""
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        scores = model(x)
        (slope,) = torch.autograd.grad(
            outputs=scores,
            inputs=x,
            grad_outputs=torch.ones_like(scores),
            retain_graph=True,
            create_graph=True,
            only_inputs=True,
        )
        (other, unused) = torch.autograd.grad(
            scores.sum(), [x, torch.zeros((), requires_grad=True)], None, True, True, True, True
        )
        assert unused is None
        loss = F.cross_entropy(scores, y) + slope.norm(dim=1).sub(1).square().mean()
        (edge,) = torch.autograd.grad(loss, get_gradient_edge(x), retain_graph=True)
        log.loss(edge.square().sum())
        if torch.__version__ >= (2, 13):
            named = dict(model.named_parameters())
            for rows in (None, torch.ones(2, dtype=loss.dtype)):
                batched = rows is not None
                slopes = torch.autograd.grad(
                    loss, named, rows, retain_graph=True, is_grads_batched=batched
                )
                log.loss(slopes["0.weight"].square().sum())
        return loss + other.square().mean()

    train(log, model, step)


@sharded
def a_mask_between_as_many_positions_as_the_batch_has_rows(log: Log) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(6, 4 * 12), nn.Unflatten(1, (12, 4)))
    mask = torch.full((12, 12), -torch.inf).double().triu(1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return layer(model(x[:12]), mask).square().mean()

    train(log, layer, step, model, rows=13)


@sharded
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


@sharded
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


@sharded
def fused_dropout_of_channels_last(log: Log) -> None:
    model = nn.Sequential(
        nn.Unflatten(1, (2, 1, 3)), nn.Conv2d(2, 3, (1, 2)), FusedDropout(), nn.Flatten()
    )
    model.to(memory_format=torch.channels_last)
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@sharded
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


class Checkpointed(Around):
    """A module whose body backward computes again, in one of torch's two ways."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(nn.BatchNorm1d(8), nn.Dropout(0.2), out=8)
        self.stem, self.head, self.reentrant = nn.Linear(6, 6), nn.Linear(8, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        body = torch.utils.checkpoint.checkpoint(
            self.body, self.stem(x), use_reentrant=self.reentrant
        )
        self.keep(body)
        return self.head(body)

    def keep(self, body: Tensor) -> None:
        pass


class CheckpointedAndWhole(Checkpointed):
    def keep(self, body: Tensor) -> None:
        self.kept = body


@sharded
def reentrant_checkpoints(log: Log) -> None:
    model = Checkpointed(reentrant=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            return F.cross_entropy(model(x), y)

    train(log, model, step)


@sharded
def reentrant_checkpoints_of_what_asks_for_no_gradient(log: Log) -> None:
    """Their parameters get none, as in plain Python."""

    class Frozen(Around):
        def forward(self, x: Tensor) -> Tensor:
            with warnings.catch_warnings(action="ignore"):
                fixed = torch.utils.checkpoint.checkpoint(self.body[0], x, use_reentrant=True)
            return self.body[1:](fixed)

    model = Frozen()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))
    assert model.body[0].weight.grad is None


@whole
def reentrant_checkpoints_in_a_module_that_is_whole(log: Log) -> None:
    model = CheckpointedAndWhole(reentrant=True)
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@whole
def checkpoints_in_a_module_that_is_whole(log: Log) -> None:
    model = CheckpointedAndWhole(reentrant=False)
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@sharded
def reentrant_checkpoints_of_the_script(log: Log) -> None:
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.2))

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return F.cross_entropy(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True), y)

    train(log, model, step)


@whole
def checkpoints_of_the_script(log: Log) -> None:
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.2))

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False), y)

    train(log, model, step)


@sharded
def gradients_that_are_detached_in_place(log: Log) -> None:
    """As `zero_grad` once did, and fastai does."""
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()
        return F.cross_entropy(model(x), y)

    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log.begin(model)
    for x, y in batches():
        loss = step(x, y)
        loss.backward()
        log.loss(loss)
        log.step(optimizer, model)


class Sealed(OrderedDict[str, Any]):
    """A configuration that cannot be changed, as diffusers' FrozenDict."""

    def __setitem__(self, key: str, value: Any) -> None:
        if "sealed" in self:
            raise TypeError("a configuration cannot be changed")
        super().__setitem__(key, value)

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("a configuration cannot be changed")

    __delitem__ = clear = copy = pop = setdefault = update = _refuse


@sharded
def a_configuration_that_cannot_be_changed(log: Log) -> None:
    model = mlp(nn.BatchNorm1d(8))
    model.settings = Sealed(layers=2)
    model.settings["sealed"] = True
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))
    assert list(model.settings.items()) == [("layers", 2), ("sealed", True)]


@sharded
def buffers_that_get_their_shapes_in_the_first_forward(log: Log) -> None:
    """As those of the observers of quantization-aware training."""

    class Observed(Around):
        scale: Tensor
        zero_point: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(0))
            self.register_buffer("zero_point", torch.zeros(0, dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            if not len(self.scale):
                self.scale.resize_(3).fill_(2)
                self.zero_point.resize_(3).fill_(1)
            return self.body(x) * self.scale + self.zero_point

    model = Observed()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@sharded
def parameters_that_are_a_list(log: Log) -> None:
    """As in MAML-Pytorch, whose method returns its nn.ParameterList."""

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.ones(3, 6) / 6, torch.zeros(3)])

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weights[0], self.weights[1])

        def parameters(self, recurse: bool = True) -> Any:
            return self.weights

    model = Learner()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@sharded
def means_that_are_zero_by_mathematics(log: Log) -> None:
    """Behind a layer without bias, of inputs that are normed: the means are all rounding."""
    normed = nn.Sequential(
        nn.Linear(6, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.Linear(8, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )
    train(log, normed, lambda x, y: F.cross_entropy(normed(x), y))


@sharded
def a_module_that_its_forward_makes(log: Log) -> None:
    class Making(Around):
        def forward(self, x: Tensor) -> Tensor:
            return nn.LayerNorm(3).double()(self.body(x) + nn.Parameter(torch.ones(3)).double())

    model = Making()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@sharded
def a_tensor_from_which_its_forward_asks_for_gradients(log: Log) -> None:
    """As an embedding's that is frozen, below checkpoints or adapters."""

    class Asking(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.sin().requires_grad_())

    model = Asking()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@whole
def an_argument_of_which_its_forward_asks_for_gradients(log: Log) -> None:
    class Asking(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.requires_grad_())

    model = Asking()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
        return loss + slope.square().sum()

    train(log, model, step)


@whole
def modules_that_are_made_in_the_first_forward(log: Log) -> None:
    """The first call is whole, the others are sharded."""

    class Making(Around):
        head: nn.Module

        def forward(self, x: Tensor) -> Tensor:
            features = self.body(x)
            if not hasattr(self, "head"):
                self.head = nn.Linear(features.shape[1], 3).to(x)
                self.scale = nn.Parameter(torch.ones(3).to(x))
            return self.head(features) * self.scale

    trained_after_a_first_call(log, Making().double())


@whole
def lazy_layers(log: Log) -> None:
    trained_after_a_first_call(log, nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3)))


def trained_after_a_first_call(log: Log, model: nn.Module) -> None:
    model.double()(next(batches())[0])
    if torch.distributed.is_initialized():
        assert modules.call_counts.whole == 1
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))
    if torch.distributed.is_initialized():
        assert modules.call_counts.whole == 1


@sharded
def frozen_backbone(log: Log) -> None:
    backbone, head = mlp(nn.BatchNorm1d(8), out=8), nn.Linear(8, 3)
    backbone.requires_grad_(False)
    train(log, backbone, lambda x, y: F.cross_entropy(head(backbone(x)), y), head)


@sharded
def evaluation_in_between(log: Log) -> None:
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.5))

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            right = (model(x).argmax(1) == y).double().mean()
        model.train()
        return F.cross_entropy(model(x), y) * (1 + right)

    train(log, model, step)


@sharded
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


@sharded
def large_outputs_that_only_a_loss_looks_at(log: Log) -> None:
    model = Speaking()

    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, 7), tokens(y).view(-1), ignore_index=2)
        if isinstance(logits, ShardedOutput):
            assert logits.full is None
        return loss + F.cross_entropy(logits.transpose(1, 2), tokens(y))

    train(log, model, step)


@sharded
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


@sharded
def one_gradient_for_a_parameter_and_for_the_call_before(log: Log) -> None:
    before, shift, after = nn.Linear(6, 8), Shift(), nn.Linear(8, 3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(after(shift(before(x)).tanh()), y)

    train(log, before, step, shift, after, rows=3)


@sharded
def one_gradient_for_a_parameter_and_for_the_script(log: Log) -> None:
    shift, after, seen = Shift(), nn.Linear(8, 3), [torch.zeros(1)]

    def step(x: Tensor, y: Tensor) -> Tensor:
        shifted = shift(x.repeat(1, 2)[:, :8])
        loss = F.cross_entropy(after(shifted.tanh()), y) * (1 + seen[-1].square().sum())
        shifted.register_hook(lambda grad: seen.append(grad))
        return loss

    train(log, shift, step, after, rows=3)


@sharded
def one_gradient_for_a_parameter_and_for_the_layer_before(log: Log) -> None:
    model = mlp(Shift())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INSTEP_BUCKET_MIB", "0")  # each parameter travels by itself
        train(log, model, lambda x, y: F.cross_entropy(model(x), y), rows=3)


@sharded
def outputs_just_large_enough(log: Log) -> None:
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)
        if torch.distributed.is_initialized():
            assert isinstance(scores, ShardedOutput) == (len(x) == 13)
        return F.cross_entropy(scores, y)

    train(log, model, step)


class Variable:
    """An object around a parameter, such as Keras's layers have."""

    def __init__(self, value: nn.Parameter) -> None:
        self.value = value


class ReadsFromObjects(Around):
    """Reads parameters from an object and from a list of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.shifts = nn.ParameterList(torch.full((3,), 0.1 * k) for k in range(5))
        self.variable = Variable(self.scale)
        self.versions = [[self.shifts[0], self.scale]]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.variable.value + self.versions[-1][0]


@sharded
def parameters_in_objects_and_lists(log: Log) -> None:
    model = ReadsFromObjects()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y) + model(x * 2).square().mean())


class Mixed(Around):
    """Weights units by a plain tensor, as DARTS does, which keeps it in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.alphas = torch.zeros(3, device=device(), dtype=torch.double, requires_grad=True)
        self.architecture = [self.alphas]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.architecture[0].exp() + self.alphas


@sharded
def plain_tensors_that_are_trained(log: Log) -> None:
    model = Mixed()
    optimizer = torch.optim.SGD(model.architecture, lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.step()
        optimizer.zero_grad()
        log.loss(model.alphas.sum())
        return F.cross_entropy(model(x), y) + model.alphas.square().sum()

    train(log, model, step)


# ---------------------------------------------------- whole on every rank


@sharded
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


@sharded
def a_parameter_that_comes_in_as_an_argument(log: Log) -> None:
    class Scaled(Around):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.body(x) * scale

    model, scales = Scaled(), nn.ParameterList([nn.Parameter(torch.ones(3))])
    train(log, model, lambda x, y: F.cross_entropy(model(x, scales[0]), y), scales)


class Recomputed(torch.autograd.Function):
    """A layer that computes again in backward, as reversible nets do and some checkpoints."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), grads[0])
        return x.grad, None


@whole
def a_backward_that_begins_another_one(log: Log) -> None:
    class Own(Around):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return Recomputed.apply(self.first(x), self.body)  # type: ignore[no-any-return]

    model = Own()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


class Unfreezing(Around):
    """Trains its body from the seventh call on, as it is told in each call."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        self.body.requires_grad_(step >= 6)
        return self.body(x)  # type: ignore[no-any-return]


class Assigning(Around):
    """The same by assignment."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        for parameter in self.body.parameters():
            parameter.requires_grad = step >= 6
        return self.body(x)  # type: ignore[no-any-return]


def _train_unfreezing(log: Log, model: nn.Module) -> None:
    first, step = nn.Linear(6, 6), count()
    train(log, model, lambda x, y: F.cross_entropy(model(first(x), next(step)), y), first, steps=9)


@whole
def a_forward_that_unfreezes_its_parameters(log: Log) -> None:
    _train_unfreezing(log, Unfreezing())


@whole
def a_forward_that_unfreezes_its_parameters_by_assignment(log: Log) -> None:
    _train_unfreezing(log, Assigning())


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
def draws_from_numpy(log: Log) -> None:
    class Noisy(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x + torch.from_numpy(np.random.randn(*x.shape)))

    np.random.seed(0)
    model = Noisy()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@sharded
def draws_for_all_rows_from_python_and_numpy(log: Log) -> None:
    class Forced(Around):
        def forward(self, x: Tensor) -> Tensor:
            scores = self.body(x)
            return scores * np.random.uniform(1, 2) if random.random() < 0.5 else scores

    np.random.seed(0)
    random.seed(0)
    model = Forced()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y), steps=8)


@whole
def couples_the_batch_in_its_forward(log: Log) -> None:
    class Coupled(Around):
        def forward(self, x: Tensor) -> Tensor:
            scores = self.body(x)
            return scores - scores.amax(0)

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


@sharded
def keeps_a_mean_of_its_rows(log: Log) -> None:
    keeps_a_mean(log, lambda x: x.mean(0))


@whole
def keeps_a_product_of_its_rows(log: Log) -> None:
    keeps_a_mean(log, lambda x: x.new_ones(len(x)) @ x / len(x))


def keeps_a_mean(log: Log, mean: Callable[[Tensor], Tensor]) -> None:
    class Centring(Around):
        centre: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.body(x - self.centre)
            self.centre.lerp_(mean(x.detach()), 0.1)
            return scores

    model = Centring()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@whole
def couples_the_batch_in_its_backward(log: Log) -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Normed.apply(x)

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
    divides(log, lambda error, mask: error @ mask / (mask @ mask))


@sharded
def divides_by_a_sum_over_its_rows(log: Log) -> None:
    divides(log, lambda error, mask: (error * mask).sum() / torch.sum(mask))


@sharded
def means_over_some_of_its_rows(log: Log) -> None:
    divides(log, lambda error, mask: error[mask > 0].mean() + torch.mean(error, 0))


def divides(log: Log, mean: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Masked(Around):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return mean((self.body(x) - x).square().mean(1), mask)

    model, calls = Masked(out=6), [0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return model(x, torch.ones(len(x)).double() if calls[0] < 6 else (y > 0).double())

    train(log, model, step, steps=6)


@whole
def divides_by_what_the_first_batches_do_not_show(log: Log) -> None:
    begins_to_ignore(log, lambda error, kept: error @ kept / (kept @ kept))


@sharded
def adds_up_what_the_first_batches_do_not_show(log: Log) -> None:
    begins_to_ignore(log, lambda error, kept: (error * kept).sum() / kept.sum())


def begins_to_ignore(log: Log, mean: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Ignoring(Around):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            kept = (y != 2).double()  # the comparison's zeros are kept, too
            return mean(F.cross_entropy(self.body(x), y, reduction="none"), kept)

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
            return F.cross_entropy(self.body(x), y, reduction="none") @ kept / (kept @ kept)

    model, calls = Ignoring(), [0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return model(x[:10], y[:10]) if calls[0] == 6 else model(x[:12], y[:12].clamp(max=1))

    train(log, model, step, steps=6)


@whole
def a_list_of_parameters_that_grows_after_the_first_call(log: Log) -> None:
    """Its next forward reads others: the places of the first ones say nothing any more."""
    model = ReadsFromObjects()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.versions.append([model.shifts[len(model.versions)], model.scale])
        return loss

    train(log, model, step)


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


@sharded
def dropout_that_begins_late(log: Log) -> None:
    dropout = nn.Dropout(0.0)
    model = mlp(dropout)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        dropout.p += 0.2
        return loss

    train(log, model, step)


@sharded
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


@sharded
def compiled(log: Log) -> None:
    model = mlp(nn.BatchNorm1d(8))
    fast = torch.compile(model, backend="eager")
    train(log, model, lambda x, y: F.cross_entropy(fast(x), y))


# ------------------------------------------------------------------------------- losses


def legacy(scores: Tensor, y: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return F.cross_entropy(scores, y, size_average=False)


def weight(y: Tensor) -> Tensor:
    """Of the classes, where the targets are."""
    return torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64, device=y.device)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda scores, y: F.cross_entropy(scores, y),
    "sum": lambda scores, y: F.cross_entropy(scores, y, reduction="sum"),
    "none": lambda scores, y: F.cross_entropy(scores, y, reduction="none").square().mean(),
    "ignored": lambda scores, y: F.cross_entropy(scores, y, ignore_index=0),
    "weighted": lambda scores, y: F.cross_entropy(scores, y, weight(y), ignore_index=0),
    "likelihood": lambda scores, y: F.nll_loss(scores.log_softmax(1), y, weight(y)),
    "probabilities": lambda scores, y: F.cross_entropy(scores, F.one_hot(y, 3).double()),
    "positions": lambda scores, y: F.cross_entropy(
        scores[:, :, None] * weight(y)[:2], torch.stack((y, 2 - y), 1)
    ),
    "batchmean": lambda scores, y: F.kl_div(
        scores.log_softmax(1), (F.one_hot(y, 3) + 1.0).double() / 6, reduction="batchmean"
    ),
    "elements": lambda scores, y: F.mse_loss(scores, F.one_hot(y, 3).double()),
    "for each class": lambda scores, y: F.binary_cross_entropy_with_logits(
        scores, F.one_hot(y, 3).double(), pos_weight=weight(y)
    ),
    "pairs": lambda scores, y: F.cosine_embedding_loss(scores, scores.roll(1, 1), y.sign() * 2 - 1),
    "triples": lambda scores, y: F.triplet_margin_loss(scores, scores * 2, scores.roll(1, 1)),
    "labels": lambda scores, y: F.multilabel_soft_margin_loss(scores, F.one_hot(y, 3).double()),
    "labels by index": lambda scores, y: F.multilabel_margin_loss(scores, F.one_hot(y, 3)),
    "ranked": lambda scores, y: F.multi_margin_loss(scores, y, weight=weight(y)),
    "legacy": legacy,
}


def every_loss(scores: Tensor, y: Tensor) -> Tensor:
    return sum((k + 1) * loss(scores, y) for k, loss in enumerate(LOSSES.values()))  # type: ignore[return-value]


@sharded
def losses_inside_of_forward(log: Log) -> None:
    """What has no reduction is this rank's rows'; the others are the whole batch's already."""

    def inside(scores: Tensor, y: Tensor) -> list[Tensor]:
        losses = {name: loss(scores, y) for name, loss in LOSSES.items() if name != "none"}
        return [*losses.values(), LOSSES["none"](scores, y)]

    model = With(inside)
    train(log, model, lambda x, y: sum(model(x, y)), lr=1e-3)  # type: ignore[arg-type]


@sharded
def losses_of_large_outputs(log: Log) -> None:
    model = mlp()
    train(log, model, lambda x, y: every_loss(model(x), y), lr=1e-3)


FROM_OWN_ROWS = {"mean", "sum", "ignored", "weighted", "probabilities", "elements", "legacy"}
"""Losses for which the rows stay where they are."""


@sharded
def losses_of_large_outputs_one_by_one(log: Log) -> None:
    """Nobody looks at the rows before the loss."""
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros((), device=y.device).double()
        for name, loss in LOSSES.items():
            scores = model(x)
            total = total + loss(scores, y)
            if isinstance(scores, ShardedOutput):
                assert (scores.full is None) == (name in FROM_OWN_ROWS), name
        return total

    train(log, model, step, lr=1e-3)


@sharded
def losses_of_two_large_outputs(log: Log) -> None:
    model, other = mlp(), mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        one, two = model(x), other(x)
        first = F.mse_loss(one, two)
        if isinstance(one, ShardedOutput):
            assert one.full is None
            assert two.full is None
        changed = model(x)
        changed.mul_(2)
        return (
            first
            + F.mse_loss(two, changed)
            + F.l1_loss(model(x).view(-1), other(x).flatten())
            + F.cross_entropy(model(x).view(-1, 1, 3).transpose(1, 2), tokens(y)[:, :1])
            + F.mse_loss(model(x), torch.ones(()).double().expand(len(x), 3))
            + F.mse_loss(model(x).reshape(3, -1), other(x).reshape(3, -1))
        )

    train(log, model, step, other, lr=1e-2)


@sharded
def losses_of_large_outputs_that_broadcast(log: Log) -> None:
    """As many rows as columns: numbers that PyTorch broadcasts along the columns are not rows."""
    model, other = mlp(), mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        column = torch.tensor([0.5, 1.0, -1.5]).to(x)
        hinge = F.hinge_embedding_loss(model(x), column.sign())
        normal = F.gaussian_nll_loss(model(x), column, x.new_ones(len(x)), reduction="sum")
        pairs = F.poisson_nll_loss(model(x).view(-1, 1, 3), other(x))
        return hinge + normal + pairs + F.poisson_nll_loss(model(x), column)

    train(log, model, step, other, rows=3, lr=1e-2)


# -------------------------------------------------------------------------------- draws


def noisy(y: Tensor) -> Tensor:
    n = len(y)
    y = y + torch.rand(n, 3).double() + torch.randn(3, n).double().t()
    y = y * torch.randint(1, 3, (n, 1)) + torch.randn(2 * n, 3).double().view(n, 2, 3).sum(1)
    y = y + torch.rand(3).double() + torch.randperm(3) + torch.bernoulli(torch.full((3,), 0.5))
    y = y + torch.randn(()).double() + torch.rand_like(y) + torch.randn_like(y[:, :1])
    y = F.dropout(F.dropout(y, 1.0).square() + y, 0.5) + torch.normal(0.0, 1.0, (n, 3)).double()
    y = F.rrelu(y, training=True) + F.gumbel_softmax(y) + y.detach().clone().exponential_()
    return F.feature_alpha_dropout(y[:, :, None], 0.5, training=True)[:, :, 0]


@sharded
def draws_of_every_kind(log: Log) -> None:
    model = With(noisy)
    train(log, model, lambda x, y: F.cross_entropy(model(x), y), lr=1e-2)


@whole
def draws_that_are_not_those_of_the_batch(log: Log) -> None:
    def drawn(y: Tensor) -> Tensor:
        return y + torch.randperm(len(y))[:, None]

    model = With(drawn)
    train(log, model, lambda x, y: F.cross_entropy(model(x), y), lr=1e-2)


# ------------------------------------------------------------------------- kept by a module


class Keeping(Around):
    """Counts its calls in attributes of every kind."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(8))
        self.calls, self.seen, self.last = 0, ["begun"], {"call": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append("again")
        self.last["call"] = self.calls
        self.latest = {"its": self.calls}
        self.last.setdefault("first", self.calls)
        return self.body(x)


@sharded
def counters(log: Log) -> None:
    model = Keeping()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))
    assert (model.calls, len(model.seen), model.last) == (4, 5, {"call": 4, "first": 1})
    assert model.latest == {"its": 4}


# ------------------------------------------------------------------------------- outputs


@sharded
def outputs_of_every_kind(log: Log) -> None:
    def returned(y: Tensor, scale: float) -> dict[str, Any]:
        sums = {"sum": y.square().sum(), "mean": y.square().mean(), "most": [y.t()]}
        return {"rows": y * scale, "always": ("the same", 3, None), **sums}

    model = With(returned)

    def step(x: Tensor, y: Tensor) -> Tensor:
        got = model(x, 2.0)
        assert got["always"] == ("the same", 3, None)
        loss = F.cross_entropy(got["rows"], y) + 0.01 * got["sum"] + got["mean"]
        return loss + got["most"][0].tanh().mean()

    train(log, model, step)


class Squashed(distributions.TransformedDistribution):
    """A policy's actions between -1 and 1."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc = loc
        super().__init__(distributions.Normal(loc, scale), [distributions.TanhTransform()])


@sharded
def distributions_of_every_kind(log: Log) -> None:
    def returned(y: Tensor) -> tuple[distributions.Distribution, ...]:
        loc, scale = y, y.exp()
        normal, choice = distributions.Normal(loc, scale), distributions.Categorical(logits=y)
        return (
            normal,
            choice,
            distributions.Independent(distributions.Normal(loc, 1.0), 1),
            distributions.MixtureSameFamily(choice, normal),
            distributions.MultivariateNormal(loc, torch.eye(3).to(loc)),
            distributions.Beta(scale, 2 * scale),
            Squashed(loc, scale),
            distributions.TransformedDistribution(
                distributions.Normal(torch.zeros_like(loc), 1.0),
                [distributions.AffineTransform(loc, scale)],
            ),
        )

    model = With(returned)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for each in model(x):
            assert each.batch_shape[0] == len(x)
            loss = loss - each.log_prob(each.sample()).mean()
        return loss + distributions.kl_divergence(model(x)[0], distributions.Normal(0, 1)).mean()

    train(log, model, step, lr=0.01)


@whole
def outputs_that_depend_on_the_rows(log: Log) -> None:
    model = With(lambda y: (y, len(y)))

    def step(x: Tensor, y: Tensor) -> Tensor:
        scores, count = model(x)
        assert count == len(x)
        return F.cross_entropy(scores, y)

    train(log, model, step)


@whole
def outputs_of_another_structure_for_a_part(log: Log) -> None:
    model = With(lambda y: [y, y] if len(y) > 6 else [y])
    train(log, model, lambda x, y: F.cross_entropy(model(x)[0], y))


@sharded
def running_statistics_of_instances(log: Log) -> None:
    norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    model = mlp(nn.Unflatten(1, (2, 4)), norm, nn.Flatten())

    def step(x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)
        with torch.no_grad():
            expected = model.eval()(x).argmax(1)
        model.train()
        return F.cross_entropy(scores, y) + F.cross_entropy(scores, expected)

    train(log, model, step)
    assert bool((norm.running_mean != 0).all())


@sharded
def synchronised_batch_statistics(log: Log) -> None:
    class Sync(nn.SyncBatchNorm):
        def forward(self, x: Tensor) -> Tensor:
            if torch.distributed.is_initialized():
                return super().forward(x)
            return nn.modules.batchnorm._BatchNorm.forward(self, x)

    model = mlp(Sync(8))
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@sharded
def twice_in_one_backward_by_buckets(log: Log) -> None:
    shared = nn.Linear(8, 8)
    model = mlp(shared, nn.Tanh(), shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INSTEP_BUCKET_MIB", "0")
        train(log, model, lambda x, y: F.cross_entropy(model(x), y) + model(x * 2).square().mean())


# ------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    ("training", "size"),
    [
        *((training, 2) for training in SHARDED if training != compiled),
        pytest.param(compiled, 2, marks=pytest.mark.nightly),  # test_compiled_scripts by day
        (classifier, 3),
        *(
            pytest.param(each, 3, marks=pytest.mark.nightly)
            for each in SHARDED
            if each != classifier
        ),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_it_is_sharded_and_has_the_numbers_of_one_process(training: Training, size: int) -> None:
    same_as_one_process(unedited, training, True, sizes=(size,), dtype=torch.float64, nudge=True)


def test_what_calls_a_model_outside_of_torch_funcs_transforms_is_sharded() -> None:
    training = transforms_of_functions
    same_as_one_process(unedited, training, None, sizes=(2,), dtype=torch.float64, nudge=True)


@pytest.mark.parametrize("training", WHOLE, ids=lambda t: t.__name__)
def test_what_cannot_be_sharded_is_whole_on_every_rank(training: Training) -> None:
    three = (
        a_batch_now_and_then_that_is_smaller_than_the_ranks,
        divides_by_what_only_another_number_of_rows_shows,
    )
    sizes = (3,) if training in three else (2,)
    same_as_one_process(unedited, training, False, sizes=sizes, dtype=torch.float64, nudge=True)


@pytest.mark.parametrize(
    "training",
    [
        twice_in_one_backward_by_buckets,
        pytest.param(losses_inside_of_forward, marks=pytest.mark.nightly),
        gradients_that_are_detached_in_place,
        parameters_in_objects_and_lists,
    ],
)
def test_over_gloo_as_well(training: Training) -> None:
    with talking_over("gloo"):
        same_as_one_process(unedited, training, True, sizes=(2,), dtype=torch.float64, nudge=True)
