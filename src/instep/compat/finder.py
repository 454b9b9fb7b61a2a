"""`import horovod.torch` where no Horovod is installed: instep's own module of that interface.

Asked last of all finders, so whatever is installed comes first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

HOMES = {
    "horovod.torch": "instep.compat.horovod",
}
"""Which module of ours answers for which name; the packages above are empty."""


def install() -> None:
    """Let these names be found, in this process. Imports nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in HOMES:
            return ModuleSpec(name, _Alias(HOMES[name]))
        above = any(known.startswith(f"{name}.") for known in HOMES)
        # A package that is installed is found by its own finder, and then so are its parts.
        return ModuleSpec(name, _Empty(), is_package=True) if above else None


class _Alias(Loader):
    """The module that answers, itself, under another name as well."""

    def __init__(self, home: str) -> None:
        self._home = home

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(self._home)


class _Empty(Loader):
    def exec_module(self, module: ModuleType) -> None:
        return None
