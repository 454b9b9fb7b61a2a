"""One seed for every generator of every rank."""

from __future__ import annotations

import os
import random

from instep import knobs
from instep.errors import LaunchVariablesError
from instep.imports import after_import


def draw() -> int:
    """The job's seed: INSTEP_SEED, else a new one."""
    if not str(knobs.SEED):
        return int.from_bytes(os.urandom(4), "little")
    return int(knobs.SEED)


def sow(seed: int) -> None:
    """Seed random, numpy and torch: the last two when they are imported, if they ever are."""
    if not 0 <= seed < 2**32:
        raise LaunchVariablesError(f"{knobs.SEED.name}={seed} is not a seed from 0 to 2**32 - 1.")
    random.seed(seed)
    after_import("numpy.random", lambda module: module.seed(seed))
    after_import("torch", lambda module: module.manual_seed(seed))
