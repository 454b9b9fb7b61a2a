"""How a patch is put in and taken out again: at once, or when its module is imported."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from instep.process.import_hooks import Awaited, after_import

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
    makes_class: bool = False
    """Whether it is a class that is replaced: by what `replacement(original)` returns, once."""
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
        self._wait_no_more = after_import("torch._dynamo", lambda _: self._keep_out())
        self._arrivals = Awaited(frozenset(self._awaited), self._imported)
        self._arrivals.expect()

    def undo(self) -> None:
        """Everything is as it was. Does nothing the second time."""
        self._arrivals.forget()
        self._wait_no_more()
        self._awaited.clear()
        while self._undone:
            self._undone.pop()()

    def _keep_out(self) -> None:
        """Of the graphs that torch.compile makes."""
        from instep.process.torch_compile import (
            unlike_torch,  # heavy; torch.compile is there by now
        )

        while self._kept_out:
            unlike_torch(self._kept_out.pop())

    def _imported(self, module: ModuleType) -> None:
        for patch in self._awaited.pop(module.__name__, ()):
            self._put_in(patch)

    def _put_in(self, patch: Patch) -> None:
        owner: Any = _resolved(patch.owner)
        before = vars(owner).get(patch.name, _ABSENT)
        original = getattr(owner, patch.name, None)
        if original is None:  # another version of the library has no such thing
            return
        answering = patch.replacement if patch.makes_class else _answering(patch.replacement)
        patched = answering(original)
        if isinstance(before, staticmethod | classmethod):
            patched = staticmethod(patched)
        setattr(owner, patch.name, patched)
        if patch.in_graphs:
            self._kept_out.append(patched)
            if "torch._dynamo" in sys.modules:
                self._keep_out()
        for supports in _SUPPORTS:
            if isinstance(original, Hashable) and original in supports:
                supports.add(patched)
        self._undone.append(_Undo(owner, patch.name, before, patched))


def _answering(replacement: Function) -> Function:
    def answering(original: Function) -> Function:
        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        return patched

    return answering


def subclass(original: type, init: Function) -> type:
    """A class in place of `original`, whose objects begin with `init(self, begin, *args)`.

    Of this class are all objects of the original, whoever made them.
    """

    class _Kind(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            if cls is made:
                return isinstance(instance, original)
            return bool(super().__instancecheck__(instance))

        def __subclasscheck__(cls, other: type) -> bool:
            if cls is made:
                return issubclass(other, original)
            return bool(super().__subclasscheck__(other))

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        init(functools.partial(original.__init__, self), *args, **kwargs)  # type: ignore[misc]

    made = _Kind(original.__name__, (original,), {"__init__": begin, "__doc__": original.__doc__})
    made.__module__, made.__qualname__ = original.__module__, original.__qualname__
    return made


def _module_of(owner: object) -> str | None:
    return owner.partition(":")[0] if isinstance(owner, str) else None


def _resolved(owner: object) -> object:
    if not isinstance(owner, str):
        return owner
    module, _, path = owner.partition(":")
    return functools.reduce(getattr, path.split(".") if path else (), sys.modules[module])
