"""Do something when a module is imported, without importing it.

Finder and loader do without the base classes of importlib.abc, which import 15 ms of other things.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

React = Callable[[ModuleType], None]
Meanwhile = Callable[[], AbstractContextManager[object]]


def after_import(name: str, react: React) -> Callable[[], None]:
    """Call `react(module)` once: now, if the module is there, or when its code has run.

    Returns what to call if it is not to be waited for any more.
    """

    def once(module: ModuleType) -> None:
        awaited.forget()
        react(module)

    awaited = Awaited({name}, once)
    if name in sys.modules:
        react(sys.modules[name])
    else:
        awaited.expect()
    return awaited.forget


def while_importing(name: str, meanwhile: Meanwhile) -> None:
    """Be in `meanwhile()` while the code of this module runs; never, if it has run already."""
    if name not in sys.modules:
        awaited = Awaited({name}, lambda _: awaited.forget(), meanwhile)
        awaited.expect()


class Awaited:
    """A finder that lets the others find, and says when one of some modules has been imported."""

    def __init__(
        self, names: Collection[str], arrived: React, meanwhile: Meanwhile = nullcontext
    ) -> None:
        self._names, self._arrived, self._meanwhile = names, arrived, meanwhile

    def expect(self) -> None:
        """From now on."""
        sys.meta_path.insert(0, self)

    def forget(self) -> None:
        """Not any more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As importlib.abc.MetaPathFinder has it."""
        if name not in self._names:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # before it may be others such
        for finder in behind:
            if not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                telling = _Telling(spec.loader, self._arrived, self._meanwhile)
                spec.loader = telling  # type: ignore[assignment]
                return spec
        return None


class _Telling:
    """The module's own loader, for as long as it takes to import it."""

    def __init__(self, loader: Any, arrived: React, meanwhile: Meanwhile) -> None:
        self._loader, self._arrived, self._meanwhile = loader, arrived, meanwhile

    def __getattr__(self, name: str) -> Any:
        """Everything else is the loader's: whoever only looks for a module may ask it."""
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As importlib.abc.Loader has it."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """As importlib.abc.Loader has it; afterwards nothing of ours is left on the module."""
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader
        with self._meanwhile():
            self._loader.exec_module(module)
        self._arrived(module)
