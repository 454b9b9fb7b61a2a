"""Arguments and outputs of sharded calls beside tensors: containers, strings, numbers,
objects that a forward changes.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import instep
from instep.errors import ShardedCallError
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.plan.plan_cache import MAX_ENTRIES, MAX_TEXTS, _plans
from instep.unedited.sharded_call.run import sharded_output
from oracle import Log, same_as_one_process
from pool import ranks
from sharded_training import Around, sharding, train, unedited

pytestmark = pytest.mark.slow


@dataclass
class Output:
    scores: Tensor
    features: Any = None
    shift: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.shift = self.scores * 0


@dataclass(frozen=True)
class Frozen:
    output: Output
    name: str = "frozen"


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    scores: Any = None
    features: Any = None

    def __post_init__(self) -> None:
        for each in fields(self):
            self[each.name] = getattr(self, each.name)


class Own:
    def __init__(self, scores: Tensor, features: Tensor) -> None:
        self.scores, self.features = scores, features


class Named(dict):  # type: ignore[type-arg]
    scores = property(lambda self: self["scores"])
    features = property(lambda self: self["features"])


class Pair(tuple):  # type: ignore[type-arg]
    scores = property(lambda self: self[0])
    features = property(lambda self: self[1])


class Encoding(UserDict):  # type: ignore[type-arg]
    scores = property(lambda self: self["scores"])
    features = property(lambda self: self["features"])


class Layer:
    """A stand-in for transformers' DynamicLayer."""

    __module__ = "transformers.cache_utils"

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.dtype, self.is_initialized, self.seen = keys.dtype, True, 0
        self.keys, self.values, self.window = keys, values, torch.tensor(16)


class DynamicCache:
    """A stand-in for transformers' class, which no table of containers holds."""

    __module__ = "transformers.cache_utils"

    def __init__(self, *layers: Layer) -> None:
        self.layers, self.layer_class_to_replicate = list(layers), Layer

    scores = property(lambda self: self.layers[0].keys)
    features = property(lambda self: self.layers[0].values)


MAKERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a dataclass": Output,
    "a frozen dataclass around another": lambda scores, f: Frozen(Output(scores, f)),
    "a dict whose items are attributes": ModelOutput,
    "a namespace": lambda scores, f: SimpleNamespace(scores=scores, features=f),
    "a dict of its own class": lambda scores, f: Named(scores=scores, features=f),
    "a named tuple made anew": lambda *both: namedtuple("Given", "scores features")(*both),
    "a tuple of its own class": lambda scores, f: Pair((scores, f)),
    "a dict around a dict": lambda scores, f: Encoding(scores=scores, features=f),
    "a cache": lambda scores, f: DynamicCache(Layer(scores, f)),
    "an object": Own,
}


class Giving(Around):
    """Returns what `maker` makes of its scores and features."""

    def __init__(self, maker: str) -> None:
        super().__init__()
        self.maker = maker

    def forward(self, x: Tensor) -> Any:
        features = self.body[1](self.body[0](x))
        return MAKERS[self.maker](self.body[2](features), features)


def giving(log: Log, maker: str) -> None:
    model = Giving(maker)

    def step(x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        output = getattr(output, "output", output)
        assert len(output.scores) == len(output.features) == len(x)
        return F.cross_entropy(output.scores, y) + output.features.square().mean()

    train(log, model, step)


@pytest.mark.parametrize("maker", MAKERS)
def test_outputs_in_containers_of_many_kinds(maker: str) -> None:
    sizes = (3,) if maker == "a cache" else (2,)
    same_as_one_process(
        _with_arguments, giving, maker != "an object", maker, sizes=sizes, dtype=torch.float64
    )


def _with_arguments(log: Log, training: Callable[..., None], is_sharded: bool, *args: Any) -> None:
    def trained(log: Log) -> None:
        training(log, *args)

    unedited(log, trained, is_sharded)


@ranks(2)
def test_an_object_into_which_nobody_looks_is_named() -> None:
    class Counting(nn.Linear):
        def forward(self, input: Tensor) -> Any:  # noqa: A002  (torch's name)
            return len(input)

    with sharding() as log:
        Giving("an object")(torch.randn(6, 6))
        Counting(6, 6)(torch.randn(6, 6))
    if instep.rank == 0:
        first, second = log.getvalue().splitlines()
        assert first == (
            "instep: every rank computes Giving whole: it returns a Own, into which instep does "
            "not look (return a tuple, a dict or a dataclass, or register that class with "
            "torch.utils._pytree.register_pytree_node). [INS711]"
        )
        assert second == (
            "instep: every rank computes Counting whole: it returns no tensor. [INS711]"
        )


class Model(Around):
    """As language models of transformers: makes a cache, or adds to the one that it is given."""

    calls = 0

    def forward(self, x: Tensor, cache: DynamicCache | None = None) -> SimpleNamespace:
        Model.calls += 1
        features = self.body(x)
        if cache is None:
            cache = DynamicCache()
        cache.layers.append(Layer(features * 2, features.detach()))
        keys = torch.stack([layer.keys for layer in cache.layers])
        return SimpleNamespace(scores=keys.sum(0), cache=cache)


@ranks(2)
def test_what_is_in_a_cache_stays_on_its_ranks_until_it_is_read() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(6, 6)
    expected = model(x)
    with sharding():
        for _ in range(2):
            output = model(x)
            assert type(output.scores) is Tensor
            (layer,) = output.cache.layers
            assert (type(output.cache), type(layer)) == (DynamicCache, Layer)
            assert layer.keys.shape == (6, 3)
            assert layer.keys.full is layer.values.full is None
        assert torch.allclose(layer.values, expected.cache.layers[0].values)
        assert layer.keys.full is None
        (slope,) = torch.autograd.grad(layer.keys.sum(), model.body[2].bias)
    assert torch.equal(slope, torch.full((3,), 12.0))
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (2, 0)


@pytest.mark.parametrize("learning", [False, True])
@ranks(2)
def test_a_call_that_is_given_a_cache_is_made_once_and_whole(learning: bool) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(6, 6)

    def generate() -> list[Tensor]:
        cache = DynamicCache()
        return [model(x, cache).scores for _ in range(3)] + [model(x, cache=cache).scores]

    with torch.set_grad_enabled(learning):
        expected = generate()
        with sharding() as log:
            model(x)
            Model.calls = 0
            outputs = generate()
    assert all(map(torch.allclose, outputs, expected))
    assert Model.calls == 4
    parts = 4 if learning else 0  # a token of a text that is generated is not worth a message
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (1 + parts, 4)
    if instep.rank == 0:
        assert log.getvalue() == (
            "instep: every rank computes Model whole where it is given a DynamicCache, which it "
            "changes, as in generate(); other calls are not affected. [INS711]\n"
        )


# ------------------------------------------------------------------ tensors of other classes


class Described(Tensor):
    """A stand-in for monai's MetaTensor: hands its description on to what is computed from it."""

    description = ""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Described):
            given = [x for x in args if isinstance(x, Described) and x.description]
            result.description = given[0].description if given else ""
        return result

    def new_empty(self, size: tuple[int, ...]) -> Any:  # type: ignore[override]
        return super().new_empty(tuple(iter(size)))  # not an int, for all of torch's forms


def described(x: Tensor, description: str) -> Described:
    each = x.as_subclass(Described)
    each.description = description
    return each


@pytest.mark.parametrize("tells_rows", [False, True])
@ranks(3)
def test_tensors_of_another_class_keep_their_attributes(tells_rows: bool) -> None:
    class Reading(Around):
        def forward(self, x: Tensor) -> Tensor:
            y = F.cross_entropy(self.body(x), torch.zeros(len(x)).long()) + self.body(x)
            return described(y, f"{len(y)} rows") if tells_rows else y

    torch.manual_seed(0)
    model, x = Reading(nn.BatchNorm1d(8)), described(torch.randn(7, 6), "a scan")
    expected = model(x)
    with pytest.MonkeyPatch.context() as patch, sharding() as log:
        for large in (2**20, 0):
            patch.setattr(sharded_output, "LARGE", large)
            output = model(x)
            assert type(output) is Described
            assert output.description == ("7 rows" if tells_rows else "a scan")
            assert torch.allclose(output, expected)
            assert not output.sum().backward()
    assert modules.call_counts.whole == (2 if tells_rows else 0), log.getvalue()
    if tells_rows and instep.rank == 0:
        assert "it returns a Described whose attributes depend on the rows." in log.getvalue()


# ------------------------------------------------------------------ arguments: rows of any kind


@dataclass
class Batch:
    x: Tensor
    captions: list[str]
    lengths: tuple[int, ...]
    scale: float = 1.0


class RowCount:
    computed = 0


row_count = RowCount()
counted: Any = weakref.ref(row_count)
"""Nobody looks behind it for what a forward changes."""


class Reading(Around):
    """Turns captions into numbers by itself."""

    def forward(self, batch: Batch) -> SimpleNamespace:
        counted().computed += len(batch.x)
        words = torch.tensor([len(caption) for caption in batch.captions]).double()
        seen = torch.tensor(batch.lengths).double()
        scores = self.body(batch.x * batch.scale) * words[:, None] + seen[:, None]
        return SimpleNamespace(scores=scores, captions=[c.upper() for c in batch.captions])


def batch_of(x: Tensor, y: Tensor, step: int) -> Batch:
    captions = [f"{step} {'ab'[k % 2] * (k % 3)}" for k in range(len(x))]
    return Batch(x, captions, tuple((y % 2).tolist()), scale=1 / (1 + step))


def captions(log: Log) -> None:
    model, steps = Reading(), [0]
    counted().computed = 0
    rows = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        nonlocal rows
        rows += len(x)
        steps[0] += 1
        batch = batch_of(x, y, steps[0])
        output = model(batch)
        assert output.captions == [caption.upper() for caption in batch.captions]
        return F.cross_entropy(output.scores, y)

    train(log, model, step, steps=36)
    if torch.distributed.is_initialized():
        entries = _plans[model].entries
        assert len(entries) == 1
        assert counted().computed < 0.95 * rows  # a third of most batches, all of some


def test_captions_and_lists_of_numbers_are_sharded_with_the_rows() -> None:
    same_as_one_process(unedited, captions, True, sizes=(3,), dtype=torch.float64, nudge=True)


@ranks(2)
def test_a_batch_that_is_a_dict_around_a_dict_is_sharded() -> None:
    class Reader(Around):
        def forward(self, batch: Encoding) -> Encoding:
            assert type(batch) is Encoding
            return Encoding(scores=self.body(batch["x"]) + batch["shift"])

    model, batch = Reader(), Encoding(x=torch.randn(6, 6), shift=torch.randn(6, 1))
    expected = model(batch)["scores"]
    with sharding():
        outputs = [model(batch) for _ in range(2)]
    assert all(torch.allclose(output["scores"], expected) for output in outputs)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (2, 0)


class Switching(Around):
    """What it does depends on values that are no tensors."""

    def __init__(self, coupled: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.coupled = coupled

    def forward(self, x: Tensor, how: Any) -> Tensor:
        y = self.body(x)
        if how in self.coupled:
            y = y - y.amax(0)
        return y.sum() if how == "sum" else y.square().mean() if how == "mean" else y


@ranks(2)
def test_each_value_of_a_flag_is_compared_for_itself() -> None:
    torch.manual_seed(0)
    model, x = Switching(coupled=("centred",)), torch.randn(6, 6)
    flags = ["sum", "mean", "plain", "centred"] * 2
    expected = [model(x, how) for how in flags]
    with sharding():
        outputs = [model(x, how) for how in flags]
    assert all(map(torch.allclose, outputs, expected))
    parts = 1  # of the second call that is whole, its body is sharded
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (6 + parts, 2)


class Kind(Enum):
    PLAIN = 0
    CENTRED = 1


@pytest.mark.parametrize("flags", [(True, False), (Kind.PLAIN, Kind.CENTRED)])
@ranks(2)
def test_booleans_and_enums_are_flags(flags: tuple[Any, Any]) -> None:
    model, x = Switching(coupled=flags[1:]), torch.randn(6, 6)
    expected = [model(x, how) for how in flags]
    with sharding():
        outputs = [model(x, how) for how in flags]
    assert all(map(torch.allclose, outputs, expected))
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (1, 1)


class Sized(Around):
    def forward(self, x: Tensor, shape: list[int]) -> Tensor:
        return self.body(x.view(-1, *shape).flatten(1))


@ranks(2)
def test_numbers_that_only_happen_to_be_as_many_as_the_rows_are_not_sharded() -> None:
    with sharding():
        Sized()(torch.randn(2, 6), [2, 3])
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (1, 0)


class ReadingAll(Around):
    def forward(self, x: Tensor, captions: list[str]) -> Tensor:
        if len(captions) != 6:
            raise ValueError("some captions are missing")
        y = self.body(x)
        return y - y.amax(0) if "centred" in captions else y


@ranks(2)
def test_strings_of_all_rows_that_are_needed_on_every_rank_keep_the_module_whole() -> None:
    model, x = ReadingAll(), torch.randn(6, 6)
    captions = [[f"caption {k}"] * 5 + [end] for k, end in enumerate(["a", "b", "centred"])]
    expected = [model(x, each) for each in captions]
    with sharding():
        outputs = [model(x, each) for each in captions]
    assert all(map(torch.allclose, outputs, expected))
    assert modules.call_counts.whole == 3


class Counted:
    """Counts the rows that modules compute."""

    def __init__(self, model: Around) -> None:
        self.rows = 0
        layer = model.body[0]
        forward = layer.forward

        def counted(x: Tensor) -> Tensor:
            self.rows += len(x)
            return forward(x)

        hidden = itertools.repeat(counted).__next__  # a count of rows makes the module whole
        layer.forward = lambda x: hidden()(x)


@ranks(2)
def test_ever_new_strings_cost_neither_two_forwards_nor_memory() -> None:
    model, x = Switching(coupled=("47",)), torch.randn(6, 6)
    expected = model(x, "47")
    counted = Counted(model)
    with sharding() as log:
        outputs = [model(x, str(k)) for k in range(48)]
    assert torch.allclose(outputs[-1], expected)
    later = 48 - MAX_TEXTS  # are whole, but for the part that sees no strings
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (
        MAX_TEXTS + later,
        later,
    )
    compared = 2  # the first and the tenth call of that part
    probed = 3 * (MAX_TEXTS + 1)  # the first ones, with other arguments
    assert counted.rows == (MAX_TEXTS + probed) * (6 + 3) + compared * 6 + later * 3
    assert len(_plans[model].entries) == MAX_TEXTS
    if instep.rank == 0:
        assert log.getvalue().count("\n") == 1
        assert ": more than 16 different strings came with its batches" in log.getvalue()


@ranks(2)
def test_ever_new_kinds_of_arguments_are_computed_once_in_the_end() -> None:
    class Taking(Around):
        def forward(self, x: Tensor, **names: Tensor) -> Tensor:
            return self.body(x)

    model, x = Taking(), torch.randn(6, 6)
    counted = Counted(model)
    with sharding(), torch.no_grad():
        for k in range(MAX_ENTRIES + 8):
            model(x, **{f"name{k}": x})
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (
        MAX_ENTRIES + 8,
        8,
    )
    probed = 3 * (MAX_ENTRIES + 1)
    assert counted.rows == (MAX_ENTRIES + probed) * 9 + 6 + 8 * 3
    assert len(_plans[model].entries) == MAX_ENTRIES


@ranks(2)
def test_coupling_that_begins_with_an_epoch_is_seen_at_its_first_call() -> None:
    model, x = Switching(coupled=(9, 10)), torch.randn(6, 6)
    epochs = [epoch for epoch in range(11) for _ in range(12)]
    expected = [model(x, epoch) for epoch in epochs]
    with sharding():
        outputs = [model(x, epoch) for epoch in epochs]
    assert all(map(torch.allclose, outputs, expected))
    parts = 23  # all but the first of the last two epochs
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (9 * 12 + parts, 2 * 12)


@ranks(2)
def test_a_step_counter_is_compared_ever_more_seldom() -> None:
    model, x = Switching(), torch.randn(6, 6)
    counted = Counted(model)
    with sharding():
        for step in range(128):
            model(x, step / 128)
    compared = 4 + 5 + 2  # the first, then 8, 16 ... 128, and the samples at 10 and 100
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (128, 0)
    probed = 3 + 2  # in the first call with other arguments, in the second with another number
    assert counted.rows == 128 * 3 + compared * 6 + probed * (6 + 3)
    assert len(_plans[model].entries) == 1


# ------------------------------------------------------------------ arguments: changed in place


class Cache:
    """As language models have it: each call adds what it has seen."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []


class Remembering(Around):
    def forward(self, x: Tensor, memory: Any) -> Tensor:
        features = self.body(x)
        layers = memory.layers if isinstance(memory, Cache) else memory["layers"]
        layers.append({"features": features.detach()})
        return features + sum(layer["features"].mean(1, keepdim=True) for layer in layers)


@pytest.mark.parametrize("kind", ["object", "dict"])
@ranks(2)
def test_what_a_forward_adds_to_its_arguments_is_added_once(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Remembering(), torch.randn(6, 6)

    def played() -> tuple[list[Tensor], Any]:
        memory: Any = Cache() if kind == "object" else {"layers": []}
        return [model(x, memory) for _ in range(4)], memory

    expected, _ = played()
    with sharding() as log:
        outputs, memory = played()
    layers = memory.layers if kind == "object" else memory["layers"]
    assert all(map(torch.equal, outputs, expected))
    assert [layer["features"].shape for layer in layers] == [(6, 3)] * 4
    assert modules.call_counts.whole == 4
    if instep.rank == 0:
        assert "Remembering whole: its forward changes its arguments." in log.getvalue()


class ChangingLater(Around):
    def forward(self, x: Tensor, memory: list[Tensor], change: Tensor) -> Tensor:
        if change > 0:
            memory.append(x)
        if change < 0:
            x.mul_(2)
        return self.body(x)


@ranks(2)
def test_a_list_that_is_changed_after_the_proof_is_changed_by_the_whole_call() -> None:
    model, memory, x = ChangingLater(), Cache(), torch.randn(6, 6)
    with sharding():
        for change in (0.0, 0.0, 1.0):
            model(x, memory.layers, torch.tensor(change))
    assert [each is x for each in memory.layers] == [True]
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (2, 1)


@ranks(2)
def test_a_tensor_that_is_changed_after_the_proof_is_changed_once() -> None:
    model, memory, x = ChangingLater(), Cache(), torch.randn(6, 6)
    changed = 2 * x
    with sharding():
        for change in (0.0, 0.0, -1.0):
            model(x, memory.layers, torch.tensor(change))
    assert torch.equal(x, changed)


class ChangingUnseen(Around):
    """Changes its input without a branch."""

    def forward(self, x: Tensor, kind: Cache) -> Tensor:
        methods = x.mul, x.mul_
        methods[len(kind.layers)](2)
        return self.body(x)


@ranks(2)
def test_a_tensor_that_is_changed_in_a_call_that_nobody_watches_is_an_error() -> None:
    model, kind, x = ChangingUnseen(), Cache(), torch.randn(6, 6)
    with sharding():
        for _ in range(65):
            model(x, kind)
        kind.layers.append(x)
        with pytest.raises(ShardedCallError, match="ChangingUnseen began to change its arguments"):
            model(x, kind)


class Attending(Around):
    """Uses all rows of a memory for each row of its input."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.body(x) * memory.mean(0)


def gradients_through_memory(encoder: nn.Module, decoder: nn.Module) -> list[Tensor]:
    x, other = torch.arange(36.0).view(6, 6).sin(), torch.arange(24.0).view(4, 6).cos()
    for _ in range(4):
        decoder(x, encoder(other)).square().sum().backward()
    return [
        p.grad for model in (encoder, decoder) for p in model.parameters() if p.grad is not None
    ]


@ranks(2)
def test_a_sharded_output_that_each_rank_needs_whole_has_the_whole_gradient() -> None:
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(6, 3), Attending()
    expected = [g.clone() for g in gradients_through_memory(encoder, decoder)]
    for model in (encoder, decoder):
        model.zero_grad()
    with sharding(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_output, "LARGE", 0)
        found = gradients_through_memory(encoder, decoder)
    assert modules.call_counts.sharded == 8
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------ arrays, and lists of samples


class OfArrays(Around):
    def forward(self, batch: dict[str, Any], scale: Any = 1) -> Tensor:
        x, weights = torch.from_numpy(batch["x"]), torch.tensor(batch["weights"])
        return self.body(x) * weights[:, None] * scale


def arrays(log: Log) -> None:
    model = OfArrays(nn.BatchNorm1d(8), nn.Dropout(0.3))

    def step(x: Tensor, y: Tensor) -> Tensor:
        batch = {"x": x.numpy(), "weights": np.linspace(0.5, 1, len(x))}
        return F.cross_entropy(model(batch, np.float64(2)), y)

    train(log, model, step)


class OfSamples(Around):
    """As detectors: gets an image and a target for each sample, returns losses, or a dict for
    each image."""

    def __init__(self, *, pads: bool = False) -> None:
        super().__init__(nn.BatchNorm1d(8))
        self.pads = pads

    def forward(self, images: Any, targets: Any = None) -> Any:
        longest = max(map(len, images))
        if self.pads:
            images = [F.pad(image, (0, 0, 0, longest - len(image))) for image in images]
        scores = self.body(torch.stack([torch.tanh(image).mean(0) for image in images]))
        if targets is None:
            return [{"scores": row[row > 0], "most": row.argmax()} for row in scores]
        labels = torch.stack([target["label"] for target in targets])
        return {"label": F.cross_entropy(scores, labels), "size": scores.square().mean()}


def images_of(x: Tensor, *, lengths: int, least: int = 3) -> list[Tensor]:
    """Of each row an image: of so many lines at least, and so many different lengths."""
    ends = enumerate(least + k % lengths for k in range(len(x)))
    return [torch.stack([x[k] * line for line in range(end)]) for k, end in ends]


def images(log: Log, kind: type[Any]) -> None:
    model, shown = OfSamples(), []

    def step(x: Tensor, y: Tensor) -> Tensor:
        targets = [{"label": label, "boxes": torch.ones(k, 4)} for k, label in enumerate(y)]
        losses = model(kind(images_of(x, lengths=4)), targets)
        model.eval()
        with torch.no_grad():
            shown.append(model(kind(images_of(x, lengths=4))))
        model.train()
        loss: Tensor = sum(losses.values())
        return loss + sum(each["most"] for each in shown[-1]) + shown[-1][-1]["scores"].numel()

    train(log, model, step)


def padded_images(log: Log) -> None:
    """In the first steps all of a batch are as long: longer in each of more steps than shapes are
    compared anew. Then their lengths differ."""
    model, steps = OfSamples(pads=True), []

    def step(x: Tensor, y: Tensor) -> Tensor:
        steps.append(0)
        targets = [{"label": label} for label in y]
        lengths = 1 if len(steps) < 7 else len(x)
        given = images_of(x, lengths=lengths, least=3 + len(steps))
        loss: Tensor = sum(model(given, targets).values())
        return loss

    train(log, model, step, steps=8)


class Listing(Around):
    def forward(self, samples: list[Tensor]) -> list[Tensor]:
        return [self.body(sample) for sample in samples]


class Joining(Around):
    def forward(self, samples: list[Tensor]) -> Tensor:
        return torch.stack([self.body(F.pad(sample, (0, 3))).mean(0) for sample in samples])


def lists_with_gradients(log: Log) -> None:
    first, second = Listing(), Joining()

    def step(x: Tensor, y: Tensor) -> Tensor:
        features = first(images_of(x, lengths=3))
        return F.cross_entropy(second(features), y) + features[-1].square().mean()

    train(log, nn.ModuleList([first, second]), step)


class OfWords(Around):
    def forward(self, texts: list[Any]) -> Tensor:
        lengths = [[len(word) for word in text] for text in texts]
        numbers = [[sum(each), max(each), min(each), len(each), 0, 1] for each in lengths]
        return self.body(torch.tensor(numbers).double())


def words(log: Log) -> None:
    model = OfWords()

    def step(x: Tensor, y: Tensor) -> Tensor:
        texts = [["a" * (k % 4 + 1)] * (int(label) + 1) for k, label in enumerate(y)]
        return F.cross_entropy(model(texts), y)

    train(log, model, step)


class OfBags(Around):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(9, 6)

    def forward(self, words: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
        return self.body(self.bags(words, offsets) + x)


def bags(log: Log) -> None:
    """Some of them are empty, and the numbers of words differ from step to step."""
    model, steps = OfBags(), []

    def step(x: Tensor, y: Tensor) -> Tensor:
        steps.append(0)
        sizes = torch.tensor([(k * len(steps)) % 5 for k in range(len(x))])
        words = torch.arange(int(sizes.sum())) % 9
        return F.cross_entropy(model(words, sizes.cumsum(0) - sizes, x), y)

    train(log, model, step, steps=7)


LISTS: dict[str, tuple[Any, ...]] = {
    "words with offsets": (bags, True),
    "dicts of arrays": (arrays, True),
    "lists of images": (images, True, list),
    "tuples of images": (images, True, tuple),
    "images that are padded": (padded_images, None),
    "lists with gradients": (lists_with_gradients, True),
    "lists of words": (words, True),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if "images" in name else ()) for name in LISTS],
)
def test_arrays_lists_of_samples_and_rows_by_offsets_are_sharded(name: str) -> None:
    training, is_sharded, *args = LISTS[name]
    same_as_one_process(
        _with_arguments, training, is_sharded, *args, sizes=(2, 3), dtype=torch.float64
    )


class Detecting(Around):
    def forward(self, samples: list[Tensor]) -> list[dict[str, Tensor]]:
        found = [self.body(sample) for sample in samples]
        return [{"scores": each, "boxes": each.detach() * 2} for each in found]


@ranks(2)
def test_tensors_in_a_list_require_gradients_where_they_did() -> None:
    model, samples = Detecting(), list(torch.randn(24, 6).split([3, 4, 5, 3, 4, 5]))
    with sharding():
        for _ in range(3):
            for each in model(samples):
                assert each["scores"].requires_grad
                assert each["boxes"].numpy().shape[1] == 3
    assert modules.call_counts.sharded == 3


@ranks(2)
def test_a_nested_tensor_is_named() -> None:
    class OfNested(Around):
        def forward(self, nested: Tensor) -> Tensor:
            return torch.stack([self.body(sample).mean(0) for sample in nested.unbind()])

    samples = [torch.randn(2, 6), torch.randn(3, 6)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's: a prototype
        nested = torch.nested.nested_tensor(samples, layout=torch.strided)
    with sharding() as log:
        OfNested()(nested)
    if instep.rank == 0:
        assert "OfNested whole where it is given a nested tensor; other" in log.getvalue()
