"""A world of one, which needs neither the other rooms nor torch: only what is random in a sample
must not depend on how many ranks load it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from instep.auto import hiding, seeds
from instep.auto.patching import Function, Patch, Patched


def _iterate(original: Function, *args: Any, **kwargs: Any) -> Any:
    return import_module("instep.auto.loading").iterate(original, *args, **kwargs)


LOADING = Patch(
    "torch.utils.data:DataLoader",
    "__iter__",
    _iterate,
    "each rank loads its own rows of a batch",
)


class Alone:
    """Everything that is in place from the beginning to `end`."""

    def __init__(self) -> None:
        self.seed = seeds.draw()
        seeds.sow(self.seed)
        hiding.hide()
        self._loading = Patched([LOADING])

    def end(self) -> None:
        """Everything is as it was."""
        hiding.show()
        self._loading.undo()
