"""Talking: values, derivatives, dtypes and clear errors, at any world size."""

import pytest
import torch

import instep
from instep.errors import CollectiveError, UnknownOpError, WrongDeviceError
from pool import ranks

DTYPES = [torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ranks(1, 2, 3)
def test_all_reduce_adds_up_and_leaves_its_input(dtype):
    mine = torch.arange(6).view(2, 3).to(dtype) + instep.rank
    total = instep.all_reduce(mine)
    n = instep.world_size
    expected = torch.arange(6).view(2, 3) * n + n * (n - 1) // 2
    assert total.dtype == dtype
    assert torch.equal(total, expected.to(dtype))
    assert torch.equal(mine, torch.arange(6).view(2, 3).to(dtype) + instep.rank)


@ranks(1, 2, 3)
def test_all_reduce_knows_mean_min_and_max():
    mine = torch.tensor([float(instep.rank), -float(instep.rank)])
    last = instep.world_size - 1
    assert instep.all_reduce(mine, "mean").tolist() == [last / 2, -last / 2]
    assert instep.all_reduce(mine, "min").tolist() == [0.0, -last]
    assert instep.all_reduce(mine, "max").tolist() == [last, 0.0]


@ranks(2, 3)
def test_all_reduce_takes_tensors_that_are_not_contiguous():
    mine = torch.arange(12.0).view(3, 4).t() * (instep.rank + 1)
    n = instep.world_size
    assert torch.equal(instep.all_reduce(mine), torch.arange(12.0).view(3, 4).t() * n * (n + 1) / 2)


@ranks(1, 2, 3)
def test_broadcast_gives_every_rank_the_roots_tensor():
    for root in range(instep.world_size):
        mine = torch.full((3,), instep.rank)
        assert instep.broadcast(mine, root).tolist() == [root] * 3
        assert mine.tolist() == [instep.rank] * 3


@ranks(1, 2, 3)
def test_all_gather_keeps_the_order_of_ranks():
    parts = instep.all_gather(torch.tensor([[instep.rank, 7]]))
    assert [part.tolist() for part in parts] == [[[r, 7]] for r in range(instep.world_size)]


@ranks(1, 2, 3)
def test_objects_travel():
    assert instep.all_gather_object({"rank": instep.rank}) == [
        {"rank": r} for r in range(instep.world_size)
    ]
    assert instep.broadcast_object(("from", instep.rank), instep.world_size - 1) == (
        "from",
        instep.world_size - 1,
    )
    gathered = instep.gather_object(instep.rank, root=0)
    assert gathered == (list(range(instep.world_size)) if instep.rank == 0 else None)


@ranks(2, 3)
def test_derivatives_are_those_of_the_sum_of_all_losses():
    n, r = instep.world_size, instep.rank
    weight = torch.tensor(float(r + 1))  # this rank's loss is weight * result
    all_weights = n * (n + 1) / 2

    def derivative(collective):
        x = torch.tensor([2.0], requires_grad=True)
        result = collective(x)
        torch.autograd.grad((weight * result).sum(), x)
        (grad,) = torch.autograd.grad((weight * collective(x)).sum(), x)
        return grad.item()

    assert derivative(lambda x: instep.all_reduce(x)) == all_weights
    assert derivative(lambda x: instep.all_reduce(x, "mean")) == pytest.approx(all_weights / n)
    assert derivative(lambda x: instep.broadcast(x, 1)) == (all_weights if r == 1 else 0)
    factors = torch.arange(1.0, n + 1)
    gathered = derivative(lambda x: torch.stack(instep.all_gather(x)).squeeze(1) * factors)
    assert gathered == all_weights * (r + 1)


@ranks(1, 2)
def test_misuse_says_what_was_seen_and_what_to_do():
    with pytest.raises(UnknownOpError, match=r"unknown reduction 'avg'; known are sum, mean"):
        instep.all_reduce(torch.ones(2), "avg")
    with pytest.raises(CollectiveError, match=r"mean of torch\.int64"):
        instep.all_reduce(torch.ones(2, dtype=torch.int64), "mean")
    with pytest.raises(WrongDeviceError, match="this tensor is on meta"):
        instep.all_reduce(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="root 9 does not exist: the ranks are 0 to"):
        instep.broadcast(torch.ones(2), root=9)
    with pytest.raises(CollectiveError, match="no derivative"):
        instep.all_reduce(torch.ones(2, requires_grad=True), "max").sum().backward()


@ranks(2, 3)
def test_a_barrier_returns():
    instep.barrier()
