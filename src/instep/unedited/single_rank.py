"""A world of one, which needs neither the other rooms nor torch: only what is random must not
depend on how many ranks there are.
"""

from __future__ import annotations

import random
from importlib import import_module
from typing import Any

from instep.process.patching import Function, Patch, PatchHandle
from instep.unedited import launcher_env, seeds


def _iterate(original: Function, *args: Any, **kwargs: Any) -> Any:
    return import_module("instep.unedited.data.loaders").iterate(original, *args, **kwargs)


LOADER_PATCH = Patch(
    "torch.utils.data:DataLoader",
    "__iter__",
    _iterate,
    "each rank loads its own rows of a batch",
)

_UNSEEDED = "a generator without a seed is the same on all ranks"
SEED_PATCHES = (
    Patch("numpy.random.bit_generator", "randbits", seeds.entropy, _UNSEEDED),
    Patch(random, "seed", seeds.reseed, _UNSEEDED),
    Patch("torch", "seed", seeds.reseed_torch, _UNSEEDED),
    Patch("torch.random", "seed", seeds.reseed_torch, _UNSEEDED),
)


class SingleRankSession:
    """Everything that is in place from the beginning to `end`."""

    def __init__(self) -> None:
        self.seed = seeds.draw()
        seeds.sow(self.seed)
        launcher_env.hide()
        self._patched = PatchHandle([LOADER_PATCH, *SEED_PATCHES])

    def end(self) -> None:
        """Everything is as it was."""
        launcher_env.show()
        self._patched.remove()
