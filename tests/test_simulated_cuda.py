"""Trainings on a simulated accelerator that torch and instep take for CUDA (simulated.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import components
import pool
import test_simulated
from oracle import same_as_one_process
from test_simulated import INSIDE, STEPS, nightly_but

pytestmark = [pytest.mark.slow, components.needs("C++")]
o = torch.optim


@pytest.fixture(autouse=True)
def _on_cuda() -> Iterator[None]:
    with pool.talking_over("cuda"):
        yield


@pytest.mark.parametrize(
    ("name", "door"), STEPS,
)
def test_in_a_step_the_host_waits_for_nothing(name: str, door: str) -> None:
    compared = 4 if name == INSIDE else 1
    for found in pool.run(2, test_simulated.waits, name, door):
        assert found[compared:] == [[]] * (6 - compared)


@pytest.mark.parametrize(
    "name", [t.__name__ for t in test_simulated.SHARDED],
)
def test_unedited(name: str) -> None:
    same_as_one_process(test_simulated.on_sim, name, sizes=(2,), dtype=torch.float64, nudge=True)
