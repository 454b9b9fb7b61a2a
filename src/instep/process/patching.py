"""Functions of instep that answer for functions of others: installed at once, or when the module
is imported, and removed again.

Modules, hooks, pickles and copies of the user's stay as they are: only functions are replaced that
Python looks up by name at each call.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Literal, cast

from instep.process.import_hooks import ImportHook, after_import

Function = Callable[..., Any]
Compile = Literal["trace", "inline", "break", "skip"]
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
    """Called as `replacement(original, *args, **kwargs)`. It passes on to `original`, which may
    be another patch's, what does not concern it. A call by this name is left out of tracebacks
    (`tracebacks.format_traceback`)."""
    reason: str = ""
    """Why a script needs it."""
    factory: bool = False
    """Whether `replacement(original)` is called once, and returns what is looked up instead: for
    classes."""
    compile: Compile = "trace"
    """What torch.compile does at a call. "trace": it goes on into the replacement. "inline": it
    does so where it compiles the caller, and compiles no call that runs uncompiled. "break": it
    ends the graph; needed for functions of torch that it takes into graphs by their names. "skip":
    it does so, and nothing is compiled of what is called from there."""


def patches(
    reason: str,
    *rows: tuple[object, str, Function],
    factory: bool = False,
    compile: Compile = "trace",  # noqa: A002  # as the field above
) -> list[Patch]:
    """Patches with a common reason. A row: the owner, names with blanks between, a replacement."""
    return [
        Patch(owner, name, replacement, reason, factory, compile)
        for owner, names, replacement in rows
        for name in names.split()
    ]


_SUPPORTS: tuple[set[Any], ...] = (
    *(os.supports_dir_fd, os.supports_effective_ids, os.supports_fd, os.supports_follow_symlinks),
)
"""Sets in which Python looks up what a function of `os` can do, by the function itself."""
_installed: set[tuple[object, str, Function]] = set()
"""Owner, name and replacement of every patch."""


class PatchHandle:
    """Some patches, installed until `remove`; a context manager. A patch that is installed already
    stays the one of the handle that installed it."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._keys: list[tuple[object, str, Function]] = []
        self._originals: list[_Original] = []
        self._pending: dict[str, list[Patch]] = {}
        self._cancel: list[Callable[[], None]] = []
        at_once: list[Patch] = []
        for patch in patches:
            key = (patch.owner, patch.name, patch.replacement)
            if key in _installed:
                continue
            _installed.add(key)
            self._keys.append(key)
            module = patch.owner.partition(":")[0] if isinstance(patch.owner, str) else None
            if module is None or module in sys.modules:
                at_once.append(patch)
            else:
                self._pending.setdefault(module, []).append(patch)
        self._install(at_once)
        if self._pending:
            hook = ImportHook(frozenset(self._pending), self._imported)
            hook.install()
            self._cancel.append(hook.remove)

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Restore everything that was there before. Does nothing the second time."""
        while self._cancel:
            self._cancel.pop()()
        self._pending.clear()
        while self._originals:
            self._originals.pop().restore()
        _installed.difference_update(self._keys)
        self._keys.clear()

    def _imported(self, module: ModuleType) -> None:
        self._install(self._pending.pop(module.__name__, ()))

    def _install(self, patches: Iterable[Patch]) -> None:
        replaced = [(patch, self._replace(patch)) for patch in patches]
        opaque = [
            patched for patch, patched in replaced if patched and patch.compile in ("break", "skip")
        ]
        if opaque:
            self._cancel.append(after_import("torch._dynamo", lambda _: _disallow(opaque)))

    def _replace(self, patch: Patch) -> Function | None:
        """Returns the function that answers now; None where there is none to be replaced."""
        owner: Any = _resolve(patch.owner)
        before = vars(owner).get(patch.name, _ABSENT)
        original = getattr(owner, patch.name, None)
        if original is None:  # another version of the library has no such thing
            return None
        patched: Function = patch.replacement(original) if patch.factory else _wrap(original, patch)
        bound = isinstance(before, staticmethod | classmethod)
        setattr(owner, patch.name, staticmethod(patched) if bound else patched)
        for supports in _SUPPORTS:
            if isinstance(original, Hashable) and original in supports:
                supports.add(patched)
        self._originals.append(_Original(owner, patch.name, before, patched))
        operations = _script_operations()
        if id(original) in operations:
            operations[id(patched)] = operations[id(original)]
        return patched


@dataclass(frozen=True)
class _Original:
    owner: Any
    name: str
    value: object
    """What the owner itself held by this name; _ABSENT: it inherited it."""
    patched: object

    def restore(self) -> None:
        for supports in _SUPPORTS:
            supports.discard(self.patched)
        _script_operations().pop(id(self.patched), None)
        if self.value is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.value)


def _script_operations() -> dict[int, str]:
    """What torch.jit.script knows of torch's functions, by their ids; empty before torch is
    imported."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(torch.__spec__, "_initializing", False):
        return {}
    from instep.process.torch_private.dispatch import script_operations

    return script_operations


@contextmanager
def replaced(*attributes: tuple[object, str, object]) -> Iterator[None]:
    """Inside, attributes have other values. For each: the owner, the name and the value."""
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in attributes]
    for owner, name, value in attributes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, kept in before:
            if kept is _ABSENT:  # it was inherited
                delattr(owner, name)
            else:
                setattr(owner, name, kept)


def _wrap(original: Function, patch: Patch) -> Function:
    replacement = patch.replacement

    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    if isinstance(original, FunctionType):
        # torch.jit.script compiles the source of the original, whose names it looks up there.
        code, closure = patched.__code__, patched.__closure__
        patched = FunctionType(code, original.__globals__, closure=closure)
    functools.update_wrapper(patched, original)
    if patch.compile in ("inline", "skip"):
        from instep.process.torch_private.compiler import skip_frame

        assert isinstance(patched, FunctionType)
        patched.__code__ = patched.__code__.replace()  # it is skipped by its code object
        skip_frame(patched)
    return patched


def _disallow(functions: Iterable[Function]) -> None:
    from instep.process.torch_private.compiler import disallow_in_graph

    for function in functions:
        disallow_in_graph(function)


def subclass(original: type, init: Function) -> type:
    """A class in place of `original`, whose objects begin with `init(self, begin, *args)`.

    Of this class are all objects of the original, whoever made them.
    """

    class _Meta(type(original)):  # type: ignore[misc]
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

    made = _Meta(original.__name__, (original,), {"__init__": begin, "__doc__": original.__doc__})
    made.__module__, made.__qualname__ = original.__module__, original.__qualname__
    return made


def _resolve(owner: object) -> object:
    if not isinstance(owner, str):
        return owner
    module, _, path = owner.partition(":")
    return functools.reduce(getattr, path.split(".") if path else (), sys.modules[module])


@contextmanager
def ignored_warnings(message: str) -> Iterator[None]:
    """Inside, warnings whose text begins with this pattern are not shown.

    `warnings.catch_warnings` would let Python forget which warnings it has shown once, and the
    script's would be shown again.
    """
    ignored = ("ignore", re.compile(message), Warning, None, 0)
    filters: list[Any] = cast("list[Any]", warnings.filters)
    filters.insert(0, ignored)
    try:
        yield
    finally:
        if ignored in filters:
            filters.remove(ignored)
