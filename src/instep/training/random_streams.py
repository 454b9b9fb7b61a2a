"""Streams of random numbers that do not depend on the rank.

- The *shared* stream draws the order of samples. It is equal on all ranks, independent of what the
  model draws, and a function of (seed, epoch).
- The *sample's* streams draw what is random in a sample. They are functions of (seed, epoch,
  index), whichever rank loads it. What `collate_fn` draws is a function of (seed, epoch, batch).
- The *model's* stream draws dropout masks (see `draws`). It is a function of (seed, step,
  call, position in the batch).
"""

from __future__ import annotations

import ctypes
import pickle
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from instep.distributed.communication.objects import broadcast_object
from instep.distributed.flight_record.script_line import warn_at_script_line
from instep.distributed.identity import torch_devices
from instep.process import in_main_thread
from instep.process.failures.tracebacks import OwnFrames

T = TypeVar("T")


def broadcast_seed() -> int:
    """A seed from rank 0's torch generator, on all ranks; every rank draws one. Collective."""
    return broadcast_object(_new_seed())


def broadcast_seed_and_states() -> tuple[int, list[bool]]:
    """Rank 0's seed, and whether numpy's and Python's generators are as on rank 0. Collective."""
    mine = RNGStates.capture().sums()
    seed, theirs = broadcast_object((_new_seed(), mine))
    return seed, [own == common for own, common in zip(mine, theirs, strict=True)]


def _new_seed() -> int:
    return int(torch.randint(2**63 - 1, (), device="cpu"))


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from several values: streams of neighbouring values are unrelated."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def default_generators() -> list[torch.Generator]:
    """Torch's global generators: the CPU's, and that of this rank's accelerator if it is in use."""
    own = torch_devices.own_generator()
    return [torch.default_generator] if own is None else [torch.default_generator, own]


@contextmanager
def restoring_default_generators() -> Iterator[list[torch.Generator]]:
    """Inside, torch's global generators (the value) may draw; then they are as they were."""
    generators = default_generators()
    states = [generator.get_state() for generator in generators]
    try:
        yield generators
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def make_rng_state(like: torch.Generator, seed: int) -> Tensor:
    """The state of a generator on the device of `like` that begins with `seed`."""
    return torch.Generator(like.device).manual_seed(seed).get_state()


GENERATORS = frozenset({"torch", "numpy", "python"})
"""The global generators on the CPU: the fields of `RNGStates`."""


def seed_all(seed: int, generators: Collection[str] = GENERATORS) -> None:
    """Seed the global generators on the CPU, or those of these names.

    By the functions that numpy.random.seed and random.seed call: these may be replaced.
    """
    if "torch" in generators:
        torch.default_generator.manual_seed(seed)
    if "numpy" in generators:
        np.random.mtrand.seed(seed % 2**32)
    if "python" in generators:
        generator = _python_generator()
        super(random.Random, generator).seed(seed)
        generator.gauss_next = None


def _python_generator() -> Any:
    return random.getstate.__self__  # type: ignore[attr-defined]  # a bound method


_MT19937_BYTES = 4 * (624 + 1)
"""The key and the position of a Mersenne twister in memory."""
_HEADER_BYTES = object.__basicsize__
"""The reference count and the type of an object."""


class _LastStates:
    """The global generators as they were when they were last read or set."""

    numpy: tuple[bytes, dict[str, Any]] | None = None
    """The memory of numpy's, and its state. Kept only where that holds no normal number for the
    next draw (`has_gauss`): then each draw changes the memory of its twister. Whether a state with
    such a number was set since, the memory of the generator itself tells."""
    python: tuple[bytes, float | None, tuple[Any, ...]] | None = None
    """The memory of Python's, its `gauss_next`, and its state."""


_last = _LastStates()


def _read_numpy() -> dict[str, Any]:
    """The state of numpy's global generator: 70 us, or 1 us where nothing was drawn since."""
    if _last.numpy is not None and _last.numpy[0] == _memory_of_numpy():
        return _last.numpy[1]
    state: dict[str, Any] = np.random.get_state(legacy=False)
    _remember(state)
    return state


def _read_python() -> tuple[Any, ...]:
    """The state of Python's global generator: 8 us, or 1 us where nothing was drawn since."""
    generator = _python_generator()
    size = random.Random.__base__.__basicsize__ - _HEADER_BYTES  # type: ignore[union-attr]
    memory = ctypes.string_at(id(generator) + _HEADER_BYTES, size)
    last = _last.python
    if last is None or last[:2] != (memory, generator.gauss_next):
        last = _last.python = memory, generator.gauss_next, random.getstate()
    return last[2]


def _write_numpy(state: dict[str, Any]) -> None:
    np.random.set_state(state)
    _remember(state)


def _remember(state: dict[str, Any]) -> None:
    memory = _memory_of_numpy() if state.get("has_gauss") == 0 else None
    _last.numpy = None if memory is None else (memory, state)


def _memory_of_numpy() -> bytes | None:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in the stub
    if type(generator) is not np.random.MT19937:  # the script has set another one
        return None
    twister = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    of_all: Any = np.random.mtrand._rand
    size = type(of_all).__basicsize__ - _HEADER_BYTES
    return twister + ctypes.string_at(id(of_all) + _HEADER_BYTES, size)


@dataclass(frozen=True, eq=False)
class RNGStates:
    """The states of the global generators on the CPU: torch, numpy, random."""

    torch: Tensor
    numpy: dict[str, Any]
    python: tuple[Any, ...]

    @classmethod
    def capture(cls) -> RNGStates:
        """The states now."""
        return cls(torch.get_rng_state(), _read_numpy(), _read_python())

    def sums(self) -> tuple[int, int]:
        """Checksums of numpy's and Python's."""
        return crc32(pickle.dumps(self.numpy)), crc32(repr(self.python).encode())

    def restore(self, generators: Collection[str] = GENERATORS) -> None:
        """Set the generators to these states, or those of these names."""
        if "torch" in generators:
            torch.set_rng_state(self.torch)
        if "numpy" in generators:
            _write_numpy(self.numpy)
        if "python" in generators:
            random.setstate(self.python)

    def equals(self, other: RNGStates) -> bool:
        """Whether nothing was drawn between the two."""
        return not self.changed_generators(other)

    def equals_except_torch(self, other: RNGStates) -> bool:
        """Whether nothing was drawn from numpy's and Python's."""
        return self.changed_generators(other) <= {"torch"}

    def changed_generators(self, other: RNGStates) -> frozenset[str]:
        """The names of the generators that something was drawn from between the two."""
        is_changed = {
            "torch": not torch.equal(self.torch, other.torch),
            "numpy": self.numpy is not other.numpy
            and pickle.dumps(self.numpy) != pickle.dumps(other.numpy),
            "python": self.python is not other.python and self.python != other.python,
        }
        return frozenset(name for name, is_drawn in is_changed.items() if is_drawn)


class SharedRandomStream:
    """Random numbers that are the same on all ranks: `with stream.activate(): ...`.

    Code inside draws from the global generators on the CPU as it always does (torch, numpy and
    random); outside they are as they were.
    """

    def __init__(self, seed: int) -> None:
        self.states = RNGStates(
            torch.Generator().manual_seed(seed).get_state(),
            dict(np.random.MT19937(seed).state),
            random.Random(seed).getstate(),
        )

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Inside, the global generators draw from this stream. Warns once in another thread than
        the main one, whose draws they would be as well (InstepWarning)."""
        if not in_main_thread():
            _warn_of_thread()
        before = RNGStates.capture()
        self.states.restore()
        try:
            yield
        finally:
            self.states = RNGStates.capture()
            before.restore()


@cache
def _warn_of_thread() -> None:
    warn_at_script_line(
        "This line iterates over a sharded loader in a thread. What the loader draws comes from "
        "the global generators, so what it and the main thread draw at the same time is not what "
        "one process draws. Let a worker load the samples (num_workers=1), or iterate in the main "
        "thread. [INS710]"
    )


# ------------------------------------------------------------------------------- the sample's


class SeededIndex(NamedTuple):
    """What a sampler requests where the randomness of a sample must not depend on its loader."""

    index: Any
    epoch: int
    batch: int
    """The number of the batch in its epoch."""


class SeededDataset(Dataset[T], Generic[T]):
    """Draws each sample from a stream of its own, whichever process loads it; and what is random
    in putting a batch together from one of the batch's, on every rank alike."""

    def __init__(self, dataset: Dataset[T], seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __getitem__(self, sample: SeededIndex) -> T:
        seed_all(derive_seed(self._seed, sample.epoch, sample.index))
        try:
            return self.dataset[sample.index]
        except Exception as error:
            error.add_note(f"This was sample {sample.index!r} of the data set.")
            raise

    def __getitems__(self, samples: list[SeededIndex]) -> list[T]:
        with OwnFrames():  # a worker makes a text of the traceback
            loaded = [self[sample] for sample in samples]
        for sample in samples[:1]:  # collate_fn is next
            seed_all(derive_seed(self._seed, sample.epoch, "batch", sample.batch))
        return loaded


def is_deterministic(dataset: object) -> bool:
    """Whether samples are known to have nothing random in them, because they lie in memory."""
    if type(dataset) is Subset:
        return is_deterministic(dataset.dataset)
    return type(dataset) in (TensorDataset, torch.Tensor, np.ndarray, list, tuple, range)
