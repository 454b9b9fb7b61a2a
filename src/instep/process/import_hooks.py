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

Callback = Callable[[ModuleType], None]
Context = Callable[[], AbstractContextManager[object]]


def after_import(name: str, callback: Callback) -> Callable[[], None]:
    """Call `callback(module)` once: now, if the module is imported, or when its code has run.

    Returns a function that cancels the call.
    """

    def once(module: ModuleType) -> None:
        hook.remove()
        callback(module)

    hook = ImportHook({name}, once)
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        hook.install()
    return hook.remove


def during_import(name: str, context: Context) -> None:
    """Enter `context()` while the code of this module runs; never, if it has run already."""
    if name not in sys.modules:
        hook = ImportHook({name}, lambda _: hook.remove(), context)
        hook.install()


class ImportHook:
    """A finder that lets the others find, and calls back when one of some modules was imported."""

    def __init__(
        self, names: Collection[str], callback: Callback, context: Context = nullcontext
    ) -> None:
        self._names, self._callback, self._context = names, callback, context

    def install(self) -> None:
        """Put it before the other finders."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Take it out; does nothing the second time."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As importlib.abc.MetaPathFinder has it."""
        if name not in self._names:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]  # import hooks may stand before it
        for finder in others:
            if not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                loader = _HookedLoader(spec.loader, self._callback, self._context)
                spec.loader = loader  # type: ignore[assignment]
                return spec
        return None


class _HookedLoader:
    """Stands for the module's own loader while it is imported."""

    def __init__(self, loader: Any, callback: Callback, context: Context) -> None:
        self._loader, self._callback, self._context = loader, callback, context

    def __getattr__(self, name: str) -> Any:
        """Everything else is the loader's: importlib.util.find_spec hands it to others."""
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
        with self._context():
            self._loader.exec_module(module)
        self._callback(module)
