"""One seed for the generators of all ranks, for those that the script does not seed, and for those
that it seeds by the clock or by what it asks of the operating system."""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import shake_128
from importlib import import_module
from multiprocessing import current_process
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from instep.distributed.communication.rank_local import is_thread_rank_local
from instep.process import frames_from, is_script_file, patching, settings
from instep.process.errors import LaunchVariablesError
from instep.process.import_hooks import after_import
from instep.process.patching import Function, patches


class Rank0(Protocol):
    """Does something on rank 0 for all ranks."""

    def is_ordered(self) -> bool:
        """Whether all ranks come here in the same order."""

    def run_on_rank0(self, name: str, function: Callable[[], Any]) -> Any:
        """The value of `function()` on rank 0."""


_MAX_ASKED = {"a seed": 8, "random bytes": 1000}
"""How often rank 0 answers for all ranks; a message takes a millisecond."""
_PASSED_THROUGH = (__file__, patching.__file__, random.__file__)


class _JobBits:
    """The bits by which generators are seeded that the script does not seed."""

    def __init__(self) -> None:
        self._seed = 0
        self.calls: Counter[str] = Counter()
        """How often bits were asked for: while each module was imported, and otherwise."""

    def restart(self, seed: int) -> None:
        """Begin anew, with the job's seed."""
        self._seed = seed
        self.calls = Counter()

    def take(self, k: int) -> int:
        """The next k of them."""
        importing = _importing()
        parts = (self._seed, current_process()._identity, importing, self.calls[importing])
        self.calls[importing] += 1
        digest = shake_128(repr(parts).encode()).digest((k + 7) // 8)
        return int.from_bytes(digest, "little") >> -k % 8


class _FromRank0:
    """What rank 0 answers for all ranks, of what the script asks of the operating system."""

    def __init__(self) -> None:
        self._relay: Rank0 | None = None
        self._asked: Counter[str] = Counter()

    def use(self, relay: Rank0 | None) -> None:
        """Let this one ask rank 0; None: each rank answers for itself."""
        self._relay = relay
        self._asked.clear()

    def get(self, name: str, function: Callable[[], Any]) -> Any:
        """The value of `function()` on rank 0, where the script's own code asks, the first
        times."""
        if self._relay is None or not _is_called_by_script() or not self._relay.is_ordered():
            return function()
        self._asked[name] += 1
        if self._asked[name] > _MAX_ASKED[name]:
            return function()
        return self._relay.run_on_rank0(name, function)


_bits = _JobBits()
_from_rank0 = _FromRank0()


def take_from_rank0(relay: Rank0 | None) -> None:
    """Let rank 0 answer what the script asks of the operating system; None: each rank asks."""
    _from_rank0.use(relay)


def choose_seed() -> int:
    """The job's seed: INSTEP_SEED, or a new one; that of its checkpoints if there are any.

    Raises LaunchVariablesError if none can be written to their folder.
    """
    if str(settings.SEED):
        return int(settings.SEED)
    seed = int.from_bytes(os.urandom(4), "little")
    folder = str(settings.CHECKPOINT)
    if not folder:
        return seed
    try:
        return _kept_seed(Path(folder), seed)
    except OSError as error:
        raise LaunchVariablesError.cannot_write(settings.CHECKPOINT.name, folder, error) from None


def _kept_seed(folder: Path, seed: int) -> int:
    """The seed in the folder of the job's checkpoints, which is `seed` if none is there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "seed"
    if not file.exists():
        draft = folder / f".seed.{os.getpid()}"
        draft.write_text(f"{seed}\n")
        os.replace(draft, file)
    return int(file.read_text())


def calls() -> dict[str, int]:
    """How often bits were asked for so far."""
    return dict(_bits.calls)


def set_calls(saved: Mapping[str, int]) -> None:
    """Go on from `calls()`."""
    _bits.calls = Counter(saved)


def seed_everything(seed: int) -> None:
    """Seed random, numpy and torch; the last two when they are imported, if they ever are."""
    _bits.restart(seed)
    random.seed(seed)
    after_import("numpy.random", lambda module: module.seed(seed))
    after_import("torch", lambda module: module.manual_seed(seed))


def random_bits(original: Function, k: int) -> int:
    """For the k bits that numpy takes from the operating system to seed a generator.

    A function of the job's seed, of the process among those of its rank, and of the number of
    calls. Calls of a module that is being imported are counted by themselves, since another world
    may have imported it before (numpy asks for bits then, and a world of one imports it late).
    Where ranks do different work the number of other calls differs, so there the bits come from
    Python's generator, which instep has seeded.
    """
    if is_thread_rank_local() and not _importing():
        return random.getrandbits(k)
    return _bits.take(k)


def _importing() -> str:
    """The innermost module that is being imported; "" if none is."""
    for frame in frames_from(sys._getframe(1)):
        spec = frame.f_globals.get("__spec__")
        if frame.f_code.co_name == "<module>" and getattr(spec, "_initializing", False):
            return str(frame.f_globals["__name__"])
    return ""


def seed_random(original: Function, a: Any = None, version: int = 2) -> None:
    """For random.seed."""
    original(random_bits(original, 256) if a is None else _agreed_seed(a), version)


def seed_instance(original: Function, generator: Any, a: Any = None, version: int = 2) -> None:
    """For random.Random.seed: of the script's own generators. Temporary files have their names from
    others."""
    if a is not None:
        a = _agreed_seed(a)
    elif _is_called_by_script():
        a = random_bits(original, 256)
    original(generator, a, version)


def seed_torch(original: Function) -> int:
    """For torch.seed."""
    seed = random_bits(original, 63)
    import_module("torch").manual_seed(seed)
    return seed


def seed_with(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For torch.manual_seed, numpy.random.default_rng and so on, which have one parameter."""
    return original(*map(_agreed_seed, (*args, *kwargs.values())))


def from_rank0(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For os.urandom, uuid.uuid4 and so on: where the script calls them, all ranks get rank 0's."""
    return _from_rank0.get("random bytes", partial(original, *args, **kwargs))


def _agreed_seed(given: Any) -> Any:
    """Rank 0's value of a seed that the script gives, for it may have that from the clock."""
    is_plain = isinstance(given, int | float | str | bytes)
    return _from_rank0.get("a seed", lambda: given) if is_plain else given


def _is_called_by_script() -> bool:
    """Whether code of the script's own calls the function that is replaced here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _PASSED_THROUGH:
        frame = frame.f_back
    return is_script_file("" if frame is None else frame.f_code.co_filename)


SEED_PATCHES = patches(
    "a generator that the script does not seed is the same on all ranks",
    ("numpy.random.bit_generator", "randbits", random_bits),
    (random, "seed", seed_random),
    ("torch", "seed", seed_torch),
    ("torch.random", "seed", seed_torch),
    (random.Random, "seed", seed_instance),
) + patches(
    "a seed that the script takes from the clock or the system is the same on all ranks",
    ("torch", "manual_seed", seed_with),
    ("torch.random", "manual_seed", seed_with),
    ("numpy.random", "seed default_rng", seed_with),
    (os, "urandom", from_rank0),
    ("uuid", "uuid1 uuid4", from_rank0),
    ("secrets", "token_bytes token_hex token_urlsafe randbits randbelow", from_rank0),
)
