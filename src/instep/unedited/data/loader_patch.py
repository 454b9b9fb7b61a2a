"""What is put in place of a loader's iteration, in a world of any size."""

from __future__ import annotations

from typing import Any

from instep.process.patching import Function, Patch


def _iterate(original: Function, *args: Any, **kwargs: Any) -> Any:
    from instep.unedited.data import loaders  # it imports torch, as scripts with loaders do

    return loaders.iterate(original, *args, **kwargs)


LOADER_PATCH = Patch(
    "torch.utils.data:DataLoader",
    "__iter__",
    _iterate,
    "each rank loads its own rows of a batch",
)
