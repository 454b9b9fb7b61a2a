"""Trainings on simulated accelerators that torch and instep take for CUDA (simulated.py).

Each rank sees all devices of its host, and its own is that of its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import components
import instep
import pool
from oracle import same_as_one_process
from sharded_training import SHARDED
from test_simulated import (
    EXPLICIT,
    OF_THE_CPU,
    check_replicas,
    check_waits,
    on_sim,
    steps,
    waits,
)

pytestmark = [pytest.mark.slow, components.needs("C++")]


@pytest.fixture(autouse=True)
def _on_cuda() -> Iterator[None]:
    with pool.talking_over("cuda"):
        yield


@contextmanager
def only_its_own_device() -> Iterator[None]:
    """What runs inside uses no other; other tests of the same process may have."""
    import simulated

    simulated.devices_used().clear()
    yield
    assert simulated.devices_used() == {instep.rank}


# ------------------------------------------------------------------------------- the device itself


def as_torch_sees_it() -> None:
    """What scripts ask; CUDA's own rules of autocast; and what is refused."""
    x = torch.ones(2, 2).cuda()
    assert x.is_cuda
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == (True, 8)
    assert x.device == torch.device("cuda", instep.rank)
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    with torch.autocast("cuda"):
        assert F.linear(x, x).dtype is torch.float16
        assert (x.half() + x).dtype is torch.float32
        assert x.half().exp().dtype is torch.float32
    with pytest.raises(RuntimeError, match="invalid device ordinal 8"):
        torch.ones(2, device="cuda:8")
    other = torch.device("cuda", instep.rank + 1)
    with pytest.raises(RuntimeError, match=f"at least two devices, {x.device} and {other}"):
        x + torch.ones(2, 2, device=other)
    assert torch.Generator(other).device == other


@only_its_own_device()
def values_arrive_on_the_ranks_own_device() -> None:
    @instep.single_process_scope()
    def once() -> torch.Tensor:
        return torch.full((2,), instep.rank + 5.0, device="cuda")

    sent = torch.ones(2, device="cuda")
    found = [once(), instep.broadcast_object({"x": sent})["x"], *instep.all_gather_object(sent)]
    assert [value.tolist() for value in found] == [[5.0, 5.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    assert {value.device for value in found} == {torch.device("cuda", instep.rank)}


@pytest.mark.parametrize(
    "body",
    [values_arrive_on_the_ranks_own_device, as_torch_sees_it],
    ids=lambda body: body.__name__,
)
def test_on_two_ranks(body: Any) -> None:
    pool.run(2, body)


# ------------------------------------------------------------------------------------- trainings


@only_its_own_device()
def waits_on_its_own_device(*args: Any) -> list[list[str]]:
    return waits(*args)


@pytest.mark.parametrize(("name", "door"), steps(["Adam, capturable", "float16, fused"]))
def test_in_a_step_the_host_waits_for_nothing(name: str, door: str) -> None:
    """As on the device that torch does not know."""
    check_waits(waits_on_its_own_device, name, door)


WITHOUT_KERNELS = {"attending", "time_first", "transformer_with_dropout"}
"""For which torch asks its build whether there is cuDNN, or a kernel of attention."""

SEVERAL = {"data_parallel"}
"""In one process `DataParallel` scatters to all of the devices, which the simulation cannot."""


@pytest.mark.parametrize("name", [name for name in EXPLICIT if name not in WITHOUT_KERNELS])
@pytest.mark.nightly
def test_replicas_have_the_numbers_of_one_process(name: str) -> None:
    check_replicas(name)


@pytest.mark.parametrize(
    "name",
    sorted({training.__name__ for training in SHARDED} - OF_THE_CPU - WITHOUT_KERNELS - SEVERAL),
)
@pytest.mark.nightly
def test_unedited_trainings_have_the_numbers_of_one_process(name: str) -> None:
    same_as_one_process(on_sim, name, sizes=(2,), dtype=torch.float64, nudge=True)
