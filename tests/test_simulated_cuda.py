"""Trainings on simulated accelerators that torch and instep take for CUDA (simulated.py).

Each rank sees all devices of its host, and its own is that of its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import components
import instep
import pool
import test_simulated
from oracle import same_as_one_process
from test_simulated import (
    EXPLICIT,
    INSIDE,
    NUDGED,
    OF_THE_CPU,
    OPTIMIZERS,
    nightly_but,
    waits,
)
from sharded_training import SHARDED

pytestmark = [pytest.mark.slow, components.needs("C++")]
o = torch.optim


@pytest.fixture(autouse=True)
def _on_cuda() -> Iterator[None]:
    with pool.talking_over("cuda"):
        yield


def waits_on_one_device(*args: Any) -> list[list[str]]:
    import simulated

    found = waits(*args)
    assert simulated.devices_used() == {instep.rank}
    return found


@pytest.mark.parametrize(("name", "door"), test_simulated.STEPS)
def test_in_a_step_the_host_waits_for_nothing(name: str, door: str) -> None:
    compared = 4 if name == INSIDE else 1
    for found in pool.run(2, waits_on_one_device, name, door):
        assert found[compared:] == [[]] * (6 - compared)


@pytest.mark.parametrize(
    "name",
    nightly_but({"classifier"}, *(t.__name__ for t in SHARDED if t.__name__ not in OF_THE_CPU)),
)
def test_unedited(name: str) -> None:
    same_as_one_process(test_simulated.on_sim, name, sizes=(2,), dtype=torch.float64, nudge=True)


@pytest.mark.parametrize("name", EXPLICIT)
def test_replicas(name: str) -> None:
    training = getattr(test_simulated.test_exactness, name)
    same_as_one_process(
        training, *EXPLICIT[name], sizes=(3,), dtype=torch.float64, nudge=name in NUDGED
    )
