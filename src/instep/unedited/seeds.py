"""One seed for the generators of all ranks, and for those that the script does not seed."""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Mapping
from hashlib import shake_128
from importlib import import_module
from multiprocessing import current_process
from pathlib import Path
from types import FrameType
from typing import Any

from instep.distributed.communication.rank_local import is_thread_rank_local
from instep.process import settings
from instep.process.import_hooks import after_import
from instep.process.patching import Function, patches

_seed = 0
_calls: Counter[str] = Counter()
"""How often bits were asked for: while each module was imported, and otherwise."""


def choose_seed() -> int:
    """The job's seed: INSTEP_SEED, or a new one; that of its checkpoints if there are any."""
    if str(settings.SEED):
        return int(settings.SEED)
    seed = int.from_bytes(os.urandom(4), "little")
    return _kept_seed(Path(str(settings.CHECKPOINT)), seed) if str(settings.CHECKPOINT) else seed


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
    return dict(_calls)


def set_calls(saved: Mapping[str, int]) -> None:
    """Go on from `calls()`."""
    _calls.clear()
    _calls.update(saved)


def seed_everything(seed: int) -> None:
    """Seed random, numpy and torch; the last two when they are imported, if they ever are."""
    global _seed, _calls
    _seed, _calls = seed, Counter()
    random.seed(seed)
    after_import("numpy.random", lambda module: module.seed(seed))
    after_import("torch", lambda module: module.manual_seed(seed))


def random_bits(original: Function, k: int) -> int:
    """For the k bits that numpy takes from the operating system to seed a generator.

    A function of the job's seed, of the process among those of its rank, and of the number of
    calls. Calls of a module that is being imported are counted by themselves, since another world
    may have imported it before (numpy asks for bits then, and a world of one imports it late).
    Where ranks do different work the number of calls differs, so there the bits come from Python's
    generator, which instep has seeded.
    """
    if is_thread_rank_local():
        return random.getrandbits(k)
    importing = _importing()
    parts = (_seed, current_process()._identity, importing, _calls[importing])
    _calls[importing] += 1
    digest = shake_128(repr(parts).encode()).digest((k + 7) // 8)
    return int.from_bytes(digest, "little") >> -k % 8


def _importing() -> str:
    """The innermost module that is being imported; "" if none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            spec = frame.f_globals.get("__spec__")
            if getattr(spec, "_initializing", False):
                return str(frame.f_globals["__name__"])
        frame = frame.f_back
    return ""


def seed_random(original: Function, a: Any = None, version: int = 2) -> None:
    """For random.seed."""
    original(random_bits(original, 256) if a is None else a, version)


def seed_torch(original: Function) -> int:
    """For torch.seed."""
    seed = random_bits(original, 63)
    import_module("torch").manual_seed(seed)
    return seed


SEED_PATCHES = patches(
    "a generator that the script does not seed is the same on all ranks",
    ("numpy.random.bit_generator", "randbits", random_bits),
    (random, "seed", seed_random),
    ("torch", "seed", seed_torch),
    ("torch.random", "seed", seed_torch),
)
