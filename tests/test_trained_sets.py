"""What is kept for sets of parameters that are trained together stays within bounds."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.training.buckets.reducer import reducer_of
from pool import ranks, talking_over
from sharded_training import sharding

pytestmark = pytest.mark.slow

PARTS = 12


def size_of_all(model: nn.Module) -> float:
    """What all tensors of this process take, in times the size of the model."""
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) in (Tensor, nn.Parameter)
    }
    return sum(storages.values()) / sum(p.nbytes for p in model.parameters())


@ranks(2)
def trained_by_turns(unedited: bool) -> None:
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(PARTS)))
    if not unedited:
        instep.replicate(model)
    before = size_of_all(model)
    x = torch.randn(4, 200)
    with sharding() if unedited else nullcontext():
        for frozen in [*model, *model]:
            model.requires_grad_(True)
            frozen.requires_grad_(False)
            model(x).sum().backward()
            model.zero_grad()
    assert size_of_all(model) - before < 2.5


@pytest.mark.nightly
@pytest.mark.parametrize("unedited", [False, True], ids=["replicate", "unedited"])
def test_buckets_of_sets_that_are_trained_no_more_are_given_back(unedited: bool) -> None:
    with talking_over("gloo"):
        trained_by_turns(unedited)


@ranks(2)
def test_two_sets_that_are_trained_by_turns_keep_their_buckets() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    instep.replicate(model, compression=instep.PowerSGD(1))
    buckets = []
    for k in range(6):
        model.requires_grad_(True)
        model[k % 2].requires_grad_(False)
        model(torch.randn(4, 6)).sum().backward()
        buckets.append(reducer_of[model[0].weight]._buckets[0])
    assert buckets[2:] == buckets[:2] * 2
