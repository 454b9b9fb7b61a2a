"""What surrounds a training, on a simulated accelerator: collectives, checkpoints, jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import components
import instep
import pool
from instep import precision
from test_precision import nothing_cast_afterwards

pytestmark = [pytest.mark.slow, components.needs("C++")]


@pytest.fixture(autouse=True)
def _on_sim() -> Iterator[None]:
    with pool.talking_over("sim"):
        yield


def on_cpu(values: Any) -> list[torch.Tensor]:
    return [value.detach().cpu() for value in values]


# ------------------------------------------------------------------------------- in a kept pool


def every_collective() -> None:
    from instep.launch.env import rank_report

    collectives_and_trainings_of_the_self_test()
    (seen,) = rank_report.describe_rank()["accelerators"]
    assert seen == {"visible": 0, "physical": str(instep.rank), "name": "Simulated"}
    assert "simccl" in rank_report.describe_job()["available"]


def collectives_and_trainings_of_the_self_test() -> None:
    from instep.distributed.identity import torch_devices
    from instep.launch.env import self_test, training_test

    device = torch_devices.own_device()
    assert device == torch.device(pool.device(), 0)
    found = self_test.run_collectives(device)
    assert {verdict for _, verdict, _ in found} == {"ok"}, found
    trained = training_test.run_trainings(device)
    assert [(each.name, each.verdict) for each in trained] == [
        (name, "ok") for name in training_test.TRAININGS
    ]


def tensors_of_another_device() -> None:
    told = rf"on cpu and {pool.device()}:0, .* on meta"
    with pytest.raises(instep.errors.WrongDeviceError, match=told):
        instep.all_reduce(torch.ones(2, device="meta"))
    noise = instep.gather_rows(torch.full((2,), float(instep.rank), device=pool.device()))
    assert (noise.device.type, noise.tolist()) == (pool.device(), [0.0, 0.0, 1.0, 1.0])


def metrics_stay_on_the_device() -> None:
    accuracy, mean = instep.Accuracy(), instep.Mean()
    scores = torch.eye(4, device=pool.device())[: 2 + instep.rank]
    target = torch.zeros(len(scores), dtype=torch.int64, device=pool.device())
    for _ in range(2):  # at first the totals go to the device
        with pool.accelerator().counted() as host:
            accuracy.update(scores, target)
            mean.update(scores.sum(), len(scores))
    assert (host.reads, host.uploads) == ([], [])
    assert accuracy.compute() == pytest.approx((2 / 5,))
    assert mean.compute() == pytest.approx((2 * 2 + 3 * 3) / 5)


def collectives_by_name() -> None:
    """Horovod's, on the thread that executes them."""
    from instep.compat import horovod as hvd

    hvd.init()
    x = torch.full((3,), instep.rank + 1.0, device=pool.device())
    handles = [hvd.allreduce_async(x * k, name=f"x{k}", op=hvd.Sum) for k in (1, 2)]
    assert [hvd.synchronize(handle).tolist() for handle in handles] == [[3.0] * 3, [6.0] * 3]
    hvd.shutdown()


def scaled_by_levels() -> None:
    """O1 and O2 cast and scale; beside the scale itself nothing is read back."""
    os.environ["INSTEP_DRIFT_STEPS"] = "0"
    for level in ("O1", "O2"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(pool.device())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        amp = precision.prepare(model, optimizer, level)
        model = instep.replicate(model)
        x = torch.randn(24, 6)
        with nothing_cast_afterwards():
            for rows, y in instep.shard(DataLoader(TensorDataset(x, torch.arange(24) % 3), 6)):
                rows, y = rows.to(pool.device()), y.to(pool.device())
                with pool.accelerator().counted() as host:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(rows), y)
                    with amp.scale(loss) as scaled:
                        scaled.backward()
                    optimizer.step()
                lines = host.reads + host.uploads
        assert len(lines) <= 1, lines
        assert all(p.isfinite().all() for p in model.parameters())
    del os.environ["INSTEP_DRIFT_STEPS"]


def a_divergence_is_found() -> None:
    """Parameters that one rank has changed."""
    os.environ["INSTEP_DRIFT_STEPS"] = "1"
    model = instep.replicate(nn.Linear(2, 2).to(pool.device()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if instep.rank == 1:
        model.weight.data.add_(1)

    def train() -> None:
        for _ in range(3):
            model(torch.ones(2, 2, device=pool.device())).sum().backward()
            optimizer.step()

    try:
        with pytest.raises(instep.errors.DriftError, match="weight"):
            train()
    finally:
        del os.environ["INSTEP_DRIFT_STEPS"]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(every_collective, marks=pytest.mark.nightly),
        tensors_of_another_device, metrics_stay_on_the_device,
        collectives_by_name, scaled_by_levels, a_divergence_is_found,
    ],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_on_two_ranks(body: Callable[[], None]) -> None:
    pool.run(2, body)


def trained(folder: str, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parameters after so many steps in all, and what the device's generator draws then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).to(pool.device())
    model = instep.replicate(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loader = instep.shard(DataLoader(TensorDataset(torch.randn(40, 6)), 8))
    checkpoint = instep.Checkpoint(folder, model=model, optimizer=optimizer, loader=loader)
    checkpoint.resume()
    for (x,) in loader:
        optimizer.zero_grad()
        model(x.to(pool.device())).square().mean().backward()
        optimizer.step()
        torch.randn(3, device=pool.device())
        checkpoint.step()
        if checkpoint.steps == steps:
            break
    checkpoint.save()
    checkpoint.close()
    return on_cpu(model.parameters()), on_cpu([torch.randn(4, device=pool.device())])


def test_a_checkpoint_has_the_devices_generator_and_resumes_to_the_bit(tmp_path: Path) -> None:
    whole = pool.run(2, trained, str(tmp_path / "whole"), 5)
    pool.run(2, trained, str(tmp_path / "parts"), 2)
    rest = pool.run(2, trained, str(tmp_path / "parts"), 5)
    for rank in range(2):
        for mine, expected in zip(rest[rank], whole[rank], strict=True):
            assert all(map(torch.equal, mine, expected))
