"""Which tensors travel together. Pure."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from instep.training.buckets.layout import plan_buckets, plan_tensors

tensors = st.lists(st.tuples(st.integers(0, 40), st.sampled_from("ab")), max_size=20)


@given(tensors, st.integers(1, 60))
def test_every_tensor_has_one_place_of_its_size(tensors, capacity):
    buckets = plan_buckets(
        [(i, size) for i, (size, _) in enumerate(tensors)], [k for _, k in tensors], capacity
    )
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert sorted(slot.index for slot in slots) == list(range(len(tensors)))
    assert all(slot.stop - slot.start == tensors[slot.index][0] for slot in slots)


@given(tensors, st.integers(1, 60))
def test_a_bucket_holds_one_kind_without_gaps_and_within_its_capacity(tensors, capacity):
    buckets = plan_buckets(
        [(i, size) for i, (size, _) in enumerate(tensors)], [k for _, k in tensors], capacity
    )
    for bucket in buckets:
        assert len({tensors[slot.index][1] for slot in bucket.slots}) == 1
        starts = [slot.start for slot in bucket.slots]
        assert starts == [0] + [slot.stop for slot in bucket.slots[:-1]]
        assert bucket.numel <= capacity or sum(s.stop > s.start for s in bucket.slots) == 1


def test_tensors_of_one_kind_stay_in_order():
    buckets = plan_buckets([(7, 3), (2, 3), (5, 3)], ["a", "a", "a"], capacity=6)
    assert [[slot.index for slot in bucket.slots] for bucket in buckets] == [[7, 2], [5]]


def test_the_size_of_buckets_is_given_in_mebibytes(monkeypatch):
    parameters = {at: nn.Parameter(torch.zeros(3 << 15, dtype=torch.float64)) for at in range(4)}
    for mebibytes, count in (("0", 4), ("1", 4), ("2", 2), ("3", 1)):
        monkeypatch.setenv("INSTEP_BUCKET_MIB", mebibytes)
        assert len(list(plan_tensors(parameters))) == count, mebibytes
    small = torch.zeros(3 << 15, dtype=torch.uint8)
    monkeypatch.setenv("INSTEP_BUCKET_MIB", "2")
    assert len(plan_tensors({0: small, 1: small, **dict.fromkeys((2, 3), parameters[0])})) == 2
    assert len(plan_tensors({0: small, 1: small, 2: small, 3: parameters[0]})) == 3
