"""The samples of an unedited script: schemas, packing, and when exchanging them is faster."""

import functools
import math
import random
import warnings
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

import networks
from instep.unedited.data import sample_schema
from instep.unedited.data.batch_exchange import (
    ExchangedBatch,
    ExchangeHeader,
    _with_rows_in_order,
)
from instep.unedited.data.exchange_policy import ExchangePolicy, is_exchange_faster
from instep.unedited.data.generators import find_generator, may_set_generator
from instep.unedited.data.packed_samples import CannotPackError, pack, unpack
from instep.unedited.data.row_loading import LoadedRows

# --------------------------------------------------------------------------- their schemas


def sample(k):
    return {
        "image": torch.full((2, 3), float(k)),
        "array": np.arange(4, dtype=np.int16) + k,
        "label": k,
        "weight": k / 2,
        "flag": k % 2 == 0,
        "number": np.float32(k),
        "name": f"row {k}",
        "raw": str(k).encode(),
        "nested": (torch.tensor(k), [k, (k, f"{k}")]),
    }


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        return all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other


class Named(torch.Tensor):
    """A tensor with something of its own."""


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # by PyTorch 2.12's unpickling
@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).view(2, 3).as_subclass(Named),
        torch.eye(3).to_sparse(),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        np.array([{1}, None], dtype=object),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.arange(12).reshape(3, 4).T,
        np.array(["a", "bcd"]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
    ],
    ids=str,
)
def test_what_is_more_than_plain_numbers_travels_as_it_is(value):
    (found,) = unpack(pack([value]))
    assert type(found) is type(value)
    if isinstance(value, np.ndarray):
        assert found.dtype == value.dtype
        assert found.tolist() == value.tolist()
    else:
        assert found.layout == value.layout
        assert torch.equal(*(x.to_dense() if x.is_sparse else x for x in (found, value)))


def test_samples_of_one_schema_are_found_again_in_what_they_were_collated_to():
    samples = [sample(k) for k in range(3)]
    schema = sample_schema.common_schema(samples)
    whole = default_collate(samples)
    assert same(
        sample_schema.unflatten_collated(schema, sample_schema.flatten_collated(schema, whole)),
        whole,
    )
    for row, expected in enumerate(samples):
        found = sample_schema.extract_sample(
            schema, sample_schema.flatten_collated(schema, whole), row
        )
        assert same(found, expected)
        found["image"].zero_()
        found["array"][:] = 9
    assert same(whole, default_collate([sample(k) for k in range(3)])), "samples share no memory"


class Sub(torch.Tensor):
    pass


ALIKE = [
    (torch.ones(2), torch.zeros(2)),
    (np.ones(2), np.zeros(2)),
    ({"a": 1, 2: "x"}, {"a": 2, 2: "y"}),
    ((1, 2.0), (3, 4.0)),
]
DIFFERENT = [
    (1, 1.0),
    (1, True),
    (torch.ones(2), torch.ones(3)),
    (torch.ones(2), torch.ones(2).double()),
    (np.ones(2), np.ones((2, 1))),
    (np.ones(2), np.ones(2, np.float32)),
    (np.float32(1), np.float64(1)),
    ((1, 2), [1, 2]),
    ((1, 2), (1, 2, 3)),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.ones(2)], layout=torch.strided)
UNKNOWN = [
    None,
    object(),
    torch.ones(2, requires_grad=True),
    torch.ones(2).to_sparse(),
    torch.ones(2, device="meta"),
    NESTED,
    torch.ones(2).as_subclass(Sub),
    np.ma.ones(2),
    np.array(["text"]),
    np.ones(2, complex),
    np.complex64(1),
    np.str_("text"),
    {1.5: 1},
    {"a": None},
    type("Dict", (dict,), {})(a=1),
    type("List", (list,), {})([1]),
    [1, [object()]],
]


def test_schemas_are_equal_where_default_collate_would_do_the_same():
    for pair in ALIKE:
        assert sample_schema.common_schema(pair) == sample_schema.schema_of(pair[0])
    for pair in DIFFERENT:
        assert sample_schema.common_schema(pair) is None
        assert None not in map(sample_schema.schema_of, pair)
    for value in UNKNOWN:
        assert sample_schema.common_schema([value, value]) is None
    assert sample_schema.common_schema([]) is None


# --------------------------------------------------------------------------------- packed


def values():
    gaps = torch.arange(12.0).view(3, 4)[:, ::2]
    return [
        torch.arange(6).view(2, 3),
        torch.arange(6).view(2, 3).t(),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        gaps,
        torch.ones(0, 3),
        torch.tensor(5, dtype=torch.int8),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.bfloat16),
        np.arange(5, dtype=np.uint8),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6.0)[::2],
        np.array(["a", "b"]),
        {"a": (1, "text", None), "b": [torch.ones(1), np.zeros(1)]},
    ]


def test_values_are_unpacked_as_they_were():
    for ours, theirs in zip(values(), unpack(pack(values())), strict=True):
        assert same(ours, theirs)
    strides = [t.stride() for t in unpack(pack(values())) if isinstance(t, torch.Tensor)]
    assert strides[:4] == [(3, 1), (1, 3), (60, 1, 15, 3), (2, 1)]


def test_what_arrives_may_be_written_to_without_touching_its_neighbour():
    one, other = unpack(pack([torch.ones(3), torch.ones(3)]))
    one.zero_()
    assert one._base is None
    assert other.tolist() == [1, 1, 1]


def test_the_memory_lies_beside_the_pickle_in_whole_cache_lines():
    packed = pack([torch.ones(1000), np.ones(1000)])
    assert len(packed.pickled) < 1000
    assert len(packed.memory) == 4032 + 8000


def test_digests_are_equal_for_equal_values():
    assert pack(values()).checksum() == pack(values()).checksum()
    others = [1, 2, torch.ones(2), torch.zeros(2), torch.ones(2, 1), np.ones(2), [torch.ones(2)]]
    assert len({pack(value).checksum() for value in others}) == len(others)


class ReducingItself(torch.Tensor):
    def __reduce_ex__(self, proto):
        untyped = self.untyped_storage()
        typed = torch.TypedStorage(wrap_storage=untyped, dtype=self.dtype, _internal=True)
        return _rebuild, (untyped, typed, self.shape)


def _rebuild(untyped, typed, shape):
    assert typed.dtype == torch.float32
    return torch.tensor([]).set_(untyped, 0, shape).as_subclass(ReducingItself)


def boxed(scale, dataset):
    """A sample of tensors that are no plain ones; `dataset`: what else is in their memory."""
    view = (torch.cat([dataset, torch.arange(6.0) * scale])[len(dataset) :]).view(2, 3)
    named = view.as_subclass(Named)
    named.canvas = (2, 3)
    named.more = [torch.ones(2) * scale]
    parameter = torch.nn.Parameter(view, requires_grad=False)
    own = (torch.arange(3.0) * scale).as_subclass(ReducingItself)
    return {"named": named, "in": [(parameter, named.t())], "own": own}


def test_digests_of_subclasses_of_tensor_are_those_of_their_values():
    checksums = [pack(boxed(1, torch.zeros(k))).checksum() for k in (1, 50)]
    assert checksums[0] == checksums[1] != pack(boxed(2, torch.zeros(1))).checksum()
    other = boxed(1, torch.zeros(1))
    other["named"].canvas = (3, 2)
    assert pack(other).checksum() != checksums[0]


def test_subclasses_of_tensor_keep_class_and_attributes():
    sample = boxed(1, torch.zeros(1000))
    packed = pack(sample)
    assert len(packed.memory) < 1000, "not the rest of the data set"
    found = unpack(packed)
    assert type(found["named"]) is Named
    assert torch.equal(found["named"], sample["named"])
    assert found["named"].canvas == (2, 3)
    assert found["named"].more[0].tolist() == [1, 1]
    found["named"].zero_()
    parameter, transposed = found["in"][0]
    assert type(parameter) is torch.nn.Parameter
    assert not parameter.requires_grad
    assert torch.equal(parameter, sample["in"][0][0])
    assert type(transposed) is Named
    assert torch.equal(transposed, sample["named"].t())
    assert type(found["own"]) is ReducingItself
    assert found["own"].tolist() == [0, 1, 2]


def test_what_cannot_be_packed_says_why():
    with pytest.raises(CannotPackError, match="a tensor on meta"):
        pack([torch.ones(1, device="meta")])
    with pytest.raises(CannotPackError, match="requires a gradient"):
        pack({"a": torch.ones(1, requires_grad=True)})
    with pytest.raises(CannotPackError, match=r"it does not pickle: .*lambda"):
        pack(lambda: 1)


# ------------------------------------------------------------------ generators of their own

_module_rng = np.random.default_rng(0)


def draws_from_the_module(x):
    return x + _module_rng.random()


def bound_to(rng):
    def draw(x):
        return x + rng.random()

    return draw


def not_yet_bound():
    def draw():
        return later

    if False:
        later = 1
    return draw


class Holding:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Drawing:
    def __getitem__(self, index):
        return _module_rng.random()


class OfClass:
    rng = np.random.default_rng(0)


class WithSlots:
    __slots__ = ("rng",)

    def __init__(self):
        self.rng = random.Random(0)


class ListOfOwn(list):
    def __init__(self):
        self.rng = random.Random(0)


class Static:
    @staticmethod
    def noise():
        return _module_rng.random()


def draws_in_a_list(x):
    return [x + _module_rng.random() for _ in range(2)]


def draws_from_its_default(x, rng=np.random.default_rng(0)):  # noqa: B008
    return x + rng.random()


networks.rng = random.Random(0)


def draws_from_another_module(x):
    return x + networks.rng.random()


@pytest.mark.parametrize(
    ("dataset", "where"),
    [
        (Holding(rng=np.random.default_rng(0)), "self.rng"),
        (Holding(rng=random.Random(0)), "self.rng"),
        (Holding(rng=np.random.RandomState(0)), "self.rng"),
        (Holding(rng=torch.Generator()), "self.rng"),
        (Holding(kept={"a": [1, (np.random.PCG64(0),)]}), "self.kept['a'][1][0]"),
        (Holding(kept=deque([random.Random(0)])), "self.kept[0]"),
        (Holding(kept={random.Random(0)}), "self.kept.item 0"),
        (Holding(transform=draws_from_the_module), "_module_rng"),
        (Holding(transform=draws_in_a_list), "_module_rng"),
        (Holding(transform=draws_from_its_default), "self.transform(rng)"),
        (Holding(transform=bound_to(random.Random(0))), "self.transform.rng"),
        (Holding(draw=random.Random(0).random), "self.draw.__self__"),
        (Holding(draw=random.random, numpy=np.random.rand), None),
        (Holding(kept=WithSlots()), "self.kept.rng"),
        (ListOfOwn(), "self.rng"),
        (Static(), "_module_rng"),
        (Holding(draw=Holding(rng=random.Random(0)).__init__), "self.draw.__self__.rng"),
        (Holding(draw=functools.partial(max, random.Random(0))), "self.draw.args[0]"),
        (Holding(draw=functools.partial(max, key=random.Random(0))), "self.draw.keywords['key']"),
        (Drawing(), "_module_rng"),
        (Holding(kind=Drawing), "_module_rng"),
        (Holding(transform=lambda: OfClass.rng.random()), "OfClass.rng"),
        (OfClass(), "self.rng"),
        (Holding(transform=draws_from_another_module), "networks.rng"),
        (Holding(rng=torch.default_generator, other=random._inst), None),
        (Holding(draw=not_yet_bound(), x=torch.ones(2), kind=Holding, module=random), None),
        (Holding(long=[*range(16), random.Random(0)]), None),
        (Holding(**{f"a{k}": object() for k in range(2100)}, z=random.Random(0)), None),
        (torch.utils.data.TensorDataset(torch.ones(3)), None),
    ],
)
def test_a_generator_of_a_data_sets_own_is_found(dataset, where):
    assert find_generator(dataset) == where


def give_generator(worker):
    torch.utils.data.get_worker_info().dataset.rng = np.random.default_rng(worker)


def seed(worker):
    np.random.seed(worker)


def test_what_may_give_a_workers_data_set_a_generator():
    assert may_set_generator(give_generator)
    assert may_set_generator(functools.partial(give_generator))
    assert not may_set_generator(seed)
    assert not may_set_generator(None)


def test_a_data_set_that_holds_itself_is_looked_at_once():
    dataset = Holding()
    dataset.me = [dataset]
    assert find_generator(dataset) is None


# ---------------------------------------------------------------------- is exchanging faster?


def test_the_1st_2nd_4th_8th_batch_proves_it():
    policy = ExchangePolicy(ranks=2, workers=0)
    asked = [policy.next_batch() for _ in range(9)]
    assert [each.checks for each in asked] == [k in (1, 2, 4, 8) for k in range(1, 10)]
    assert all(each.exchanges for each in asked)
    alone = ExchangePolicy(ranks=1, workers=0)
    assert [alone.next_batch()[:2] for _ in range(3)] == [(False, False)] * 3


def test_there_may_be_no_choice():
    policy = ExchangePolicy(ranks=2, workers=0)
    policy.force(exchange=False)
    assert policy.next_batch()[:2] == (False, False)
    policy = ExchangePolicy(ranks=2, workers=0)
    policy.force(exchange=True)
    for _ in range(4):
        policy.update(10, 0.0, 10)  # would not pay
    assert policy.next_batch()[:2] == (True, True)


def test_three_batches_are_timed_and_the_best_counts():
    slow, quick = ExchangePolicy(ranks=2, workers=0), ExchangePolicy(ranks=2, workers=0)
    for policy, seconds in ((slow, [9.0, 0.1, 9.0]), (quick, [9.0, 9.0, 1e-4])):
        for taken in seconds:
            assert policy.exchanges
            policy.update(0, 0.0, 0)  # an empty batch tells nothing
            policy.update(10, taken, 100)
    assert slow.exchanges
    assert not quick.exchanges
    assert [quick.next_batch().exchanges for _ in range(3)] == [True, True, False]
    slow.update(10, 0.1, 100)
    found = []
    for taken in (1e-4, 9.0, 9.0, 9.0):  # from the 5th to the 8th, where it is decided again
        found.append(slow.exchanges)
        slow.update(10, taken, 100)
    assert found == [True] * 4
    assert not slow.exchanges


def test_the_largest_batch_and_the_workers_count():
    large = ExchangePolicy(ranks=2, workers=0)
    for nbytes in (10**9, 1, 1):
        large.update(10, 0.1, nbytes)
    assert not large.exchanges
    for workers, pays_still in ((4, True), (60, False)):
        policy = ExchangePolicy(ranks=2, workers=workers)
        for _ in range(3):
            policy.update(10, 0.1, 1)
        assert policy.exchanges == pays_still


@given(
    seconds=st.floats(0, 10),
    nbytes=st.integers(0, 10**10),
    count=st.integers(1, 1000),
    size=st.integers(2, 9),
)
def test_it_pays_where_the_loading_saved_is_longer_than_the_exchange(seconds, nbytes, count, size):
    saved = seconds * (1 - math.ceil(count / size) / count)
    assert is_exchange_faster(seconds, nbytes, count, size) == (saved > 1e-3 + nbytes * 1e-9)


def test_rows_travel_as_they_lie_in_memory_if_they_lie_side_by_side():
    side_by_side = torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert _with_rows_in_order(side_by_side) is side_by_side
    apart = torch.arange(12).reshape(1, 3, 4)[:, :, ::2]
    assert _with_rows_in_order(apart).stride() == (6, 2, 1)
    assert _with_rows_in_order(apart).tolist() == apart.tolist()


@pytest.mark.parametrize(("first", "consistent"), [(b"a", True), (b"b", False)])
def test_the_rank_before_one_without_rows_has_loaded_a_sample_of_the_one_after(first, consistent):
    rows = [
        LoadedRows(1, first_checksum=first, other_checksum=b"c"),
        LoadedRows(0),
        LoadedRows(1, first_checksum=b"c", other_checksum=b"a"),
        LoadedRows(0),
    ]
    assert ExchangedBatch([ExchangeHeader(rows=each) for each in rows]).is_consistent == consistent
    rows[0] = LoadedRows(1, first_checksum=b"a", other_checksum=b"d")
    assert not ExchangedBatch([ExchangeHeader(rows=each) for each in rows]).is_consistent
