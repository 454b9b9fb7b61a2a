"""The states of the global generators: what was drawn between two of them is seen."""

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
import torch

from instep.distributed.generator_states import hash_states
from instep.training.random_streams import RNGStates
from instep.verify.recording.fingerprints import hash_generators

CHANGES: list[Callable[[], object]] = [
    lambda: None,
    np.random.random,
    np.random.standard_normal,  # the second of two uses up the number that waits since the first
    lambda: np.random.seed(3),
    random.random,
    lambda: random.gauss(0, 1),  # the second of two uses up the number that waits
    lambda: random.seed(3),
    lambda: torch.rand(1),
]


def states() -> tuple[bytes, object, str]:
    numpy = np.random.get_state(legacy=False)
    key = {"key": numpy["state"]["key"].tobytes()} if "key" in numpy["state"] else {}
    others = repr({**numpy, "state": {**numpy["state"], **key}})
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), others


@contextmanager
def own_generators() -> Iterator[None]:
    generator, before = np.random.get_bit_generator(), RNGStates.capture()
    try:
        yield
    finally:
        np.random.set_bit_generator(generator)
        before.restore()


def check(change: Callable[[], object], *, restores: bool) -> None:
    before, expected = RNGStates.capture(), states()
    change()
    assert before.equals(RNGStates.capture()) == (states() == expected)
    if restores:
        before.restore()
        assert states() == expected
        assert before.equals(RNGStates.capture())


@pytest.mark.parametrize("is_twister", [True, False])
@pytest.mark.parametrize("restores", [True, False])
def test_draws_are_seen_and_undone(is_twister: bool, restores: bool) -> None:
    with own_generators():
        if not is_twister:
            np.random.set_bit_generator(np.random.PCG64(3))
        for changes in product(CHANGES, repeat=2):
            for change in changes:
                check(change, restores=restores)
            np.random.standard_normal()  # so that a number waits in every second turn


def test_a_state_with_a_waiting_number_and_the_same_key_is_another_one() -> None:
    with own_generators():
        state = RNGStates.capture().numpy
        waiting = {**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": 0.5}
        np.random.set_state({**waiting, "has_gauss": 0, "gauss": 0.0})
        assert RNGStates.capture().numpy["has_gauss"] == 0
        np.random.set_state(waiting)
        assert RNGStates.capture().numpy["has_gauss"] == 1
        np.random.set_state(state)
        assert RNGStates.capture().numpy["has_gauss"] == state["has_gauss"]


def test_equal_states_have_equal_hashes_whichever_generators_they_are_of() -> None:
    with own_generators():
        for change in (*CHANGES, lambda: np.random.set_bit_generator(np.random.PCG64(3))):
            before, expected = hash_generators(), states()
            copied = pickle.loads(pickle.dumps([*vars(RNGStates.capture()).values()]))
            assert hash_states(copied) == hash_states(vars(RNGStates.capture()).values())
            change()
            assert (hash_generators() == before) == (states() == expected)


def test_a_waiting_normal_number_is_part_of_the_hash() -> None:
    with own_generators():
        before, state = hash_generators(), np.random.get_state(legacy=False)
        np.random.set_state({**state, "has_gauss": 1, "gauss": 0.5})
        assert hash_generators() != before
