"""`apex.parallel`: gradients averaged over ranks, and batch statistics of several ranks."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import instep
from instep.compat.apex.parallel import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)
from instep.errors import InstepWarning
from pool import ranks, talking_over

pytestmark = pytest.mark.slow


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def rows(n=5):
    """Every rank's batch: (ranks, n, 4)."""
    return torch.randn(instep.world_size, n, 4, generator=torch.Generator().manual_seed(1))


def averages(x, module=None, backwards=1):
    """What the mean over ranks of each rank's gradient is, computed here."""
    module = module or small_model()
    for _ in range(backwards):
        losses = [module(x[r]).square().mean() for r in range(len(x))]
        (sum(losses) / len(x)).backward()
    return [p.grad for p in module.parameters()]


def assert_grads(module, expected, **tolerance):
    for parameter, grad in zip(module.parameters(), expected, strict=True):
        if grad is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, grad, **tolerance)


# ------------------------------------------------------------------- DistributedDataParallel


@ranks(1, 2, 3)
def test_gradients_are_averaged_whatever_the_options():
    x = rows()
    expected = averages(x)
    for options in (
        {},
        {"message_size": 1},
        {"delay_allreduce": True},
        {"allreduce_always_fp32": True},
        {"gradient_predivide_factor": 4.0},
        {"num_allreduce_streams": 2, "prof": True},
        {"retain_allreduce_buffers": True},
    ):
        model = DistributedDataParallel(small_model(instep.rank), **options)
        for _ in range(2):
            model.zero_grad()
            model(x[instep.rank]).square().mean().backward()
            assert_grads(model, expected)
    assert [len(b) for b in model.allreduce_buffers] == [sum(p.numel() for p in model.parameters())]
    assert list(model.state_dict()) == [f"module.{name}" for name in small_model().state_dict()]


@ranks(2, 3)
def test_without_average_the_sum_is_left_predivided_as_in_apex():
    x = rows()
    expected = [grad * instep.world_size / 4 for grad in averages(x)]
    model = DistributedDataParallel(
        small_model(), gradient_average=False, gradient_predivide_factor=4.0
    )
    model(x[instep.rank]).square().mean().backward()
    assert_grads(model, expected)


@ranks(2, 3)
def test_half_precision_is_added_up_in_float32_when_asked():
    class Times(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, dtype=torch.float16))

        def forward(self, x):
            return self.w * x

    largest = torch.tensor([60000.0, 1.0], dtype=torch.float16)
    model = DistributedDataParallel(Times(), allreduce_always_fp32=True)
    model(largest).sum().backward()
    assert torch.equal(model.module.w.grad, largest)
    model = DistributedDataParallel(Times())
    model(largest).sum().backward()
    assert model.module.w.grad[0].isinf()


@ranks(1, 2)
def test_a_model_is_freed_with_its_wrapper_and_averaged_as_long_as_it_lives():
    x = rows()
    module = small_model()
    DistributedDataParallel(module)
    gc.collect()
    module(x[instep.rank]).square().mean().backward()
    assert_grads(module, averages(x))
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        copied(x[instep.rank]).sum().backward()  # one of its own: no rank waits
    weight = weakref.ref(module[0].weight)
    del module, copied
    gc.collect()
    assert weight() is None


@ranks(2)
def test_trigger_parameters_close_the_buckets():
    module = small_model()
    model = DistributedDataParallel(module, allreduce_trigger_params=[module[2].weight])
    assert [len(bucket.layout.slots) for bucket in model._buckets] == [2, 2]
    x = rows()
    model(x[instep.rank]).square().mean().backward()
    assert_grads(model, averages(x))


@ranks(2, 3)
def test_gradients_stay_here_while_allreduce_is_off():
    x = rows()
    model = DistributedDataParallel(small_model())
    model.disable_allreduce()
    model(x[instep.rank]).square().mean().backward()
    own = small_model()
    own(x[instep.rank]).square().mean().backward()
    assert_grads(model, [p.grad for p in own.parameters()])
    model.enable_allreduce()
    model(x[instep.rank]).square().mean().backward()
    assert_grads(model, averages(x, backwards=2))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.always, self.even, self.never = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, even):
        return self.always(x) + self.even(x) if even else self.always(x)


@ranks(2, 3)
def test_a_parameter_that_some_ranks_do_not_use_is_averaged_with_zeros():
    x, world = rows(), instep.world_size
    reference = Branches()
    (sum(reference(x[r], r % 2 == 0).square().mean() for r in range(world)) / world).backward()
    model = DistributedDataParallel(Branches(), message_size=1)
    model(x[instep.rank], instep.rank % 2 == 0).square().mean().backward()
    assert_grads(model, [p.grad for p in reference.parameters()])


@ranks(2, 3)
def test_no_bucket_is_sent_before_its_gradients_are_there():
    """Apex's race condition test: parameters whose gradients depend on the iteration."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.full((64, 64), 1.0))
            self.b = nn.Parameter(torch.full((64, 64), 2.0))

        def forward(self, x):
            return (x * self.a) * self.b

    model = DistributedDataParallel(Product(), message_size=1)
    world = instep.world_size
    for i in range(10):
        model.zero_grad()
        model(torch.full((64, 64), float(i + instep.rank))).sum().backward()
        mean = i + (world - 1) / 2
        assert torch.equal(model.module.a.grad, torch.full((64, 64), 2.0 * mean))
        assert torch.equal(model.module.b.grad, torch.full((64, 64), mean))


@ranks(1)
def test_options_that_contradict_each_other_are_refused():
    for options, message in (
        ({"shared_param": True}, "shared_param is no longer an option"),
        ({"delay_allreduce": True, "allreduce_trigger_params": []}, "allreduce_trigger_params has"),
        ({"delay_allreduce": True, "num_allreduce_streams": 2}, "num_allreduce_streams has no"),
    ):
        with pytest.raises(ValueError, match=message):
            DistributedDataParallel(small_model(), **options)
    with pytest.warns(InstepWarning, match="no device_ids and no output_device; they are ignored"):
        DistributedDataParallel(small_model(), device_ids=[0])


# --------------------------------------------------------------------------------- Reducer


@ranks(1, 2, 3)
def test_a_reducer_averages_when_it_is_asked():
    x = rows()
    model = small_model(instep.rank)
    reducer = Reducer(model)
    model(x[instep.rank]).square().mean().backward()
    reducer.reduce()
    assert_grads(model, averages(x))
    grads = [torch.full((2,), float(instep.rank)), [torch.full((1,), 1.0, dtype=torch.float64)]]
    Reducer(grads).reduce()
    assert grads[0].tolist() == [(instep.world_size - 1) / 2] * 2
    assert grads[1][0].item() == 1


# --------------------------------------------------------------------------- SyncBatchNorm


def normalised(layer, x, weight_of_rows):
    """Output, gradient of the input and of the parameters, running statistics."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * weight_of_rows).sum().backward()
    return y, x.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var


@ranks(1, 2, 3)
def test_synced_statistics_are_those_of_all_rows():
    """One layer on each rank's rows, of different numbers, against PyTorch's on all of them."""
    for shape, plain, channel_last in (
        ((7, 3), nn.BatchNorm1d(3), False),
        ((7, 3, 5), nn.BatchNorm1d(3), False),
        ((7, 3, 4, 4), nn.BatchNorm2d(3), False),
        ((7, 3, 4, 4), nn.BatchNorm2d(3), True),
        ((7, 3, 2, 3, 2), nn.BatchNorm3d(3), False),
    ):
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        grads = torch.randn(shape, generator=generator, dtype=torch.float64)
        layer = SyncBatchNorm(3, channel_last=channel_last).double()
        expected = normalised(plain.double(), x, grads)
        parts = [1, 2, 4][: instep.world_size] if instep.world_size == 3 else [7]
        parts = [3, 4] if instep.world_size == 2 else parts
        mine = slice(sum(parts[: instep.rank]), sum(parts[: instep.rank + 1]))
        own_x, own_grads = x[mine], grads[mine]
        if channel_last:
            own_x, own_grads = own_x.movedim(1, -1), own_grads.movedim(1, -1)
        output, dx, *sums, mean, var = normalised(layer, own_x, own_grads)
        if channel_last:
            output, dx = output.movedim(-1, 1), dx.movedim(-1, 1)
        torch.testing.assert_close(output, expected[0][mine])
        torch.testing.assert_close(dx, expected[1][mine])
        for ours, theirs in zip(sums, expected[2:4], strict=True):
            torch.testing.assert_close(instep.all_reduce(ours), theirs)
        torch.testing.assert_close((mean, var), expected[4:])
        evaluated, whole = layer.eval()(own_x), plain.eval()(x)[mine]
        torch.testing.assert_close(evaluated.movedim(-1, 1) if channel_last else evaluated, whole)


@ranks(2, 4)
def test_groups_of_ranks_have_statistics_of_their_own():
    world, place = instep.world_size, instep.rank // 2
    pair = create_syncbn_process_group(2)
    assert pair.ranks == (2 * place, 2 * place + 1)
    assert create_syncbn_process_group(0) is None
    with pytest.raises(ValueError, match=f"groups of 3 do not divide {world} ranks"):
        create_syncbn_process_group(3)
    x = torch.randn(world, 4, 3, generator=torch.Generator().manual_seed(0))
    expected = nn.BatchNorm1d(3)(x[2 * place : 2 * place + 2].reshape(8, 3))
    by_torch = dist.new_group(list(pair.ranks), use_local_synchronization=True)
    for group in (pair, by_torch):
        layer = convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(3)), process_group=group)
        output = layer(x[instep.rank])
        torch.testing.assert_close(output, expected[(instep.rank % 2) * 4 :][:4])
    alone = SyncBatchNorm(3, process_group=create_syncbn_process_group(1))
    torch.testing.assert_close(alone(x[instep.rank]), nn.BatchNorm1d(3)(x[instep.rank]))


def penalty(layer, x):
    """The gradient of a penalty on a gradient, of which each rank gets its rows."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    slope.square().sum().backward()
    return x.grad


@ranks(2, 4)
def test_second_derivatives_are_those_of_the_group_too():
    place = instep.rank // 2
    layer = SyncBatchNorm(3, process_group=create_syncbn_process_group(2)).double()
    x = torch.randn(instep.world_size, 4, 3, generator=torch.Generator().manual_seed(0)).double()
    expected = penalty(nn.BatchNorm1d(3).double(), x[2 * place : 2 * place + 2].reshape(8, 3))
    torch.testing.assert_close(
        penalty(layer, x[instep.rank]), expected[(instep.rank % 2) * 4 :][:4]
    )


@ranks(1, 2)
def test_conversion_keeps_state_mode_and_the_optimizers_parameters():
    model = nn.Sequential(
        nn.Linear(3, 3),
        nn.BatchNorm1d(3, momentum=None),
        nn.Sequential(
            nn.InstanceNorm1d(3, track_running_stats=True), nn.BatchNorm1d(3, affine=False)
        ),
    )
    model[1].running_mean.fill_(2.0)
    before = list(model.parameters())
    model.eval()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    converted = convert_syncbn_model(model)
    assert [type(m).__name__ for m in converted[1:2]] == ["SyncBatchNorm"]
    assert isinstance(converted[2][0], nn.InstanceNorm1d)
    assert isinstance(converted[2][1], SyncBatchNorm)
    assert not converted[1].training
    assert all(a is b for a, b in zip(before, converted.parameters(), strict=True))
    assert all(torch.equal(t, state[name]) for name, t in converted.state_dict().items())
    assert isinstance(convert_syncbn_model(nn.BatchNorm2d(3)), SyncBatchNorm)
    converted.train()
    x = torch.randn(4, 3)
    converted[1](x)
    torch.testing.assert_close(converted[1].running_mean, instep.all_reduce(x.mean(0), "mean"))
    assert converted[1].num_batches_tracked == 1


@ranks(1, 2)
def test_a_residual_and_a_relu_may_follow():
    x = torch.randn(instep.world_size, 4, 3, generator=torch.Generator().manual_seed(0))
    z = torch.randn(4, 3)
    plain = nn.BatchNorm1d(3)(x.reshape(-1, 3)).view_as(x)[instep.rank]
    layer = SyncBatchNorm(3, fuse_relu=True)
    torch.testing.assert_close(layer(x[instep.rank], z), (plain + z).relu())


@ranks(2)
def test_half_precision_and_no_running_statistics():
    x = torch.randn(instep.world_size, 8, 3, generator=torch.Generator().manual_seed(0))
    layer = SyncBatchNorm(3, track_running_stats=False)
    expected = nn.BatchNorm1d(3, track_running_stats=False)(x.view(-1, 3)).view_as(x)[instep.rank]
    torch.testing.assert_close(layer.eval()(x[instep.rank]), expected)
    output = layer(x[instep.rank].half())
    assert output.dtype is torch.float16
    torch.testing.assert_close(output.float(), expected, rtol=1e-2, atol=1e-2)


class Parting(nn.Module):
    """What only rank 0 uses comes behind a layer whose backward talks, too."""

    def __init__(self):
        super().__init__()
        self.norm, self.extra = SyncBatchNorm(3), nn.Linear(3, 3)

    def forward(self, x):
        x = self.norm(x)
        return self.extra(x) if instep.rank == 0 else x


@ranks(2)
def gradients_beside_statistics():
    model = DistributedDataParallel(Parting(), message_size=1)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(instep.rank))
    model(x).square().mean().backward()
    (mine, theirs) = instep.all_gather(model.module.extra.weight.grad)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_gradients_of_unused_parameters_and_batch_statistics_do_not_meet(backend):
    with talking_over(backend):
        gradients_beside_statistics()
