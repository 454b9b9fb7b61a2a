"""Random numbers of replicas by position in the global batch: ranks in turn, in one process.

Draws need no other rank: each is made for the whole batch. So each rank's forward can be played
after the other; joined, the outputs are those of one rank with all rows, and the gradients' sum its
gradient.
"""

from __future__ import annotations

import random
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import instep
from instep.errors import InstepWarning
from instep.training import replicas
from instep.training.batches import registry
from instep.training.blocks import Block
from instep.training.draws.batch_draws import BatchDrawMode
from pool import run, run_fresh

Body = Callable[["Drawing", Tensor], Tensor]


@pytest.fixture(autouse=True)
def _nothing_delivered() -> None:
    registry.reset()


class Drawing(nn.Module):
    """A model that draws in between of two layers."""

    def __init__(self, body: Body, *parts: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.body = nn.Linear(6, 8), nn.Linear(8, 3), body
        self.parts = nn.ModuleList(parts)
        self.sigma = nn.Parameter(torch.full((8, 8), 0.1))
        self.register_buffer("noise", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self, torch.tanh(self.first(x))))

    def another(self, x: Tensor) -> Tensor:
        return self.last(self.body(self, torch.tanh(self.first(x))))

    def encode(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(torch.tanh(self.first(x)), 0.4))


def played(
    model: nn.Module, x: Tensor, ranks: int, step: int, call: Callable[[Tensor], Tensor]
) -> Any:
    """What all ranks return, joined; the gradients, summed; and the next number outside."""
    outputs: list[Tensor] = []
    for parameter in model.parameters():
        parameter.grad = None
    replica = replicas._replica_of[model]
    following = set()
    for rank in range(ranks):
        replica.steps = step
        torch.manual_seed(5)
        block = Block(rank, ranks, len(x))
        own = block.slice(x)
        registry.end_step()
        registry.register(own, block)
        y = call(own)
        if y.requires_grad and not block.is_empty:
            torch._C._set_grad_enabled(True)
            (y.square().sum() + y.sin().sum()).backward(inputs=list(model.parameters()))
        outputs += [] if block.is_empty else [y.detach()]
        following.add(torch.rand(()).item())
    registry.reset()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(following) == 1, "the generators stay in step"
    return torch.cat(outputs), gradients, following


def same_on_any_number_of_ranks(
    model: nn.Module, rows: int, call: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Play one rank, two and three; returns the outputs."""
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1)).to(model.first.weight)
    call = call or model
    step = replicas._replica_of[model].steps
    whole, gradients, following = played(model, x, 1, step, call)
    for ranks in (2, 3):
        joined, summed, after = played(model, x, ranks, step, call)
        torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(summed, gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert after == following
    return whole


def sized(model: Drawing, y: Tensor) -> Tensor:
    own = torch.rand(y.shape[0], 8) + torch.randn(len(y), 1) + torch.randint(0, 3, (len(y), 8))
    return y + own + torch.randn(8) + torch.rand(1) + torch.normal(0.0, 1.0, (len(y), 8))


def like(model: Drawing, y: Tensor) -> Tensor:
    return y + torch.randn_like(y) * torch.rand_like(y[:, :1]) + torch.randint_like(y, 4)


def in_place(model: Drawing, y: Tensor) -> Tensor:
    y = y + y.new_empty(y.shape).normal_() + torch.empty_like(y).uniform_(-1, 1)
    y = y + y.detach().clone().exponential_() + torch.empty(8).cauchy_().clamp(-1, 1)
    return y + torch.empty(len(y), 8).bernoulli_(0.3) + torch.empty(8, len(y)).log_normal_().t()


def by_values(model: Drawing, y: Tensor) -> Tensor:
    p = y.detach().abs()
    y = y * torch.bernoulli(p) + torch.bernoulli(torch.full((8,), 0.5)) + p.bernoulli(0.3)
    y = y + torch.normal(y.detach(), 0.3) + torch.normal(0.0, p) + torch.normal(y.detach(), p)
    y = y + torch.empty_like(y).bernoulli_(p)
    y = y * F.one_hot(torch.multinomial(p + 0.1, 1)[:, 0], 8)
    return y + torch.multinomial(p + 0.1, 3, replacement=True)[:, :1]


def of_parameters(model: Drawing, y: Tensor) -> Tensor:
    model.noise.normal_()
    weight = model.sigma * torch.randn_like(model.sigma)
    dropped = F.dropout(model.sigma, 0.5) + F.dropout(model.sigma * 2, 0.5)
    return y + model.noise + y @ weight + y @ dropped + torch.randperm(8)


def activations(model: Drawing, y: Tensor) -> Tensor:
    y = F.rrelu(y, 0.1, 0.4, training=True) + F.gumbel_softmax(y) + F.alpha_dropout(y, 0.2, True)
    y = y + F.feature_alpha_dropout(y.view(-1, 4, 2), 0.3, True).reshape(-1, 8)
    return y + torch.alpha_dropout(y, 0.3, True) + torch.dropout(y, 0.3, True)


def attention(model: Drawing, y: Tensor) -> Tensor:
    q = y.view(len(y), 2, 2, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).reshape(len(y), 8)


def flattened(model: Drawing, y: Tensor) -> Tensor:
    z = y.view(2 * len(y), 4)
    z = F.dropout(z + torch.randn_like(z) + torch.randn(2 * len(y), 4), 0.2)
    return z.view(len(y), 8)


def views(model: Drawing, y: Tensor) -> Tensor:
    """As docs/ways.md says: the entries of a row lie side by side."""
    z = F.dropout(torch.stack([y, -y], 1).flatten(0, 1), 0.4)
    return z.view(len(y), 2, 8).sum(1)


def time_first(model: Drawing, y: Tensor) -> Tensor:
    z = torch.stack([y, y.sin(), y.cos(), -y, y, y, y, y])
    z = F.dropout(z + torch.randn_like(z) + torch.randn(8, len(y), 8), 0.2)
    return z.mean(0)


def recomputed(model: Drawing, y: Tensor) -> Tensor:
    def part(y: Tensor) -> Tensor:
        return y + torch.randn_like(y) * y + F.dropout(y, 0.2) + attention(model, y)

    return checkpoint(part, y, use_reentrant=False)


def table(model: Drawing, y: Tensor) -> Tensor:
    """A table of 8 positions, as many as a rank of two has rows of 16."""
    y = y + F.dropout(model.sigma[:, :1] * 2, 0.5).t()
    return y + F.dropout(model.sigma * 2, 0.5).sum(0) + F.dropout(model.sigma[:5] * 2, 0.5).sum(0)


def some_rows(model: Drawing, y: Tensor) -> Tensor:
    chosen = y[:, 0] > 0.2
    out = y.clone()
    out[chosen] = F.dropout(y[chosen], 0.4)
    return out


def noise_of_some_rows(model: Drawing, y: Tensor) -> Tensor:
    def part(y: Tensor) -> Tensor:
        chosen = y[:, 0] > 0.2
        out = y.clone()
        out[chosen] = y[chosen] * torch.randn_like(y[chosen])
        return out

    return checkpoint(part, y, use_reentrant=False)


def sequences(y: Tensor) -> Tensor:
    return torch.stack([y, y.sin(), y.cos()])


def recurrent(model: Drawing, y: Tensor) -> Tensor:
    return sum(part(sequences(y))[0].mean(0) for part in model.parts)


def transformer(model: Drawing, y: Tensor) -> Tensor:
    z = sequences(y)
    encoder, attends = model.parts
    return (encoder(z) + attends(z, z, z)[0] + attends(z, z, z, need_weights=False)[0]).mean(0)


def layer_drop(model: Drawing, y: Tensor) -> Tensor:
    for _ in range(4):
        if torch.rand(1) < 0.5:
            y = y + torch.randn(len(y), 8)
    return y


BODIES: list[Any] = [
    *(sized, like, in_place, by_values, of_parameters, activations, attention, flattened),
    *(time_first, recomputed, layer_drop, table, views),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("rows", [7, 16, 2])
def test_draws_are_those_of_the_whole_batch(body: Body, rows: int) -> None:
    """16 rows: 8 on each of two ranks, as many as there are features."""
    model = instep.replicate(Drawing(body))
    with warnings.catch_warnings():
        warnings.simplefilter("error", InstepWarning)
        first = same_on_any_number_of_ranks(model, rows)
        assert not torch.equal(same_on_any_number_of_ranks(model, rows), first), "new in each step"


@pytest.mark.parametrize("method", ["forward", "another"])
def test_reentrant_checkpoints_draw_the_same_again(method: str) -> None:
    def body(model: Drawing, y: Tensor) -> Tensor:
        if model.is_reentrant:
            return checkpoint(lambda y: F.dropout(y, 0.4), y, use_reentrant=True)
        return F.dropout(y, 0.4)

    model = instep.replicate(Drawing(body))
    gradients = []
    for model.is_reentrant in (True, False):  # the second one would be remembered
        torch.manual_seed(5)
        replicas._replica_of[model].steps = 0
        call = model if method == "forward" else model.another
        call(instep.shard(torch.ones(7, 6))).square().sum().backward()
        gradients.append(model.first.weight.grad)
        model.zero_grad()
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_recurrent_layers(kind: Any) -> None:
    parts = [kind(8, 8, 2, dropout=0.4), kind(8, 4, 3, dropout=0.3, bidirectional=True)]
    same_on_any_number_of_ranks(instep.replicate(Drawing(recurrent, *parts)), 7)


def test_dropout_of_attention() -> None:
    parts = nn.TransformerEncoderLayer(8, 2, 8, 0.3), nn.MultiheadAttention(8, 2, 0.3)
    same_on_any_number_of_ranks(instep.replicate(Drawing(transformer, *parts)), 7)


def attends(model: Drawing, y: Tensor) -> Tensor:
    """Of 3 rows, the masks have as many positions as rows."""
    z = torch.stack([y, y.sin(), y.cos()], 1)
    return model.parts[0](z, z, z)[0].mean(1) + 0.1 * torch.randn_like(y)


@pytest.mark.slow
def test_compiled_code_draws_for_the_rows_that_its_source_draws_for() -> None:
    model = torch.compile(
        Drawing(attends, nn.MultiheadAttention(8, 2, 0.3, batch_first=True)), backend="eager"
    )
    instep.replicate(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler has some of its own
        warnings.simplefilter("error", InstepWarning)
        same_on_any_number_of_ranks(model, 6)


@pytest.mark.parametrize("body", [attention, like, activations])
def test_draws_in_other_dtypes(body: Body) -> None:
    same_on_any_number_of_ranks(instep.replicate(Drawing(body).double()), 7)


def test_draws_in_evaluation_come_from_the_scripts_generator() -> None:
    model = instep.replicate(Drawing(like)).eval()
    first = same_on_any_number_of_ranks(model, 7)
    assert torch.equal(same_on_any_number_of_ranks(model, 7), first)
    assert not torch.equal(model(torch.ones(4, 6)), model(torch.ones(4, 6)))


def test_dropout_in_evaluation_is_new_in_each_call() -> None:
    model = instep.replicate(Drawing(lambda model, y: F.dropout(y, 0.5))).eval()
    x = instep.shard(torch.ones(4, 6))
    assert not torch.equal(model(x), model(x))
    same_on_any_number_of_ranks(model, 7)


def test_other_methods_than_forward() -> None:
    model = instep.replicate(Drawing(like))
    same_on_any_number_of_ranks(model, 7, model.encode)


def packed(model: Drawing, y: Tensor) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(sequences(y), torch.full((len(y),), 3))
    return y + model.parts[0](rows)[1][0][0]


def unlike(model: Drawing, y: Tensor) -> Tensor:
    return y + torch.poisson(y.detach().abs())


def shuffled(model: Drawing, y: Tensor) -> Tensor:
    return y + y[torch.randperm(len(y))]


@pytest.mark.filterwarnings("ignore:Drawing draws random numbers of its own")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (packed, "runs a recurrent layer with dropout on packed sequences"),
        (unlike, r"calls torch.poisson with the rows of the batch"),
        (shuffled, r"calls torch.randperm with the rows of the batch"),
    ],
)
def test_a_line_that_each_rank_draws_for_itself_is_named(body: Body, message: str) -> None:
    parts = [nn.LSTM(8, 8, 2, dropout=0.5)] if body is packed else []
    model, x = instep.replicate(Drawing(body, *parts)), torch.ones(5, 6)
    registry.end_step()
    registry.register(x, Block(0, 2, 10))
    with pytest.warns(InstepWarning, match=f"This line {message}") as warned:
        model(x)
    assert warned[0].filename == __file__
    model(x)  # said once


@pytest.mark.filterwarnings("ignore:Drawing draws random numbers of its own")
def test_masks_that_each_rank_is_asked_to_draw_for_itself_are_not_named() -> None:
    lstm = nn.LSTM(8, 8, 2, dropout=0.5)
    model, x = instep.replicate(Drawing(packed, lstm), dropout="rank"), torch.ones(5, 6)
    registry.end_step()
    registry.register(x, Block(0, 2, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("error", InstepWarning)
        model(x)


def test_a_draw_is_named_of_which_the_rows_are_unknown() -> None:
    model, x = instep.replicate(Drawing(like)), torch.ones(8, 6)
    model.lock = threading.Lock()  # so it cannot be copied
    registry.end_step()
    registry.register(x, Block(0, 2, 16))
    with pytest.warns(InstepWarning, match=r"This line draws \(8, 8\) in a forward with 8 rows"):
        model(x)


def synced(model: Drawing, y: Tensor) -> Tensor:
    return model.parts[0](y) + torch.randn_like(y)


def before_a_layer(model: Drawing, y: Tensor) -> Tensor:
    return model.parts[0](y + torch.randn_like(y))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("normed", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("body", [synced, before_a_layer])
def test_the_rows_of_a_draw_are_known_in_a_model_whose_weights_a_hook_computes(
    normed: Callable[[nn.Module], nn.Module], body: Body
) -> None:
    layer = normed(nn.Linear(8, 8)).eval()  # a step of spectral normalisation changes the layer
    model = instep.replicate(Drawing(body, layer))
    with warnings.catch_warnings():
        warnings.simplefilter("error", InstepWarning)
        same_on_any_number_of_ranks(model, 16)


def draw_after_a_synchronized_layer() -> int:
    model = instep.replicate(Drawing(synced, nn.SyncBatchNorm(8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", InstepWarning)
        return len(model(instep.shard(torch.ones(16, 6))))


def test_the_rows_of_a_draw_are_known_in_a_model_with_synchronized_batch_normalisation() -> None:
    assert run(2, draw_after_a_synchronized_layer) == [8, 8]


@pytest.mark.parametrize(
    ("body", "verb"), [(some_rows, "drops units of"), (noise_of_some_rows, "draws")]
)
def test_a_draw_of_which_the_data_decide_the_rows_is_named(body: Body, verb: str) -> None:
    model = instep.replicate(Drawing(body))
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    played(model, x, 1, 0, model)  # one rank draws for all rows
    message = rf"This line {verb} \(\d, 8\) in a forward with 8 rows on this rank: how many"
    with pytest.warns(InstepWarning, match=message) as warned:
        _ = [played(model, x, 2, step, model) for step in range(3)]
    assert len(warned) == 1, "said once"


def test_a_draw_for_rows_that_the_data_choose_is_named_though_none_were_at_first() -> None:
    chosen = torch.zeros(5, dtype=torch.bool)

    def body(model: Drawing, y: Tensor) -> Tensor:
        kept = chosen.repeat(len(y) // 5)
        return y + torch.randn_like(y[kept]).sum()

    model = instep.replicate(Drawing(body))
    message = r"This line draws \(3, 8\) in a forward with 5 rows on this rank: how many"

    def call() -> None:
        x = torch.ones(5, 6)
        registry.end_step()
        registry.register(x, Block(0, 2, 10))
        model(x)

    call()
    chosen[:3] = True
    with pytest.warns(InstepWarning, match=message):
        call()


def test_a_trial_calls_no_hooks_of_the_script() -> None:
    lengths: list[int] = []

    def body(model: Drawing, y: Tensor) -> Tensor:
        lengths.append(len(y))
        return synced(model, y)

    model, called = instep.replicate(Drawing(body, nn.Linear(8, 8))), []
    model.parts[0].register_forward_pre_hook(lambda *_: called.append("before"))
    model.parts[0].register_forward_hook(lambda *_: called.append("after"))
    x = torch.ones(8, 6)
    registry.end_step()
    registry.register(x, Block(0, 2, 16))
    model(x)
    assert lengths == [8, 16], "there was a trial, with every row twice"
    assert called == ["before", "after"]


def test_a_trial_leaves_the_generators_of_numpy_and_python() -> None:
    numbers: dict[int, tuple[float, float]] = {}

    def body(model: Drawing, y: Tensor) -> Tensor:
        noise = torch.randn(len(y), 8)
        numbers[len(y)] = random.random(), float(np.random.rand())
        return y + noise

    model, x = instep.replicate(Drawing(body)), torch.ones(8, 6)
    random.seed(3)
    np.random.seed(3)
    registry.end_step()
    registry.register(x, Block(0, 2, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstepWarning)
        model(x)
    following = random.random(), float(np.random.rand())
    assert [*numbers] == [16, 8], "there was a trial, with every row twice"
    random.seed(3)
    np.random.seed(3)
    assert numbers[8] == (random.random(), float(np.random.rand()))
    assert following == (random.random(), float(np.random.rand()))


def test_a_model_whose_shapes_go_on_changing_is_not_tried_for_ever() -> None:
    lengths: list[int] = []

    def body(model: Drawing, y: Tensor) -> Tensor:
        lengths.append(len(y))
        torch.randn(len(y) * 3, len(lengths))
        return y

    model, steps = instep.replicate(Drawing(body)), 30
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstepWarning)
        for _ in range(steps):
            x = torch.ones(8, 6)
            registry.end_step()
            registry.register(x, Block(0, 2, 16))
            model(x)
    trials = len(lengths) - steps
    assert 0 < trials <= 10, trials


def test_draws_under_autocast() -> None:
    def body(model: Drawing, y: Tensor) -> Tensor:
        return attention(model, y) + torch.randn_like(y)

    model = instep.replicate(Drawing(body))

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    x = torch.ones(7, 6)
    step = replicas._replica_of[model].steps
    whole, _, _ = played(model, x, 1, step, call)
    joined, _, _ = played(model, x, 3, step, call)
    torch.testing.assert_close(joined, whole, rtol=0.02, atol=0.02)


def numpys(model: Drawing, y: Tensor) -> Tensor:
    return y + float(np.random.rand())


def pythons(model: Drawing, y: Tensor) -> Tensor:
    return y + random.random()


def seeding(model: Drawing, y: Tensor) -> Tensor:
    return y + torch.seed() % 2


@pytest.mark.parametrize(
    ("body", "named"), [(numpys, ""), (pythons, "random "), (seeding, "seed ")]
)
def test_a_draw_of_the_forwards_own_is_named_with_its_line(body: Body, named: str) -> None:
    model, before = instep.replicate(Drawing(body)), torch.get_rng_state()
    line = f"{__file__}:{body.__code__.co_firstlineno + 1}"
    what = f"Drawing draws random numbers of its own in its forward ({named}at {line}); each rank"
    with pytest.warns(InstepWarning, match=re.escape(what)):
        model(torch.ones(4, 6))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("is_for_rows", [False, True])
def test_numbers_of_numpy_and_python_for_the_whole_batch_are_no_warning(is_for_rows: bool) -> None:
    def scaled(model: Drawing, y: Tensor) -> Tensor:
        noise = np.random.beta(0.4, 0.4, len(y) if is_for_rows else 1)
        return y * random.random() + torch.as_tensor(noise, dtype=y.dtype)[:, None]

    model, x = instep.replicate(Drawing(scaled)), instep.shard(torch.ones(4, 6))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x)
    assert [each.category for each in caught] == [InstepWarning] * is_for_rows


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_functions_may_draw() -> None:
    def drawn(x: Tensor) -> Tensor:
        y = torch.rand_like(x) + torch.rand(3) + torch.normal(x, 1.0) + x.clone().normal_()
        return torch.nn.functional.scaled_dot_product_attention(y[None], y[None], y[None])[0]

    instep.replicate(nn.Linear(2, 2))
    assert torch.jit.script(drawn)(torch.zeros(2, 3)).shape == (2, 3)


def test_an_operation_of_dropout_scales_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a replica it is torch's own kernel that comes here, from a function in C++."""
    mode = object.__new__(BatchDrawMode)
    monkeypatch.setattr(mode, "_like", lambda x, fill: fill(torch.empty_like(x)), raising=False)
    for p, train, scale in ((0.75, True, 4.0), (0.75, None, 4.0), (0.75, False, 1.0)):
        kept, mask = mode._dropout(torch.ones(400), p, train)
        assert set(kept.tolist()) == {0.0, scale}
        assert torch.equal(kept, mask * scale)
    assert mode._dropout(torch.ones(4), 1.0, True)[0].tolist() == [0.0] * 4


def test_a_dropout_that_drops_nothing_leaves_the_scripts_generator() -> None:
    def drops_nothing(model: Drawing, y: Tensor) -> Tensor:
        return F.dropout(F.dropout(y, 0.0), 0.4, training=False)

    for model in (instep.replicate(Drawing(drops_nothing)) for _ in range(2)):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        model.eval()(instep.shard(torch.ones(4, 6)))
        assert torch.equal(torch.get_rng_state(), before)


def draw_beside_a_replica() -> None:
    instep.replicate(nn.Linear(2, 2))
    torch.set_default_device("meta")  # torch looks at its functions now
    devices = {torch.rand(2).device, torch.randn(2).device, torch.randperm(3).device}
    assert {device.type for device in devices} == {"meta"}, devices


def test_what_is_drawn_beside_a_replica_is_on_the_default_device() -> None:
    run_fresh(draw_beside_a_replica)
