"""Forwards that keep tensors in attributes, from which the script computes its loss after the
call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.unedited.checkpoint.loop_iterations import LoopIterations
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.run.region import call_state
from oracle import Log, same_as_one_process
from pool import ranks
from sharded_training import Around, Training, sharding, train, unedited

pytestmark = pytest.mark.slow

Step = Callable[[Tensor, Tensor], Tensor]


class Keeping(Around):
    """Keeps what `keep` makes of its features, also in a buffer and in one of a part."""

    def __init__(self, keep: Callable[[Any, Tensor], None], **attributes: Any) -> None:
        super().__init__()
        self.keep, self.part = keep, nn.Module()
        for module in (self, self.part):
            module.register_buffer("term", torch.zeros((), dtype=torch.float64))
        vars(self).update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body[:2](x)
        self.keep(self, features)
        scores: Tensor = self.body[2](features)
        return scores


def keeps(
    keep: Callable[[Any, Tensor], None],
    term: Callable[[Any], Tensor] | None = None,
    before: Callable[[Any], None] | None = None,
    **attributes: Any,
) -> Training:
    """A training whose loss has this term of what the model keeps; `before` each call."""

    def training(log: Log) -> None:
        model = Keeping(keep, **attributes)

        def step(x: Tensor, y: Tensor) -> Tensor:
            if before is not None:
                before(model)
            loss = nn.functional.cross_entropy(model(x), y)
            return loss if term is None else loss + term(model)

        train(log, model, step, steps=6)

    return training


def sets(**values: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], None]:
    def keep(model: Any, features: Tensor) -> None:
        for name, value in values.items():
            setattr(model, name, value(model, features))

    return keep


def sets_once(model: Any, features: Tensor) -> None:
    if model.centre is None:
        model.centre = features.detach().mean(0)
    model.far = (features - model.centre).square().mean()


def sets_in_most_calls(model: Any, features: Tensor) -> None:
    model.calls += 1
    if model.calls % 4:
        model.last = features.square().mean()


def caches_by_length(model: Any, features: Tensor) -> None:
    """Two tables, made anew where the length changes."""
    if not hasattr(model, "cache") or len(model.cache[0]) != model.length:
        places = torch.arange(float(model.length))
        model.cache = (places, places * 0.5)


def keeps_in_a_list_as_well(model: Any, features: Tensor) -> None:
    model.last = features.square().mean()
    model.seen.append(model.last)


def keeps_a_distribution_in_a_dict(model: Any, features: Tensor) -> None:
    model.found["latent"] = torch.distributions.Normal(features, features.exp())


def scales_the_last(model: Any, features: Tensor) -> None:
    last = features.new_ones(()) if model.last is None else model.last.detach()
    model.last = features.square().sum() + 0.5 * last


def begins_later(model: Any) -> None:
    model.step = model.step + 1.0  # a tensor: of a number a comparison would follow
    model.weight = (model.step > 4).double()


class Layer(nn.Module):
    """Attention over features, whose weights a script may look at."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.attention: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(1)
        self.attention, self.balance = gates, gates.mean(0).square().sum()
        return x * gates.repeat(1, 2)


def of_layers(log: Log) -> None:
    layers = nn.Sequential(nn.Linear(6, 8), Layer(), Layer(), nn.Linear(8, 3))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(layers(x), y)
        with torch.no_grad():
            layers(x + 1)
            seen = [layer.attention for layer in layers[1:3]]
        assert [tuple(each.shape) for each in seen] == [(len(x), 4)] * 2
        loss = loss * (1 + sum(float(each.square().sum()) for each in seen))
        layers(x)
        return loss + sum(layer.balance for layer in layers[1:3])

    train(log, layers, step)


def the_gradient_of_features(log: Log) -> None:
    model = Keeping(sets(features=lambda _, h: h))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        (gradient,) = torch.autograd.grad(loss, model.features, create_graph=True)
        return loss + gradient.square().sum()

    train(log, model, step)


def forgets(model: Any) -> None:
    """As pykeen's regularizers forget their terms."""
    for module in (model, model.part):
        module.term = torch.zeros_like(module.term.detach())


def takes_mean(model: Any) -> Tensor:
    mean: Tensor = model.term.mean()
    assert type(model.term) is Tensor  # no rows of one rank alone
    model.term = torch.zeros_like(mean.detach())
    return mean


def adds_to_buffer(module: Callable[[Any], Any]) -> Callable[[Any, Tensor], None]:
    def keep(model: Any, features: Tensor) -> None:
        module(model).term = module(model).term + features.square().mean()

    return keep


def adds_in_place(model: Any, features: Tensor) -> None:
    model.term += features.square().mean()


def of_two_batches(log: Log) -> None:
    model = Keeping(adds_to_buffer(lambda m: m))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y) + model(x + 1).square().mean()
        loss = loss + model.term
        forgets(model)
        return loss

    train(log, model, step, steps=6)


def later_of_two_batches(log: Log) -> None:
    model, steps = Keeping(adds_to_buffer(lambda m: m)), itertools.count()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        if next(steps) >= 6:
            loss = loss + model(x + 1).square().mean()
        loss = loss + model.term
        forgets(model)
        return loss

    train(log, model, step, steps=10)


def between_evaluations(log: Log) -> None:
    model = Keeping(adds_to_buffer(lambda m: m))

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            seen = model(x + 1).square().mean() + model.term
            forgets(model)
        loss = nn.functional.cross_entropy(model(x), y) * (1 + seen) + model.term
        forgets(model)
        return loss

    train(log, model, step, steps=6)


class Sealed(dict):  # type: ignore[type-arg]
    """Its items cannot be changed by these methods, as those of transformers' outputs."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("sealed")

    pop = update


class OfSealed(Keeping):
    def forward(self, given: Sealed) -> Tensor:
        return super().forward(given["x"])


def of_a_sealed_dict(log: Log) -> None:
    model = OfSealed(sets(last=lambda _, h: h.square().mean()))

    def step(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(Sealed(x=x)), y) + model.last

    train(log, model, step, steps=6)


def begins_to_follow(model: Any) -> None:
    model.calls += 1
    model.is_followed = model.calls > 3


def follows_later(model: Any, features: Tensor) -> None:
    features = features if model.is_followed else features.detach()
    model.term = features.square().mean()


DIVIDED: dict[str, tuple[Training, int]] = {
    "features": (
        keeps(sets(features=lambda _, h: h), lambda m: m.features.square().mean()),
        1,
    ),
    "a distribution": (
        keeps(
            sets(latent=lambda _, h: torch.distributions.Normal(h, h.exp())),
            lambda m: m.latent.log_prob(m.latent.sample()).mean(),
        ),
        1,
    ),
    "a mean, of a dict that cannot be updated": (of_a_sealed_dict, 1),
    "a mean, reset": (
        keeps(
            sets(last=lambda _, h: h.square().mean()),
            lambda m: m.last,
            lambda m: setattr(m, "last", 0.0),
            last=0.0,
        ),
        1,
    ),
    "in containers": (
        keeps(
            sets(terms=lambda _, h: [h * 2, {"sum": h.square().sum(), "name": "sum"}]),
            lambda m: m.terms[0].tanh().mean() + 0.01 * m.terms[1]["sum"],
        ),
        1,
    ),
    "a running mean": (
        keeps(
            sets(mean=lambda m, h: 0.9 * m.mean + 0.1 * h.detach().mean(0)),
            lambda m: m.mean.square().sum(),
            mean=0.0,
        ),
        1,
    ),
    "the first rows set the centre": (keeps(sets_once, lambda m: m.far, centre=None), 1),
    "in most calls": (keeps(sets_in_most_calls, lambda m: m.last.detach(), calls=0), 1),
    "a cache": (
        keeps(
            caches_by_length,
            lambda m: m.cache[1].sum(),
            lambda m: setattr(m, "length", m.lengths.pop(0)),
            lengths=[2, 2, 3, 3, 3, 2],
        ),
        1,
    ),
    "zero at first": (
        keeps(
            sets(last=lambda m, h: (h.flatten() @ h.flatten()) * m.weight),
            lambda m: m.last * 1e-2,
            begins_later,
            step=torch.zeros(()),
        ),
        1,
    ),
    "of layers": (of_layers, 1),
    "in a buffer": (
        keeps(adds_to_buffer(lambda m: m), lambda m: m.term, forgets),
        1,
    ),
    "in a buffer of a part": (
        keeps(adds_to_buffer(lambda m: m.part), lambda m: m.part.term, forgets),
        1,
    ),
    "rows in a buffer": (
        keeps(sets(term=lambda _, h: h.square()), takes_mean),
        1,
    ),
    "the gradient of features": (the_gradient_of_features, 1),
}
"""And how many of the calls are whole."""

AT_NIGHT = ("features", "in most calls", "a cache", "zero at first", "of layers")
WHOLE: dict[str, Training] = {
    "a running sum": keeps(
        sets(total=lambda m, h: m.total + h.detach().square().sum()),
        lambda m: m.total * 1e-3,
        total=0.0,
    ),
    "the sum and the last one": keeps(scales_the_last, lambda m: m.last * 1e-3, last=None),
    "the rows before": keeps(
        sets(last=lambda m, h: h[:12].detach() + (0 if m.last is None else m.last)),
        lambda m: m.last.mean(),
        last=None,
    ),
    "the largest": keeps(sets(last=lambda _, h: h.amax()), lambda m: m.last),
    "in a list": keeps(
        lambda m, h: m.seen.append(h.square().mean()), lambda m: m.seen[-1], seen=[]
    ),
    "a distribution in a dict": keeps(
        keeps_a_distribution_in_a_dict, lambda m: m.found["latent"].entropy().mean(), found={}
    ),
    "in a list as well": keeps(keeps_in_a_list_as_well, lambda m: m.seen[-1], seen=[]),
    "in place in a buffer": keeps(adds_in_place, lambda m: m.term, forgets),
    "in a buffer that has a term already": of_two_batches,
}
SOME: dict[str, Training] = {
    "in a buffer, between evaluations": between_evaluations,
    "in a buffer that later has a term already": later_of_two_batches,
    "in a buffer that later gets a graph": keeps(
        follows_later, lambda m: m.term, begins_to_follow, calls=0
    ),
}


def check(log: Log, name: str) -> None:
    training, whole = DIVIDED[name] if name in DIVIDED else ({**WHOLE, **SOME}[name], None)
    unedited(log, training, False)
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        counts = modules.call_counts
        assert whole is None or (counts.whole == whole and counts.sharded > 2 * whole), counts


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if name in AT_NIGHT else ()) for name in DIVIDED],
)
def test_what_is_kept_is_joined_as_outputs_are(name: str) -> None:
    same_as_one_process(check, name, sizes=(2,), dtype=torch.float64, nudge=True)


@pytest.mark.parametrize("name", WHOLE)
def test_what_counts_on_the_whole_batch_is_whole(name: str) -> None:
    same_as_one_process(check, name, sizes=(2,), dtype=torch.float64, nudge=True)


@ranks(2)
def test_calls_before_the_first_graph_are_not_said_to_differ() -> None:
    model = Keeping(adds_to_buffer(lambda m: m)).double()
    with sharding() as log:
        for calls in (1, 1, 1, 1, 1, 1, 2):
            for _ in range(calls):
                scores = model(torch.randn(8, 6).double())
            (scores.sum() + model.term).backward()
            forgets(model)
    assert modules.call_counts.sharded == 6, modules.call_counts
    if instep.rank == 0:
        assert (
            "every rank computes Keeping whole" in log.getvalue() or "some calls" in log.getvalue()
        )
        assert "may differ" not in log.getvalue()


@pytest.mark.parametrize("name", SOME)
def test_a_buffer_may_have_a_graph_in_some_calls_alone(name: str) -> None:
    same_as_one_process(check, name, sizes=(2,), dtype=torch.float64, nudge=True)


LIBRARY = """
import torch

follows = []

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)
        self.register_buffer("term", torch.zeros(()))

    def forward(self, x):
        scores = self.layer(x)
        self.term = (scores if follows else scores.detach()).square().mean()
        return scores
"""


@ranks(2)
def gets_a_graph_unseen() -> None:
    found: dict[str, Any] = {"__name__": "a_library"}
    exec(compile(LIBRARY, "/usr/lib/python3/site-packages/a_library.py", "exec"), found)
    torch.manual_seed(0)
    model = found["Model"]()
    with sharding():
        for _ in range(20):
            model(torch.randn(8, 6))
        assert modules.call_counts.sharded > 0, modules.call_counts
        found["follows"].append(True)
        with pytest.raises(ShardedCallError, match="began to compute its buffer term with a graph"):
            model(torch.randn(8, 6))


def test_a_graph_that_a_library_gives_to_a_buffer_later_is_an_error() -> None:
    gets_a_graph_unseen()


@ranks(2)
def saved_by_rank_0(folder: Path) -> None:
    model = Keeping(sets(features=lambda _, h: h))
    with pytest.MonkeyPatch.context() as patch, sharding():
        patch.setattr(call_state, "saves_attributes", False)
        LoopIterations(folder)
        for _ in range(3):
            model(torch.randn(8, 6))
        assert type(model.features) is Tensor


def test_attributes_that_rank_0_saves_alone_have_all_rows(tmp_path: Path) -> None:
    saved_by_rank_0(tmp_path)
