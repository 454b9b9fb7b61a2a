"""`import horovod.torch` and `from apex import amp` where neither is installed.

What is installed comes first: a name is answered by instep only where nobody else has its package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

HOMES = {
    "apex": "instep.compat.apex",
    "horovod.torch": "instep.compat.horovod",
}
"""Which package or module of ours answers for which name, its parts included; the packages above
are empty."""


def install() -> None:
    """Let these names be found, in this process. Imports nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # First: else a part of our package would be found by its file and be a second module.
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        home, above = _home(name), any(known.startswith(f"{name}.") for known in HOMES)
        if not (home or above) or self._installed(name.partition(".")[0]):
            return None
        if above:
            return ModuleSpec(name, _Empty(), is_package=True)
        assert home is not None
        return None if find_spec(home) is None else ModuleSpec(name, _Alias(home), is_package=True)

    def _installed(self, package: str) -> bool:
        others = (finder for finder in sys.meta_path if finder is not self)
        return any(finder.find_spec(package, None) is not None for finder in others)


def _home(name: str) -> str | None:
    for known, home in HOMES.items():
        if name == known or name.startswith(f"{known}."):
            return home + name.removeprefix(known)
    return None


class _Alias(Loader):
    """The module that answers, itself, under another name as well."""

    def __init__(self, home: str) -> None:
        self._home = home

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(self._home)


class _Empty(Loader):
    def exec_module(self, module: ModuleType) -> None:
        return None
