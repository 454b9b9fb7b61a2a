"""Do something as soon as a module has been imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, react: Callable[[ModuleType], None]) -> None:
    """Call `react(module)` once: now, if the module is there, or when its code has run."""
    if name in sys.modules:
        react(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, react))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, react: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._react = react

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_react(module: ModuleType) -> None:
                execute(module)
                self._react(module)

            spec.loader.exec_module = execute_and_react  # type: ignore[method-assign]
        return spec
