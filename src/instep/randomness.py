"""Streams of random numbers that do not depend on the rank.

- The *shared* stream draws the order of samples: equal on all ranks, untouched by what the model
  draws, a function of (seed, epoch).
- The *sample's* streams draw what is random in a sample: functions of (seed, epoch, index),
  whoever loads it.
- The *model's* stream draws dropout masks (see `dropout`): a function of (seed, step, call,
  position in the batch).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from instep.objects import broadcast_object

T = TypeVar("T")


def agreed_seed() -> int:
    """A seed that rank 0 draws from its torch generator, on all ranks (all draw). Collective."""
    return broadcast_object(int(torch.randint(2**63 - 1, ())))


def mixed(*parts: object) -> int:
    """One 63-bit seed from several values: streams of neighbouring values are unrelated."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed the global generators on the CPU: torch, numpy, random."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class SharedStream:
    """Random numbers that are the same on all ranks: `with stream.drawing(): ...`.

    Code inside draws from the global generators on the CPU as it always does (torch, and unless
    `only_torch` also numpy and random); outside they are as they were.
    """

    def __init__(self, seed: int, *, only_torch: bool = False) -> None:
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._numpy = np.random.MT19937(seed)
        self._python = random.Random(seed).getstate()
        self._only_torch = only_torch

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from this stream."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self._torch)
        if self._only_torch:
            try:
                yield
            finally:
                self._torch = torch.get_rng_state()
                torch.set_rng_state(outside)
            return
        outside_numpy, outside_python = np.random.mtrand.get_bit_generator(), random.getstate()
        np.random.mtrand.set_bit_generator(self._numpy)
        random.setstate(self._python)
        try:
            yield
        finally:
            self._torch, self._python = torch.get_rng_state(), random.getstate()
            torch.set_rng_state(outside)
            np.random.mtrand.set_bit_generator(outside_numpy)
            random.setstate(outside_python)


# ------------------------------------------------------------------------------- the sample's


class Sample(NamedTuple):
    """What a sampler asks for when what is random in a sample shall not depend on who loads it."""

    index: Any
    epoch: int


class SeededDataset(Dataset[T], Generic[T]):
    """Draws each sample from a stream of its own, in whatever process loads it."""

    def __init__(self, dataset: Dataset[T], seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __getitem__(self, sample: Sample) -> T:
        seed_generators(mixed(self._seed, sample.epoch, sample.index))
        return self.dataset[sample.index]


def draws_nothing(dataset: object) -> bool:
    """Whether samples are known to have nothing random in them: tensors, or a part of such."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    return type(dataset) is TensorDataset
