"""Streams of random numbers that do not depend on the rank.

The *shared* stream draws the order of samples: equal on all ranks, untouched by what the model
draws, a function of (seed, epoch).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

from instep.collectives import broadcast_object


def agreed_seed() -> int:
    """A seed that rank 0 draws from its torch generator, on all ranks (all draw). Collective."""
    return broadcast_object(int(torch.randint(2**63 - 1, ())))


def mixed(*numbers: int) -> int:
    """One 63-bit seed from several numbers: streams of neighbouring numbers are unrelated."""
    digest = blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class States(NamedTuple):
    """The state of every global generator on the CPU."""

    torch: torch.Tensor
    numpy: dict[str, Any]
    python: tuple[Any, ...]

    @classmethod
    def now(cls) -> States:
        """What the generators are at."""
        return cls(torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate())

    @classmethod
    def seeded(cls, seed: int) -> States:
        """What they would be at after seeding all three."""
        return cls(
            torch.Generator().manual_seed(seed).get_state(),
            np.random.RandomState(seed % 2**32).get_state(legacy=False),
            random.Random(seed).getstate(),
        )

    def restore(self) -> None:
        """Put the generators there."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


class SharedStream:
    """Random numbers that are the same on all ranks: `with stream.drawing(): ...`.

    Code inside draws from the global generators (torch on the CPU, numpy, random) as it always
    does; outside they are as they were.
    """

    def __init__(self, seed: int) -> None:
        self._states = States.seeded(seed)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from this stream."""
        outside = States.now()
        self._states.restore()
        try:
            yield
        finally:
            self._states = States.now()
            outside.restore()
