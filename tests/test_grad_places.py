"""Which parameters' gradients are summed in which bucket, and for how long that is remembered."""

import weakref

import pytest
import torch
from torch import nn

from instep.distributed.communication.transport import get_transport
from instep.unedited.sharded_call.shards.grad_places import (
    AT_ONCE,
    divide_into_buckets,
    note_sparse,
)


def divided(model):
    return divide_into_buckets(list(model.parameters()), weakref.ref(model), get_transport())


def slots_of(model):
    """By parameter, its bucket; None where its gradient is summed at once."""
    found = {}
    parameters = list(model.parameters())
    for bucket, members, slots in divided(model):
        for k, slot in zip(members, slots, strict=True):
            assert slot == AT_ONCE or bucket._parameters[slot] is parameters[k]
            found[k] = None if slot == AT_ONCE else bucket
    return found


@pytest.fixture(params=[torch.float32, torch.float64])
def model(request):
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).to(request.param)


def test_it_is_remembered_while_the_parameters_stay_as_they_are(model):
    first = divided(model)
    model.load_state_dict(model.state_dict())
    assert divided(model) is first
    assert sorted(k for _, members, _ in first for k in members) == [0, 1, 2, 3]


def test_new_parameters_of_the_same_shapes_have_buckets_of_their_own(model):
    before = slots_of(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    after = slots_of(model)
    assert not {*before.values()} & {*after.values()}


def test_another_dtype_has_another_bucket(model):
    before = slots_of(model)
    model.to(torch.bfloat16)
    assert not {*before.values()} & {*slots_of(model).values()}


def test_a_hook_takes_a_gradient_out_of_its_bucket_until_it_is_removed(model):
    before = slots_of(model)
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        handle = getattr(model[0].weight, register)(torch.clone)
        assert slots_of(model) == {**before, 0: None}
        handle.remove()
        assert slots_of(model) == before


def test_a_sparse_gradient_is_in_no_bucket_from_then_on(model):
    before = slots_of(model)
    note_sparse(model[1].weight)
    assert slots_of(model) == {**before, 2: None}


def test_frozen_parameters_are_left_out(model):
    whole = slots_of(model)
    part = divide_into_buckets(list(model[1].parameters()), weakref.ref(model), get_transport())
    assert [members for _, members, _ in part] == [[0, 1]]
    assert slots_of(model) == whole
