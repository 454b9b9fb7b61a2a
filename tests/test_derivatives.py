"""Derivatives across ranks, against numerical ones of the sum of all ranks' losses."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import instep
from instep.errors import CollectiveError
from pool import ranks

pytestmark = pytest.mark.slow


class _World(torch.autograd.Function):
    """A function of all ranks' inputs, whose outputs are all ranks' outputs.

    Every rank holds all inputs, computes from its own, and hears what the others computed: so
    torch's gradcheck runs in step on all ranks and sees one ordinary function.
    """

    @staticmethod
    def forward(ctx, inputs, sizes, local):
        ctx.sizes, place = sizes, instep.rank
        with torch.enable_grad():
            ctx.mine = inputs.split(sizes)[place].detach().requires_grad_()
            ctx.output = local(ctx.mine)
        outputs = _everybodys(ctx.output.detach())
        ctx.lengths = [output.numel() for output in outputs]
        return torch.cat([output.reshape(-1) for output in outputs])

    @staticmethod
    def backward(ctx, grads):
        grad = grads.split(ctx.lengths)[instep.rank].view(ctx.output.shape)
        ctx.mine.grad = None
        ctx.output.backward(grad, retain_graph=True)
        mine = torch.zeros_like(ctx.mine) if ctx.mine.grad is None else ctx.mine.grad
        return torch.cat(_everybodys(mine)), None, None


def _everybodys(tensor):
    parts = [None] * instep.world_size
    dist.all_gather_object(parts, tensor)
    return parts


def check(local, sizes=None, dtype=torch.float64, values=None):
    """gradcheck of `local`, a function of this rank's one-dimensional input; fast: of random sums
    of its derivatives, the same on all ranks."""
    sizes = sizes or [4] * instep.world_size
    if values is None:
        values = torch.randn(sum(sizes), dtype=dtype, generator=torch.Generator().manual_seed(5))
    inputs = values.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: _World.apply(x, sizes, local),
        (inputs,),
        check_undefined_grad=False,
        fast_mode=True,
    )


def check_twice(collective, sizes=None):
    """gradcheck of the gradient of a function that bends before and after `collective`."""

    def gradient(x):
        bent = collective(x**3 + x) ** 2
        (first,) = torch.autograd.grad(bent.sum(), x, create_graph=True)
        return first

    check(collective, sizes)
    check(gradient, sizes)


OPS = ["sum", "mean", "min", "max", "product"]


@pytest.mark.parametrize("op", OPS)
@ranks(3)
def test_all_reduce(op):
    check_twice(lambda x: instep.all_reduce(x, op))


@pytest.mark.parametrize("op", OPS)
@ranks(3)
def test_reduce(op):
    check_twice(lambda x: instep.reduce(x, op, root=1))


@pytest.mark.parametrize("op", OPS)
@ranks(3)
def test_reduce_scatter(op):
    check_twice(lambda x: instep.reduce_scatter(x, op))


@ranks(3)
def test_broadcast():
    check_twice(lambda x: instep.broadcast(x, root=1))


@ranks(3)
def test_all_gather():
    check_twice(lambda x: torch.cat(instep.all_gather(x)))


@ranks(3)
def test_all_gather_of_ragged_rows():
    check_twice(lambda x: torch.cat(instep.all_gather(x)), sizes=[2, 0, 3])


@ranks(3)
def test_gather():
    sizes = [2, 1, 3]
    check_twice(lambda x: torch.cat(instep.gather(x, root=1)), sizes)


BENT = {
    "all_gather": lambda x: torch.cat(instep.all_gather(x)),
    "gather": lambda x: torch.cat(instep.gather(x)),
    "all_to_all": lambda x: torch.cat(instep.all_to_all(x)),
    "broadcast": instep.broadcast,
    "reduce": instep.reduce,
} | {op: partial(instep.all_reduce, op=op) for op in OPS}


@pytest.mark.parametrize("collective", BENT)
@ranks(2)
def test_a_derivative_that_bends_on_one_rank_only(collective):
    def gradient(x, bending):
        result = BENT[collective](x**3)
        loss = (result**2 if instep.rank == bending else result).sum()
        return torch.autograd.grad(loss, x, create_graph=True)[0]

    check(partial(gradient, bending=0))
    check(partial(gradient, bending=1))


@ranks(3)
def test_scatter():
    check(
        lambda x: instep.scatter(x[:4].split([1, 0, 3]) if instep.rank == 1 else None, root=1),
        sizes=[2, 4, 1],
    )


@ranks(3)
def test_all_to_all():
    check_twice(lambda x: torch.cat(instep.all_to_all(x)))


@ranks(3)
def test_all_to_all_with_splits():
    splits = [[2, 0, 1], [0, 0, 1], [1, 2, 2]]
    check_twice(lambda x: torch.cat(instep.all_to_all(x, splits[instep.rank])), sizes=[3, 1, 5])


@ranks(3)
def test_send_and_recv():
    def pipeline(x):
        """0 -> 1 -> 2, as the stages of a model would."""
        if instep.rank == 0:
            return instep.send(x**2, to=1)
        received = instep.recv(instep.rank - 1) * x
        return received if instep.rank == 2 else instep.send(received, to=2)

    check(pipeline)


@ranks(3)
def test_complex_tensors():
    for op in ("sum", "mean", "product"):
        check(lambda x, op=op: instep.all_reduce(x, op), dtype=torch.complex128)
    check(lambda x: torch.cat(instep.all_gather(x)), sizes=[1, 0, 2], dtype=torch.complex128)
    check(lambda x: instep.broadcast(x.conj(), 2), dtype=torch.complex128)


@ranks(3)
def test_a_group_has_the_derivatives_of_its_members():
    pair = instep.group([2, 0])

    def among_two(x):
        if instep.rank not in pair:
            return x * 2
        return instep.all_reduce(x, group=pair) * instep.broadcast(x, 2, group=pair)

    check(among_two)


@ranks(3)
def test_the_largest_shares_its_gradient_among_equals():
    x = torch.tensor([1.0, 2.0 * (instep.rank > 0)], requires_grad=True)
    (instep.all_reduce(x, "max") * torch.tensor([3.0, 4.0])).sum().backward()
    assert x.grad.tolist() == [3.0, 6.0 if instep.rank > 0 else 0.0]


@ranks(3)
def test_a_product_with_zeros_has_the_product_of_the_others_as_derivative():
    zeros = torch.tensor([[0.0, 0.0], [2.0, 0.0], [5.0, 7.0]], dtype=torch.float64)
    check(lambda x: instep.all_reduce(x, "product"), sizes=[2, 2, 2], values=zeros.flatten())


@ranks(2, 3)
def test_a_rank_without_a_gradient_of_its_own_lets_the_others_pass():
    mine = torch.ones(instep.rank + 1, requires_grad=instep.rank == 0)
    parts = torch.cat(instep.all_gather(mine))
    assert parts.requires_grad
    parts.sum().backward()
    assert mine.grad is None or mine.grad.tolist() == [instep.world_size]
    part = instep.scatter([mine] * instep.world_size if instep.rank == 0 else None)
    part.sum().backward()
    assert mine.grad is None or mine.grad.tolist() == [2 * instep.world_size]


@ranks(2)
def test_without_grad_mode_nothing_is_recorded():
    mine = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not instep.all_gather(mine)[0].requires_grad
        assert not instep.all_reduce(mine).requires_grad


@ranks(2)
def test_a_second_derivative_through_a_pair_is_refused():
    x = torch.ones(2, requires_grad=True)
    end = instep.send(x**2, 1) if instep.rank == 0 else instep.recv(0).square()
    with pytest.raises(CollectiveError, match="no second derivative"):
        torch.autograd.backward(end.sum(), create_graph=True)
