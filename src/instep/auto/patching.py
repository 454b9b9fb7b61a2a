"""How a patch is put in and taken out again: at once, or when its module is imported."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Function = Callable[..., Any]
_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One function that answers in place of another, which it receives as its first argument."""

    owner: object
    """Where it is looked up: a module, a class, or the name of a module (`"h5py"`, or
    `"torch.utils.data:DataLoader"` for a class in one) that may be imported later."""
    name: str
    """By which name."""
    replacement: Function
    """Called as `replacement(original, *args, **kwargs)`."""
    reason: str
    """Why an unedited script needs it."""
    in_graphs: bool = False
    """Whether torch.compile takes this function of torch's into its graphs as it is, by its name;
    it must not take what answers for it."""


_SUPPORTS: tuple[set[Any], ...] = (
    *(os.supports_dir_fd, os.supports_effective_ids, os.supports_fd, os.supports_follow_symlinks),
)
"""Sets in which Python looks up what a function of `os` can do, by the function itself."""


@dataclass(frozen=True)
class _Undo:
    owner: Any
    name: str
    before: object
    """What the owner itself held by this name; _ABSENT: it inherited it."""
    patched: object

    def __call__(self) -> None:
        for supports in _SUPPORTS:
            supports.discard(self.patched)
        if self.before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


class Patched:
    """Some patches, put in until `undo`."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._undone: list[_Undo] = []
        self._awaited: dict[str, list[Patch]] = {}
        self._kept_out: list[Function] = []
        for patch in patches:
            module = _module_of(patch.owner)
            if module is None or module in sys.modules:
                self._put_in(patch)
            else:
                self._awaited.setdefault(module, []).append(patch)
        self._wait_no_more = when_imported("torch._dynamo", self._keep_out)
        self._finder = _Finder(frozenset(self._awaited), self._imported)
        sys.meta_path.insert(0, self._finder)

    def undo(self) -> None:
        """Everything is as it was. Does nothing the second time."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._wait_no_more()
        self._awaited.clear()
        while self._undone:
            self._undone.pop()()

    def _keep_out(self) -> None:
        """Of the graphs that torch.compile makes."""
        from instep.seams import unlike_torch  # heavy; torch.compile is there by now

        while self._kept_out:
            unlike_torch(self._kept_out.pop())

    def _imported(self, module: str) -> None:
        for patch in self._awaited.pop(module, ()):
            self._put_in(patch)

    def _put_in(self, patch: Patch) -> None:
        owner: Any = _resolved(patch.owner)
        before = vars(owner).get(patch.name, _ABSENT)
        original = getattr(owner, patch.name, None)
        if original is None:  # another version of the library has no such thing
            return
        patched = _answering(patch.replacement, original)
        if isinstance(before, staticmethod | classmethod):
            patched = staticmethod(patched)
        setattr(owner, patch.name, patched)
        if patch.in_graphs:
            self._kept_out.append(patched)
            if "torch._dynamo" in sys.modules:
                self._keep_out()
        for supports in _SUPPORTS:
            if original in supports:
                supports.add(patched)
        self._undone.append(_Undo(owner, patch.name, before, patched))


def _answering(replacement: Function, original: Function) -> Function:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return patched


def _module_of(owner: object) -> str | None:
    return owner.partition(":")[0] if isinstance(owner, str) else None


def _resolved(owner: object) -> object:
    if not isinstance(owner, str):
        return owner
    module, _, path = owner.partition(":")
    return functools.reduce(getattr, path.split(".") if path else (), sys.modules[module])


class _Finder(MetaPathFinder):
    """Lets the other finders find, and says when one of some modules has been imported."""

    def __init__(self, awaited: frozenset[str], imported: Callable[[str], None]) -> None:
        self._awaited = awaited
        self._imported = imported

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As MetaPathFinder has it."""
        if name not in self._awaited:
            return None
        for finder in sys.meta_path[
            sys.meta_path.index(self) + 1 :
        ]:  # before it may be others such
            if not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Telling(spec.loader, self._imported)
                return spec
        return None


class _Telling(Loader):
    """The module's own loader, for as long as it takes to import it."""

    def __init__(self, loader: Any, imported: Callable[[str], None]) -> None:
        self._loader = loader
        self._imported = imported

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As Loader has it."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """As Loader has it; afterwards nothing of ours is left on the module."""
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._imported(spec.name)


def when_imported(name: str, react: Callable[[], None]) -> Callable[[], None]:
    """Call `react` when module `name` has been imported; now, if it is already.

    Returns what to call if it is not to be waited for any more.
    """

    def wait_no_more() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    def once(_: str) -> None:
        wait_no_more()
        react()

    finder = _Finder(frozenset({name}), once)
    if name in sys.modules:
        react()
    else:
        sys.meta_path.insert(0, finder)
    return wait_no_more
