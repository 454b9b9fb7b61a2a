"""A world of one: random numbers are those of any other world, and everything else is untouched.

It imports neither torch nor what is needed to run on several ranks, unless `--bitwise` cuts the
batch into shards here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from instep.process import settings
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


def _bitwise_patches() -> Sequence[Patch]:
    if not settings.is_bitwise():
        return ()
    patches: Sequence[Patch] = import_module("instep.unedited.patch_table").BITWISE_PATCHES
    return patches


class SingleRankSession:
    """What is installed in a world of one, until `end`."""

    def __init__(self) -> None:
        self.seed = seeds.choose_seed()
        seeds.seed_everything(self.seed)
        launcher_env.mask()
        self._patches = PatchHandle([LOADER_PATCH, *seeds.SEED_PATCHES, *_bitwise_patches()])

    def end(self) -> None:
        """Restore everything."""
        launcher_env.restore()
        self._patches.remove()
