"""Unedited trainings: losses, draws, states and outputs of many kinds in one divided call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.run.sharded_output import ShardedOutput
from oracle import Log, same_as_one_process
from pool import ranks, talking_over
from test_divided_calls import LARGE, Around, dividing, mlp, tokens, train, unedited

Training = Callable[[Log], None]
DIVIDED: list[Training] = []
WHOLE: list[Training] = []


def divided(training: Training) -> Training:
    DIVIDED.append(training)
    return training


def whole(training: Training) -> Training:
    WHOLE.append(training)
    return training


@pytest.mark.parametrize("training", DIVIDED, ids=lambda t: t.__name__)
def test_it_is_divided_and_has_the_numbers_of_one_process(training: Training) -> None:
    same_as_one_process(unedited, training, True, sizes=(3,), dtype=torch.float64, nudge=True)


@pytest.mark.parametrize("training", WHOLE, ids=lambda t: t.__name__)
def test_what_cannot_be_divided_is_whole_on_every_rank(training: Training) -> None:
    same_as_one_process(unedited, training, False, sizes=(3,), dtype=torch.float64, nudge=True)


class With(Around):
    """An mlp whose outputs go through a function, with whatever else it is given."""

    def __init__(self, function: Callable[..., Any], *middle: nn.Module) -> None:
        super().__init__(*middle)
        self.function = function

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.function(self.body(x), *others)


# ------------------------------------------------------------------------------- losses


def legacy(scores: Tensor, y: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return F.cross_entropy(scores, y, size_average=False)


WEIGHT = torch.tensor([0.5, 2.0, 1.0]).double()
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda scores, y: F.cross_entropy(scores, y),
    "sum": lambda scores, y: F.cross_entropy(scores, y, reduction="sum"),
    "none": lambda scores, y: F.cross_entropy(scores, y, reduction="none").square().mean(),
    "ignored": lambda scores, y: F.cross_entropy(scores, y, ignore_index=0),
    "weighted": lambda scores, y: F.cross_entropy(scores, y, WEIGHT, ignore_index=0),
    "likelihood": lambda scores, y: F.nll_loss(scores.log_softmax(1), y, WEIGHT),
    "probabilities": lambda scores, y: F.cross_entropy(scores, F.one_hot(y, 3).double()),
    "positions": lambda scores, y: F.cross_entropy(
        scores[:, :, None] * WEIGHT[:2], torch.stack((y, 2 - y), 1)
    ),
    "batchmean": lambda scores, y: F.kl_div(
        scores.log_softmax(1), (F.one_hot(y, 3) + 1.0).double() / 6, reduction="batchmean"
    ),
    "elements": lambda scores, y: F.mse_loss(scores, F.one_hot(y, 3).double()),
    "for each class": lambda scores, y: F.binary_cross_entropy_with_logits(
        scores, F.one_hot(y, 3).double(), pos_weight=WEIGHT
    ),
    "pairs": lambda scores, y: F.cosine_embedding_loss(scores, scores.roll(1, 1), y.sign() * 2 - 1),
    "triples": lambda scores, y: F.triplet_margin_loss(scores, scores * 2, scores.roll(1, 1)),
    "labels": lambda scores, y: F.multilabel_soft_margin_loss(scores, F.one_hot(y, 3).double()),
    "labels by index": lambda scores, y: F.multilabel_margin_loss(scores, F.one_hot(y, 3)),
    "ranked": lambda scores, y: F.multi_margin_loss(scores, y, weight=WEIGHT),
    "legacy": legacy,
}


def every_loss(scores: Tensor, y: Tensor) -> Tensor:
    return sum((k + 1) * loss(scores, y) for k, loss in enumerate(LOSSES.values()))  # type: ignore[return-value]


@divided
def losses_inside_of_forward(log: Log) -> None:
    """What has no reduction is this rank's rows'; the others are the whole batch's already."""

    def inside(scores: Tensor, y: Tensor) -> list[Tensor]:
        losses = {name: loss(scores, y) for name, loss in LOSSES.items() if name != "none"}
        return [*losses.values(), LOSSES["none"](scores, y)]

    model = With(inside)
    train(log, model, lambda x, y: sum(model(x, y)), lr=1e-3)  # type: ignore[arg-type]


@divided
def losses_of_large_outputs(log: Log) -> None:
    model = mlp()
    train(log, model, lambda x, y: every_loss(model(x), y), lr=1e-3)


FROM_OWN_ROWS = {"mean", "sum", "ignored", "weighted", "probabilities", "elements", "legacy"}
"""Losses for which the rows stay where they are."""


@divided
def losses_of_large_outputs_one_by_one(log: Log) -> None:
    """Nobody looks at the rows before the loss."""
    model = mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(()).double()
        for name, loss in LOSSES.items():
            scores = model(x)
            total = total + loss(scores, y)
            if isinstance(scores, ShardedOutput):
                assert (scores.full is None) == (name in FROM_OWN_ROWS), name
        return total

    train(log, model, step, lr=1e-3)


@divided
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


for training in (losses_of_large_outputs, losses_of_large_outputs_one_by_one):
    LARGE[training.__name__] = 0
LARGE[losses_of_two_large_outputs.__name__] = 0


# -------------------------------------------------------------------------------- draws


def noisy(y: Tensor) -> Tensor:
    n = len(y)
    y = y + torch.rand(n, 3).double() + torch.randn(3, n).double().t()
    y = y * torch.randint(1, 3, (n, 1)) + torch.randn(2 * n, 3).double().view(n, 2, 3).sum(1)
    y = y + torch.rand(3).double() + torch.randperm(3) + torch.bernoulli(torch.full((3,), 0.5))
    y = y + torch.randn(()).double() + torch.rand_like(y) + torch.randn_like(y[:, :1])
    y = F.dropout(F.dropout(y, 1.0).square() + y, 0.5)
    return F.feature_alpha_dropout(y[:, :, None], 0.5, training=True)[:, :, 0]


@divided
def draws_of_every_kind(log: Log) -> None:
    model = With(noisy)
    train(log, model, lambda x, y: F.cross_entropy(model(x), y), lr=1e-2)


@whole
def draws_that_are_not_those_of_the_batch(log: Log) -> None:
    def drawn(y: Tensor) -> Tensor:
        return y + torch.normal(0.0, 1.0, (len(y), 3)).double()

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


@divided
def counters(log: Log) -> None:
    model = Keeping()
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))
    assert (model.calls, len(model.seen), model.last) == (4, 5, {"call": 4, "first": 1})
    assert model.latest == {"its": 4}


# ------------------------------------------------------------------------------- outputs


@divided
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


@divided
def synchronised_batch_statistics(log: Log) -> None:
    class Sync(nn.SyncBatchNorm):
        def forward(self, x: Tensor) -> Tensor:
            if torch.distributed.is_initialized():
                return super().forward(x)
            return nn.modules.batchnorm._BatchNorm.forward(self, x)

    model = mlp(Sync(8))
    train(log, model, lambda x, y: F.cross_entropy(model(x), y))


@divided
def twice_in_one_backward_by_buckets(log: Log) -> None:
    shared = nn.Linear(8, 8)
    model = mlp(shared, nn.Tanh(), shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INSTEP_BUCKET_MIB", "0")
        train(log, model, lambda x, y: F.cross_entropy(model(x), y) + model(x * 2).square().mean())


@pytest.mark.parametrize("training", [twice_in_one_backward_by_buckets, losses_inside_of_forward])
def test_over_gloo_as_well(training: Training) -> None:
    with talking_over("gloo"):
        same_as_one_process(unedited, training, True, sizes=(2,), dtype=torch.float64, nudge=True)


@ranks(2)
def test_a_model_that_was_made_in_inference_mode_is_divided() -> None:
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        model = mlp(nn.BatchNorm1d(8)).eval()
        expected = model(x)
        with dividing() as said:
            torch.testing.assert_close(model(x), expected)
            assert (modules.call_counts.sharded, said.getvalue()) == (1, "")


@ranks(2)
def test_contexts_of_gradient_checkpointing_are_entered_inside_of_a_call_and_outside() -> None:
    entered: list[str] = []

    class Noted(AbstractContextManager[None]):
        def __init__(self, what: str) -> None:
            self.what = what

        def __enter__(self) -> None:
            entered.append(self.what)

        def __exit__(self, *error: object) -> None:
            pass

    def saving(function: Callable[..., Any], x: Tensor) -> Tensor:
        contexts = (Noted("forward"), Noted("again"))
        result: Tensor = torch.utils.checkpoint.checkpoint(
            function, x, use_reentrant=False, context_fn=lambda: contexts
        )
        return result

    with dividing():
        model = With(lambda y: saving(torch.sin, y))
        model(torch.ones(12, 6)).sum().backward()
        assert modules.call_counts.sharded == 1
        del entered[:]
        model(torch.ones(12, 6)).sum().backward()
        assert entered == ["forward", "again"]
        saving(torch.sin, torch.ones(3, requires_grad=True)).sum().backward()
        assert entered == ["forward", "again"] * 2
