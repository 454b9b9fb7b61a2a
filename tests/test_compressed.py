"""Compressed gradients: as near as promised, the same on all ranks, nothing lost for good."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import instep
from instep import PowerSGD
from instep.distributed.communication.transport import get_transport, use_transport
from instep.errors import DisagreementError
from instep.training.buckets.compression import _LowRankMatrix
from pool import ranks, run, talking_over
from sharded_training import sharding

pytestmark = pytest.mark.slow

KINDS = ["fp16", "bf16", PowerSGD(1), PowerSGD(2, warm_up=1)]


def gradients(compression, rows, steps=1, dtype=torch.float32):
    """Those of so many backwards of one batch of so many rows, without a step in between."""
    torch.manual_seed(3)
    layers = [nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20)]
    model = instep.replicate(nn.Sequential(*layers).to(dtype), compression=compression)
    x, y = instep.shard((torch.randn(rows, 40, dtype=dtype), torch.randn(rows, 20, dtype=dtype)))
    found = []
    for _ in range(steps):
        model.zero_grad()
        mse_loss(model(x), y).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return found


def errors(found, true):
    """Relative, at each step; the ranks' bits are the same."""
    first, *others = found
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    return [((ours - true).norm() / true.norm()).item() for ours in first]


@pytest.fixture(params=["shm", "gloo"])
def backend(request):
    with talking_over(request.param):
        yield


@pytest.mark.parametrize(("kind", "limit"), [("fp16", 1e-3), ("bf16", 8e-3)])
def test_sixteen_bits_round_the_gradient(backend, kind, limit):
    ((true,),) = run(1, gradients, None, 7)
    (error,) = errors(run(2, gradients, kind, 7), true)
    assert limit / 100 < error < limit


@pytest.mark.parametrize("rows", [1, 4])  # one row: the other rank has a ghost
def test_two_factors_are_the_gradient_if_its_rank_is_no_larger(backend, rows):
    ((true,),) = run(1, gradients, None, rows, dtype=torch.float64)
    found = run(2, gradients, PowerSGD(4), rows, steps=3, dtype=torch.float64)
    assert max(errors(found, true)) < 1e-12


def test_what_is_not_sent_is_sent_later():
    ((true,),) = run(1, gradients, None, 64)
    found = run(3, gradients, PowerSGD(1), 64, steps=80)
    one_by_one = errors(found, true)
    assert min(one_by_one) > 0.05
    sums = [[sum(steps) / len(steps)] for steps in found]
    assert errors(sums, true)[0] < min(one_by_one) / 4


def test_a_warm_up_sends_whole_gradients():
    ((true,),) = run(1, gradients, None, 64)
    first, second, third = errors(run(2, gradients, PowerSGD(1, warm_up=2), 64, steps=3), true)
    assert max(first, second) < 1e-5
    assert third > 0.05


@ranks(2)
def test_a_backward_where_autocast_is_on_rounds_no_factors():
    torch.manual_seed(0)
    model = instep.replicate(nn.Linear(30, 20), compression=PowerSGD(1))
    wanted = torch.outer(torch.randn(20), torch.randn(30))
    with torch.autocast("cpu", torch.bfloat16):
        (model.weight * wanted).sum().backward()
    torch.testing.assert_close(model.weight.grad, wanted, rtol=1e-5, atol=1e-6)


@ranks(2)
def test_what_is_not_sent_waits_for_a_backward_that_has_the_gradient():
    torch.manual_seed(0)
    layers = [nn.Linear(30, 20), nn.Linear(30, 20)]
    one, other = instep.replicate(nn.ModuleList(layers), compression=PowerSGD(1))
    wanted = torch.randn(20, 2) @ torch.randn(2, 30)
    sent = torch.zeros(20, 30)
    for weights in (None, wanted, None, torch.zeros(20, 30)):
        weight = other.weight if weights is None else one.weight * weights
        one.weight.grad = None
        weight.sum().backward()
        assert (one.weight.grad is None) == (weights is None)
        sent += 0 if weights is None else one.weight.grad
    torch.testing.assert_close(sent, wanted, rtol=1e-4, atol=1e-5)


@ranks(2)
def test_a_backward_that_was_interrupted_leaves_nothing_behind():
    torch.manual_seed(0)
    model = instep.replicate(nn.Linear(30, 20), compression=PowerSGD(1))
    wanted = torch.outer(torch.randn(20), torch.randn(30))

    def interrupt(_):
        raise KeyboardInterrupt

    x = torch.ones(1, 30, requires_grad=True)
    first = x * 1
    first.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(first).sum().backward()
    model.zero_grad()
    (model.weight * wanted).sum().backward()
    torch.testing.assert_close(model.weight.grad, wanted, rtol=1e-5, atol=1e-6)


def stopped_while_a_bucket_travels():
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INSTEP_BUCKET_MIB", "0")  # a bucket for each parameter
        instep.replicate(model, compression=PowerSGD(1))

        def interrupt(_):
            raise KeyboardInterrupt

        hidden = model[0](torch.randn(4, 30))
        hidden.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model[1](hidden).square().sum().backward()
    model.zero_grad()
    torch.manual_seed(0)
    wanted = torch.outer(torch.randn(20), torch.randn(30))
    (model[1].weight * wanted).sum().backward()
    torch.testing.assert_close(model[1].weight.grad, wanted, rtol=1e-5, atol=1e-6)


def test_nor_does_one_that_was_interrupted_while_a_bucket_travelled():
    with talking_over("gloo"):
        run(2, stopped_while_a_bucket_travels)


@ranks(2)
def test_sixteen_bits_stay_the_sixteen_bits_that_they_are():
    model = instep.replicate(nn.Linear(3, 2).bfloat16(), compression="fp16")
    (model.weight * 1e6).sum().backward()
    assert model.weight.grad.eq(torch.tensor(1e6, dtype=torch.bfloat16)).all()


class Odd(nn.Module):
    """A part that no rank uses, one that rank 0 alone uses, a convolution, sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)
        self.body = nn.Sequential(nn.Conv1d(8, 16, 3), nn.BatchNorm1d(16), nn.Flatten())
        self.head, self.rare, self.never = (nn.Linear(16 * 4, 16) for _ in range(3))

    def forward(self, x):
        hidden = self.body(self.table(x).transpose(1, 2))
        out = self.head(hidden)
        return out + self.rare(hidden) if instep.rank == 0 else out


def train(compression):
    """Ragged batches with accumulation, one of them smaller than the world."""
    torch.manual_seed(5)
    model = instep.replicate(Odd(), compression=compression)
    watched = []
    model.head.bias.register_hook(watched.append)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randint(0, 50, (40, 6)), torch.randint(0, 16, (40,))
    losses = []
    for first, second in [((0, 8), (8, 15)), ((15, 31), (31, 38)), ((38, 40), (0, 7))] * 4:
        mine = [instep.shard((x[a:b], y[a:b])) for a, b in (first, second)]
        optimizer.zero_grad()
        with instep.no_sync():
            cross_entropy(model(mine[0][0]), mine[0][1]).backward()
        loss = cross_entropy(model(mine[1][0]), mine[1][1])
        loss.backward()
        optimizer.step()
        mean = instep.Mean()
        mean.update(loss, len(mine[1][0]))
        losses.append(mean.compute())
    assert watched
    assert model.never.weight.grad is None
    same = instep.all_gather(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert all(torch.equal(theirs, same[0]) for theirs in same)
    return losses


@pytest.mark.nightly
@pytest.mark.parametrize("compression", KINDS, ids=str)
def test_odd_models_learn_as_well_and_the_same_on_all_ranks(compression):
    exact, *_ = run(3, train, None)
    losses, *_ = run(3, train, compression)
    learned = exact[0] - exact[-1]
    assert learned > 0
    assert losses[0] == pytest.approx(exact[0])
    assert losses[0] - losses[-1] > 0.7 * learned


@ranks(2)
def test_an_infinite_gradient_is_seen_by_all_and_leaves_nothing_behind():
    torch.manual_seed(0)
    model = instep.replicate(nn.Linear(30, 20), compression=PowerSGD(4))
    for scale in (1.0, float("inf"), 1.0):
        model.zero_grad()
        weights = torch.full((1, 30), scale if instep.rank == 1 else 1.0)
        (model(torch.ones(1, 30)).sum() + (model.weight * weights).sum()).backward()
        assert model.weight.grad.isfinite().all().item() == (scale == 1.0)
    assert torch.allclose(model.weight.grad, torch.full((20, 30), 2.0))


class Counting:
    """Counts what is sent."""

    def __init__(self, way):
        self._way, self.sent = way, 0

    def __getattr__(self, name):
        return getattr(self._way, name)

    def all_reduce(self, tensor, op):
        self.sent += tensor.numel() * tensor.itemsize
        return self._way.all_reduce(tensor, op)

    def sum_rounded(self, tensor, dtype):
        self.sent += tensor.numel() * dtype.itemsize
        return self._way.sum_rounded(tensor, dtype)

    def all_reduce_each(self, tensors, op):
        for tensor in tensors:
            self.all_reduce(tensor, op)


@ranks(2)
def test_fewer_bytes_travel():
    beside = 2 + 64  # "this rank has it", and whose gradients they are
    numbers = 100 * 50 + 100 + beside
    factors = (100 + 50) * 3 + 100 + beside
    for compression, size in [
        (None, 4 * numbers),
        ("fp16", 2 * numbers),
        ("bf16", 2 * numbers),
        (PowerSGD(3), 4 * factors),
        (PowerSGD(40), 4 * numbers),
    ]:
        counting = Counting(get_transport())
        with use_transport(counting):
            model = instep.replicate(nn.Linear(50, 100), compression=compression)
        before = counting.sent
        model(torch.ones(2, 50)).sum().backward()
        assert counting.sent - before == size


def train_unedited(compression):
    """Some steps of a loop without instep; how the parameters have moved, and the bytes sent for
    each backward."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20))
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    counting, sent = Counting(get_transport()), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INSTEP_COMPRESSION", compression)
        with use_transport(counting), sharding() if instep.world_size > 1 else nullcontext():
            for rows in (8, 7, 8, 5, 8, 8):
                x, y = torch.randn(rows, 40), torch.randn(rows, 20)
                optimizer.zero_grad()
                loss = mse_loss(model(x), y)
                before = counting.sent
                loss.backward()
                sent.append(counting.sent - before)
                optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - start, sent


@pytest.mark.parametrize(
    ("compression", "least", "most"),
    [("none", 0, 1e-5), ("fp16", 1e-5, 1e-3), ("bf16", 8e-5, 8e-3), ("powersgd", 0.01, 0.7)],
)
def test_an_unedited_script_has_a_variable_for_it(backend, compression, least, most):
    ((true, _),) = run(1, train_unedited, "none")
    (first, _), (second, _) = run(2, train_unedited, compression)
    assert torch.equal(first, second)
    assert least <= (first - true).norm() / true.norm() < most


def test_an_unedited_script_sends_half_the_bytes():
    ((_, whole), *_) = run(2, train_unedited, "none")
    ((_, half), *_) = run(2, train_unedited, "bf16")
    assert min(whole) > 4 * 1850
    assert [2 * size for size in half] == whole


SCRIPT = """
import torch
from torch.nn.functional import mse_loss

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 20))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    optimizer.zero_grad()
    mse_loss(model(torch.randn(8, 40)), torch.randn(8, 20)).backward()
    optimizer.step()
print(*torch.nn.utils.parameters_to_vector(model.parameters()).tolist())
"""


@pytest.mark.nightly
def test_a_launched_script_trains_in_sixteen_bits(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)

    def trained(*command, **variables):
        words = [sys.executable, *command, "train.py"]
        environ = os.environ | variables
        out = subprocess.run(
            words, cwd=tmp_path, env=environ, check=True, capture_output=True, text=True
        ).stdout
        return torch.tensor([float(word.split("]")[-1]) for word in out.split()])

    alone = trained()
    compressed = trained("-m", "instep", "run", "-n", "2", INSTEP_COMPRESSION="bf16")
    assert 1e-6 < (compressed - alone).norm() / alone.norm() < 8e-3


@ranks(2)
def test_what_is_unknown_or_differs_between_ranks_is_refused():
    for wrong in ("fp8", 4, True):
        with pytest.raises(ValueError, match="compression is None, 'fp16', 'bf16' or an"):
            instep.replicate(nn.Linear(2, 2), compression=wrong)
    for wrong in ({"rank": 0}, {"warm_up": -1}):
        with pytest.raises(ValueError, match="rank is at least 1 and warm_up at least 0"):
            PowerSGD(**wrong)
    with pytest.raises(DisagreementError, match="compression PowerSGD"):
        instep.replicate(nn.Linear(2, 2), compression=PowerSGD(1 + instep.rank))


def test_what_is_not_sent_is_kept_on_the_parameters_device():
    matrix = _LowRankMatrix(torch.ones(4, 3, device="meta"), PowerSGD(1), seed=0)
    kept = {name: v.device.type for name, v in vars(matrix).items() if isinstance(v, torch.Tensor)}
    assert set(kept.values()) == {"meta"}
    assert "_error" in kept
