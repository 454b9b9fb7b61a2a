"""Streams on a simulated accelerator: who forgets to wait is told, and trainings that use several
have the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

import components
import instep
import pool
import test_exactness
from oracle import Log, same_as_one_process
from sharded_training import batches, mlp, unedited

pytestmark = [pytest.mark.slow, components.needs("C++")]


@pytest.fixture(autouse=True)
def _on_sim() -> Iterator[None]:
    with pool.talking_over("sim"):
        yield


# ---------------------------------------------------------------------------- the device itself


def what_forgets_to_wait() -> None:
    import simulated

    x = torch.full((3,), instep.rank + 1.0, device="sim")
    work = torch.distributed.all_reduce(x, async_op=True)
    assert simulated.on_cpu(x).isnan().all()
    with pytest.raises(simulated.Race, match=r"reads in .*aten.mul.* what stream \d+ writes in"):
        x * 2
    with simulated.counted() as host:
        work.wait()
    assert host.reads == []
    assert x.tolist() == [3.0] * 3
    torch.distributed.all_reduce(x, async_op=True)
    torch.accelerator.synchronize()  # the host has waited for all streams
    x * 2


def what_does_not_wait_for_a_stream() -> None:
    import simulated

    side, x = torch.Stream(device="sim"), torch.ones(3, device="sim")
    with side, pytest.raises(simulated.Race, match=r"stream \d+ reads in .* stream 0 writes in"):
        x * 2
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x * 2
    with pytest.raises(simulated.Race, match=r"stream 0 writes in .* stream \d+ reads in"):
        x.zero_()  # while `y` is computed of it
    with pytest.raises(simulated.Race, match="allreduce"):
        torch.distributed.all_reduce(y)
    torch.accelerator.current_stream().wait_event(side.record_event())
    torch.distributed.all_reduce(y)
    assert y.tolist() == [4.0] * 3


def backward_of_several_streams() -> None:
    """autograd computes each gradient in the stream of its forward, and joins them."""
    side = torch.Stream(device=pool.device())
    x = torch.ones(3, device=pool.device()).requires_grad_() * 1
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x * 2
    torch.accelerator.current_stream().wait_stream(side)
    (grad,) = torch.autograd.grad((y * 3 + x).sum(), x)
    assert grad.tolist() == [7.0] * 3


def submitted_by_name_from_a_stream() -> None:
    """Horovod's thread waits for the stream that has computed the tensor, and no other."""
    from instep.compat import horovod as hvd

    hvd.init()
    side = torch.Stream(device=pool.device())
    with side:
        x = torch.full((3,), instep.rank + 1.0, device=pool.device())
        handle = hvd.allreduce_async(x * 2, name="x", op=hvd.Sum)
        assert (hvd.synchronize(handle) + 1).tolist() == [7.0] * 3
    hvd.shutdown()


@pytest.mark.parametrize(
    "body",
    [
        what_forgets_to_wait, what_does_not_wait_for_a_stream, backward_of_several_streams,
        submitted_by_name_from_a_stream,
    ],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_on_two_ranks(body: Callable[[], None]) -> None:
    pool.run(2, body)


# ------------------------------------------------------------------------------------ trainings


class Branches(nn.Module):
    """One of its two branches is computed in a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        # That a parameter's node was made in another stream than it is used in, as under DDP.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        self.one, self.other = mlp(nn.BatchNorm1d(8)), mlp(nn.BatchNorm1d(8))
        self.side = torch.Stream(device=pool.device())

    def forward(self, x: Tensor) -> Tensor:
        main = torch.accelerator.current_stream()
        self.side.wait_stream(main)
        with self.side:
            other = self.other(x)
        one = self.one(x)
        main.wait_stream(self.side)
        return one + other


class In:
    """Inside, everything is computed in a stream of its own."""

    def __enter__(self) -> None:
        self.side = torch.Stream(device=pool.device())
        self.side.wait_stream(torch.accelerator.current_stream())
        self.side.__enter__()

    def __exit__(self, *args: Any) -> None:
        self.side.__exit__(*args)
        torch.accelerator.current_stream().wait_stream(self.side)


def explicit(log: Log, make: Callable[[], nn.Module]) -> None:
    """Batches come through pinned memory, in a stream of their own, one step ahead."""
    model = instep.replicate(make().double().to(pool.device()))
    log.begin(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    copying, main = torch.Stream(device=pool.device()), torch.accelerator.current_stream()
    loader = instep.shard(DataLoader(test_exactness.rows(31), 7, pin_memory=True))
    for x, y in log.batches(loader):
        with copying:
            x, y = x.to(pool.device(), non_blocking=True), y.to(pool.device(), non_blocking=True)
        main.wait_stream(copying)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        log.step(optimizer, model)


def in_one_stream(log: Log) -> None:
    with In():
        explicit(log, lambda: mlp(nn.BatchNorm1d(8), nn.Dropout(0.3), out=4))


def in_branches(log: Log) -> None:
    explicit(log, lambda: Branches4())


class Branches4(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = mlp(nn.BatchNorm1d(8), out=4), mlp(nn.BatchNorm1d(8), out=4)


def of_a_script(log: Log, model: nn.Module) -> None:
    model.double().to(pool.device())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    log.begin(model)
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        log.loss(loss)
        log.step(optimizer, model)


def unedited_in_one_stream(log: Log) -> None:
    def training(log: Log) -> None:
        with In():
            of_a_script(log, mlp(nn.BatchNorm1d(8), nn.Dropout(0.3)))

    unedited(log, training, is_sharded=True)


def unedited_in_branches(log: Log) -> None:
    unedited(log, lambda log: of_a_script(log, Branches()), is_sharded=True)


def called_in_two_streams(log: Log, model: nn.Module) -> None:
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    model.double().to(pool.device())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    log.begin(model)
    for x, y in batches():
        optimizer.zero_grad()
        one = model(x)
        with In():
            other = model(x * 2)
        loss = F.cross_entropy(one, y) + F.cross_entropy(other, y)
        loss.backward()
        log.loss(loss)
        log.step(optimizer, model)


def unedited_in_two_streams(log: Log) -> None:
    """Each parameter has gradients of two calls, of which each is computed in its call's stream."""
    unedited(log, lambda log: called_in_two_streams(log, mlp(nn.BatchNorm1d(8))), is_sharded=True)


TRAININGS = (
    in_one_stream, in_branches, unedited_in_one_stream, unedited_in_branches,
    unedited_in_two_streams,
)  # fmt: skip


def trainings(*daily: Callable[[Log], None]) -> list[Any]:
    """The parameters of a test: those that are not `daily` are nightly."""
    return [
        pytest.param(each, id=each.__name__, marks=() if each in daily else pytest.mark.nightly)
        for each in TRAININGS
    ]


@pytest.mark.parametrize("training", trainings(in_one_stream, unedited_in_two_streams))
def test_trainings_that_use_streams_have_the_numbers_of_one_process(
    training: Callable[[Log], None],
) -> None:
    same_as_one_process(training, sizes=(2,), dtype=torch.float64, nudge=True)
