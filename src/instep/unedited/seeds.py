"""One seed for every generator of every rank, and for those that nobody seeds."""

from __future__ import annotations

import itertools
import os
import random
from hashlib import shake_128
from importlib import import_module
from multiprocessing import current_process
from typing import Any

from instep.distributed.communication.rank_local import is_thread_rank_local
from instep.process import settings
from instep.process.import_hooks import after_import
from instep.process.patching import Function


def draw() -> int:
    """The job's seed: INSTEP_SEED, else a new one."""
    if not str(settings.SEED):
        return int.from_bytes(os.urandom(4), "little")
    return int(settings.SEED)


def sow(seed: int) -> None:
    """Seed random, numpy and torch: the last two when they are imported, if they ever are."""
    global _seed, _drawn
    _seed, _drawn = seed, itertools.count()
    random.seed(seed)
    after_import("numpy.random", lambda module: module.seed(seed))
    after_import("torch", lambda module: module.manual_seed(seed))


_seed = 0
_drawn = itertools.count()


def entropy(original: Function, bits: int) -> int:
    """What numpy takes from the operating system for a generator that is given no seed
    (`default_rng()`): a function of the job's seed, of which of a rank's processes this is, and of
    how often it was asked.

    Where ranks do different work, it is drawn from a generator that they are known to draw from.
    """
    if is_thread_rank_local():
        return random.getrandbits(bits)
    parts = (_seed, current_process()._identity, next(_drawn))
    digest = shake_128(repr(parts).encode()).digest((bits + 7) // 8)
    return int.from_bytes(digest, "little") >> -bits % 8


def reseed(original: Function, a: Any = None, version: int = 2) -> None:
    """random.seed."""
    original(entropy(original, 256) if a is None else a, version)


def reseed_torch(original: Function) -> int:
    """torch.seed."""
    seed = entropy(original, 63)
    import_module("torch").manual_seed(seed)
    return seed
