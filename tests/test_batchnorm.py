"""Batch statistics of the global batch: values, gradients, running statistics."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import instep
from instep.distributed import numbers
from instep.distributed.communication.transport import get_transport
from instep.errors import TrainingError
from instep.training.blocks import Block
from instep.training.buckets.reducer import reducer_of
from instep.training.normalization.batchnorm import batch_norm
from pool import ranks, run

SHAPES = {
    "1d rows": (nn.BatchNorm1d, (11, 4)),
    "1d sequences": (nn.BatchNorm1d, (11, 4, 3)),
    "2d": (nn.BatchNorm2d, (11, 4, 3, 2)),
    "2d large": (nn.BatchNorm2d, (11, 4, 5, 4)),
    "2d very large": (nn.BatchNorm2d, (11, 4, 64, 32)),
    "3d": (nn.BatchNorm3d, (11, 4, 2, 3, 2)),
    "instances": (nn.InstanceNorm2d, (11, 4, 3, 2)),
}


def norm_step(kind, dtype, options, training=True, rows=None):
    """Two forwards and backwards of one layer; everything that it leaves behind."""
    cls, shape = SHAPES[kind]
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn((rows or shape[0], *shape[1:]), generator=generator, dtype=dtype) * 3 + 5
    layer = cls(4, **options).to(dtype)
    if layer.affine:
        layer.weight.data.copy_(torch.randn(4, generator=generator))
    pull = torch.randn(whole.shape, generator=generator, dtype=dtype)
    layer.train(training)
    instep.replicate(layer)
    kept = {}
    for k in range(2):
        x, g = instep.shard((whole * (k + 1), pull))
        x = x.requires_grad_()
        y = layer(x)
        # A mean over rows, as losses are; x.grad then holds rows of the whole mean's gradient.
        (y * g).flatten(1).sum(1).mean().backward()
        kept[f"y{k}"], kept[f"dx{k}"] = y.detach(), x.grad
    kept |= {f"grad {name}": p.grad for name, p in layer.named_parameters()}
    return kept, dict(layer.state_dict())


OPTIONS = [
    {},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
    {"momentum": 0.3, "eps": 1e-3},
]
TRACKED = {"affine": True, "track_running_stats": True}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [kind for kind in SHAPES if kind != "instances"])
def test_the_layer_is_that_of_one_process(kind, options):
    check(kind, torch.float64, options, sizes=(2, 3), tolerance=1e-12)


def norm_step_alone(*args):
    """As in a process that has no other model."""
    others = list(reducer_of.items())
    reducer_of.clear()
    try:
        return norm_step(*args)
    finally:
        for parameter, reducer in others:
            reducer_of[parameter] = reducer


def test_a_layer_without_parameters_that_is_the_only_replica_passes_on_the_gradient_of_the_batch():
    ((whole, _),) = run(1, norm_step, "1d rows", torch.float64, {"affine": False})
    parts = run(2, norm_step_alone, "1d rows", torch.float64, {"affine": False})
    found = torch.cat([kept["dx0"] for kept, _ in parts])
    torch.testing.assert_close(found, whole["dx0"], rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("options", [TRACKED, {**TRACKED, "momentum": 0.3}], ids=str)
def test_running_statistics_of_instances_are_those_of_one_process(options):
    check("instances", torch.float64, options, sizes=(2, 3), tolerance=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_layer_is_that_of_one_process_in_single_precision(options):
    check("2d large", torch.float32, options, sizes=(2, 3), tolerance=1e-5)


@pytest.mark.parametrize("kind", ["2d", "2d large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_precision_far_from_zero(dtype, kind):
    check(kind, dtype, {}, sizes=(2,), tolerance=1e-13 if dtype == torch.float64 else 3e-5)


@pytest.mark.parametrize("step", [2, 5, 20])
def test_channels_that_do_not_lie_side_by_side(step):
    """Rows of which a channel is one number, as columns of a wider matrix."""
    x = torch.randn(6, 4 * step, generator=torch.Generator().manual_seed(0))[:, ::step]
    x, expected = (x.detach().requires_grad_() for _ in range(2))
    batch_norm(x, None, None, training=True).pow(3).sum().backward()
    F.batch_norm(expected, None, None, training=True).pow(3).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


def test_weights_in_half_precision_as_well():
    ((whole, _),) = run(1, norm_step, "2d large", torch.bfloat16, {})
    parts = [kept for kept, _ in run(2, norm_step, "2d large", torch.bfloat16, {})]
    for key, expected in whole.items():
        theirs = [kept[key] for kept in parts]
        for found in theirs if key.startswith("grad") else [torch.cat(theirs)]:
            assert found.dtype is torch.bfloat16
            apart = (found.double() - expected.double()).norm() / expected.double().norm()
            assert apart < 0.02, (key, apart)


@pytest.mark.parametrize("kind", ["2d", "instances"])
def test_ranks_without_rows_take_part(kind):
    check(kind, torch.float64, TRACKED, sizes=(4,), tolerance=1e-12, rows=2)


def test_evaluation_uses_the_running_statistics():
    check("2d", torch.float64, {}, sizes=(2,), tolerance=1e-12, training=False)


def check(kind, dtype, options, sizes, tolerance, **more):
    ((whole, state),) = run(1, norm_step, kind, dtype, options, **more)
    close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance * 100)
    for size in sizes:
        parts = run(size, norm_step, kind, dtype, options, **more)
        blocks = [Block(rank, size, len(whole["y0"])) for rank in range(size)]
        for key, expected in whole.items():
            theirs = [kept[key] for kept, _ in parts]
            if key.startswith("grad"):
                for gradient in theirs:
                    close(gradient, expected)
            else:
                rows = [t[: block.count] for t, block in zip(theirs, blocks, strict=True)]
                close(torch.cat(rows), expected)
        for _, theirs in parts:
            for name, value in state.items():
                close(theirs[name], value)


class WithoutNone(TorchDispatchMode):
    """CUDA's kernel stops the program where one of these tensors is None."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.native_batch_norm_backward.default:
            self.seen += 1
            assert None not in args
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("affine", [True, False])
@ranks(2)
def test_the_kernel_of_backward_gets_all_that_it_needs_on_a_gpu(affine):
    layer = instep.replicate(nn.BatchNorm2d(4, affine=affine).double())
    with WithoutNone() as kernel:
        layer(torch.randn(3, 4, 5, 5).double().requires_grad_()).square().mean().backward()
    assert kernel.seen == 1


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3)], ids=str)
@ranks(2)
def test_the_memory_of_the_scripts_tensors_stays_pytorchs_alone(shape):
    layer = instep.replicate(nn.BatchNorm1d(4))
    x = instep.shard(torch.randn(shape)).clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    parts = [*layer.parameters(), *layer.buffers()]
    tensors = [x, x.grad, y, *parts, *(p.grad for p in layer.parameters())]
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)


def statistics_after_update_bn(rows):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(rows, 4, generator=generator) * 3 + 5)
    layer = instep.replicate(nn.BatchNorm1d(4))
    torch.optim.swa_utils.update_bn(instep.shard(DataLoader(data, 4)), layer)
    return layer.state_dict()


@pytest.mark.parametrize("rows", [8, 10])
def test_statistics_are_updated_without_gradients(rows):
    (whole,) = run(1, statistics_after_update_bn, rows)
    for size in (2, 3):
        for theirs in run(size, statistics_after_update_bn, rows):
            for name, value in whole.items():
                assert torch.allclose(theirs[name], value, rtol=1e-6), name


@ranks(1, 2, 3)
@pytest.mark.parametrize("length", [1, 129, 1 << 18])
def test_every_rank_gets_the_numbers_of_all_in_their_order(length):
    for step in range(7):  # the ranks swap their parts of the staging
        mine = np.full(length, 10.0 * step + instep.rank)
        found = numbers.gather(mine, get_transport())
        assert found.shape == (instep.world_size, length)
        assert (found == 10 * step + np.arange(instep.world_size)[:, None]).all()
        total = numbers.sum_over_ranks(mine, get_transport())
        assert (total == 10 * step * instep.world_size + sum(range(instep.world_size))).all()
        for collective in (numbers.gather_doubles, numbers.terms_over_ranks):
            rows = np.frombuffer(collective(mine.tobytes(), get_transport())).reshape(-1, length)
            assert (rows.sum(0) == total).all()


def step_whose_saved_rows_come_back_otherwise_on_rank_0():
    generator = torch.Generator().manual_seed(0)
    layer = nn.BatchNorm2d(4)
    instep.replicate(layer)
    x, pull = instep.shard(torch.randn((2, 11, 4, 5, 4), generator=generator).unbind())

    def unpack(saved):
        is_other = instep.rank == 0 and saved.dim() == 4
        return saved.contiguous(memory_format=torch.channels_last) if is_other else saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        y = layer(x.requires_grad_())
    (y * pull).flatten(1).sum(1).mean().backward()
    return x.grad, layer.weight.grad, layer.bias.grad


def test_ranks_may_compute_the_gradient_by_other_kernels():
    ((whole, *expected),) = run(1, step_whose_saved_rows_come_back_otherwise_on_rank_0)
    found = run(2, step_whose_saved_rows_come_back_otherwise_on_rank_0)
    torch.testing.assert_close(torch.cat([rows for rows, *_ in found]), whole)
    for _, *theirs in found:
        torch.testing.assert_close(theirs, expected)


@ranks(2)
def test_a_layer_without_channels_has_no_statistics():
    x = torch.zeros(4, 0, 2, 2, requires_grad=True)
    batch_norm(x, torch.zeros(0), torch.ones(0), training=True).sum().backward()
    assert x.grad.shape == x.shape


@ranks(2)
def test_frozen_layers_do_not_talk():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval())
    instep.replicate(model)
    before = model[1].running_mean.clone()
    if instep.rank == 0:  # no collective in here
        model(torch.randn(5, 3))
    assert torch.equal(model[1].running_mean, before)


@ranks(2)
def test_statistics_of_the_rank_are_left_to_the_rank():
    layer = instep.replicate(nn.BatchNorm1d(1), batch_statistics="rank")
    x = torch.tensor([[0.0], [2.0]]) + 10 * instep.rank
    assert layer(x).detach().flatten().tolist() == pytest.approx([-1, 1], rel=1e-4)


@ranks(2)
def test_a_part_of_the_model_called_by_itself_uses_global_statistics():
    model = instep.replicate(nn.Sequential(nn.BatchNorm1d(1, eps=0), nn.Linear(1, 1)))
    x = torch.tensor([[0.0], [2.0]]) + 10 * instep.rank  # 0 2 10 12: mean 6, var 26
    expected = [(v - 6) / 26**0.5 for v in x.flatten().tolist()]
    assert model[0](x).detach().flatten().tolist() == pytest.approx(expected)


@ranks(2)
def test_other_normalisations_are_untouched():
    for layer in (nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4)):
        x = torch.randn(3 + instep.rank, 4, 4)
        expected = layer(x)
        assert torch.equal(instep.replicate(layer)(x), expected)


@ranks(2)
def test_one_value_per_channel_in_all_is_an_error():
    layer = instep.replicate(nn.BatchNorm1d(4))
    with pytest.raises(TrainingError, match="all ranks together hold 1"):
        layer(instep.shard(torch.randn(1, 4)))


@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",), ("weight", "bias")])
@ranks(2)
def test_second_derivatives_with_frozen_weights_are_those_of_one_process(frozen):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    own = slice(4 * instep.rank, 4 * instep.rank + 4)

    def derivatives(norm, x):
        x = x.clone().requires_grad_()
        weight, bias = (
            torch.full((3,), 2.0, dtype=torch.float64, requires_grad=name not in frozen)
            for name in ("weight", "bias")
        )
        output = norm(x, None, None, weight, bias, training=True)
        (first,) = torch.autograd.grad((output**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), x)
        return first, second

    for ours, theirs in zip(
        derivatives(batch_norm, whole[own]), derivatives(F.batch_norm, whole), strict=True
    ):
        torch.testing.assert_close(ours, theirs[own])


def slopes(rows):
    """Of each row of the batch: the gradient of a gradient through the layer."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    layer = instep.replicate(nn.BatchNorm1d(4).double())
    x = instep.shard(whole).requires_grad_()
    (first,) = torch.autograd.grad((layer(x) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    return first.detach(), second


def test_a_placeholder_adds_nothing_to_second_derivatives():
    (whole,) = run(1, slopes, 2)
    of_ranks = run(3, slopes, 2)[1:]  # rank 0 has no row
    for ours, theirs in zip(zip(*of_ranks, strict=True), whole, strict=True):
        torch.testing.assert_close(torch.cat(ours), theirs)


@ranks(2)
def test_a_placeholder_of_more_values_has_the_same_error():
    layer, x = instep.replicate(nn.BatchNorm1d(4)), instep.shard(torch.ones(1, 4, 1))
    assert len(x) == 1
    with pytest.raises(TrainingError, match="all ranks together hold 1 "):
        layer(x if instep.rank else x.repeat(1, 1, 5))
