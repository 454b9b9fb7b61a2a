"""What computes batch normalisation on one rank: PyTorch's kernels and those in C."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import components
from instep.training.normalization import cpu_kernels
from instep.training.normalization.kernels import Shard
from instep.training.normalization.torch_kernels import TORCH_KERNELS


def in_c():
    found = cpu_kernels.cpu_kernels()
    assert found is not None, "not built: pip install -e ., with a C compiler and Python's headers"
    return found


@pytest.fixture(
    params=["torch", pytest.param("C", marks=components.needs("C++"))],
)
def kernels(request):
    return in_c() if request.param == "C" else TORCH_KERNELS


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class BothShards:
    """The collectives between two shards that one process holds."""

    gather_numbers = staticmethod(np.stack)
    sum_numbers = staticmethod(sum)
    gather_doubles = terms_over_shards = staticmethod(b"".join)


def as_array(numbers):
    return np.frombuffer(numbers) if isinstance(numbers, bytes) else numbers


def test_moments_of_channels_near_zero_far_from_it_constant_and_not_finite(kernels):
    """As exact as squared distances from the mean, in double precision."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((6, 8, 32, 32), generator=generator)
    x[:, 1] += 1e4
    x[:, 2] = 1e4 + 1 / 3
    x[:, 3] = 0
    x[0, 4, 0, 0] = x[1, 7, 0, 0] = torch.inf
    x[0, 5, 0, 0] = torch.nan
    x[0, 6, 0, 0] = 1e6
    moments = as_array(kernels.moments(x))
    exact = x.double().transpose(0, 1).flatten(1)
    squares = (exact - exact.mean(1, keepdim=True)).square().sum(1)
    assert moments[-1] == 6 * 32 * 32
    precision = {"rtol": 1e3 * torch.finfo(x.dtype).eps, "equal_nan": True}
    np.testing.assert_allclose(moments[:8], exact.mean(1), **precision)
    np.testing.assert_allclose(moments[8:-1], squares, atol=1e-6, **precision)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    "shape", [(9, 5, 1, 2), (9, 5, 3), (9, 5, 7, 11), (9, 1, 2, 3, 4)], ids=str
)
def test_two_shards_give_what_their_rows_give_together(kernels, shape, affine):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 3 + 5
    grad = torch.randn(shape, generator=generator)
    weight, bias = torch.randn((2, shape[1]), generator=generator) if affine else (None, None)
    running = [torch.zeros(shape[1]), torch.ones(shape[1])]
    expected = reference(x, grad, weight, bias, running)

    rows = (2, 7)
    parts, grads = x.split(rows), grad.split(rows)
    shard = Shard(parts[0], *running, weight, bias, training=True, momentum=0.3, eps=1e-3)
    moments = kernels.gather([kernels.moments(part) for part in parts], BothShards)
    assert kernels.count(moments, shape[1]) == x.numel() / shape[1]
    statistics = kernels.merge(moments, [shard])
    y = torch.cat([kernels.normalize(part, weight, bias, statistics) for part in parts])
    own = [kernels.sums(*each, statistics) for each in zip(grads, parts, strict=True)]
    total = kernels.total([sums for sums, _, _ in own], BothShards)
    dx = torch.cat(
        [
            kernels.input_gradient(g, part, weight, total, statistics)
            for g, part in zip(grads, parts, strict=True)
        ]
    )
    found = [y, dx, *running, own[0][1] + own[1][1], own[0][2] + own[1][2]]
    for mine, exact in zip(found, expected, strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)
    assert all(each._version == 0 for each in running)


def reference(x, grad, weight, bias, running):
    """Output, its gradient, running statistics and the gradients of weight and bias, in double
    precision."""
    channels = x.shape[1]
    x = x.double().requires_grad_()
    weight = (torch.ones(channels) if weight is None else weight).double().requires_grad_()
    bias = (torch.zeros(channels) if bias is None else bias).double().requires_grad_()
    statistics = [each.double() for each in running]
    y = F.batch_norm(x, *statistics, weight, bias, True, 0.3, 1e-3)
    y.backward(grad.double())
    return y.detach(), x.grad, *statistics, weight.grad, bias.grad


class Marked(torch.Tensor):
    """A tensor of a script's own class."""


X = torch.randn(4, 3, 5, 5)
OTHERS = {
    "double precision": Shard(X.double(), None, None),
    "half precision": Shard(X.bfloat16(), None, None),
    "channels last": Shard(X.contiguous(memory_format=torch.channels_last), None, None),
    "no channels": Shard(X[:, :0].contiguous(), None, None),
    "rows of single numbers": Shard(X[:, :, 0, 0].contiguous(), None, None),
    "an own class": Shard(X.as_subclass(Marked), None, None),
    "weights in double precision": Shard(X, None, None, torch.ones(3).double()),
    "too few weights": Shard(X, None, None, torch.ones(2)),
    "running statistics in steps": Shard(X, torch.zeros(6)[::2], None),
}


@components.needs("C++")
@pytest.mark.parametrize("kind", OTHERS)
def test_the_kernels_in_c_leave_other_tensors_to_torch(kind, one_thread):
    assert in_c().accepts([Shard(X, torch.zeros(3), None, nn.Parameter(torch.ones(3)))])
    assert not in_c().accepts([OTHERS[kind]])


@pytest.mark.parametrize(
    "other",
    [X.as_subclass(Marked), X.contiguous(memory_format=torch.channels_last)],
    ids=["class", "layout"],
)
@components.needs("C++")
def test_what_backward_gets_in_another_way_is_left_to_torch(other):
    """A gradient of a script's own class, or saved tensors that a hook has changed."""
    statistics = in_c().merge(in_c().moments(X), [Shard(X, None, None)])
    expected, *_ = in_c().sums(X, X, statistics)
    dx = in_c().input_gradient(X, X, None, expected, statistics)
    for grad, x in ((other, X), (X, other)):
        kernels, theirs = in_c().for_backward(statistics, [grad], [x, None, None])
        sums, *_ = kernels.sums(grad, x, theirs)
        np.testing.assert_allclose(as_array(sums), as_array(expected), rtol=1e-5)
        found = kernels.input_gradient(grad, x, None, sums, theirs)
        torch.testing.assert_close(found.as_subclass(torch.Tensor), dx, check_stride=False)


@components.needs("C++")
def test_the_kernels_in_c_leave_several_threads_to_torch(one_thread):
    torch.set_num_threads(2)
    assert not in_c().accepts([Shard(X, None, None)])


@components.needs("C++")
@pytest.mark.parametrize(
    "name", ["moments", "merge", "update_running", "normalize", "sums", "input_gradient"]
)
@pytest.mark.parametrize("count", [0, 1, 20])
def test_another_number_of_arguments_is_an_error(name, count):
    with pytest.raises(TypeError):
        getattr(in_c()._compiled, name)(*[None] * count)


@components.needs("C++")
def test_kernels_of_another_version_are_not_called(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "_INTERFACE", 0)
    assert cpu_kernels.cpu_kernels.__wrapped__() is None
