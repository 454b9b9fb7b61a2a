"""The import of torch in a rank: without garbage collections, searches through all modules, and
torch.compile, which is imported when something is compiled."""

from __future__ import annotations

import functools
import gc
import inspect
import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakSet

from instep.process import in_main_thread
from instep.process.import_hooks import after_import, during_import
from instep.process.patching import Function

_DISABLED = "__dynamo_disable"
"""The attribute in which torch keeps what torch._dynamo makes of a function at its first call."""


class _DirectCalls:
    """Functions that are called directly, until torch._dynamo is imported."""

    def __init__(self) -> None:
        self.is_over = False
        self._called_directly: WeakSet[Function] = WeakSet()

    def add(self, function: Any) -> None:
        """Call this one directly, too."""
        with suppress(AttributeError, TypeError):  # it takes no attributes or references
            self._called_directly.add(function)
            setattr(function, _DISABLED, function)

    def end(self, _: object) -> None:
        """For the import of torch._dynamo."""
        self.is_over = True
        while self._called_directly:
            function = self._called_directly.pop()
            with suppress(AttributeError):
                delattr(function, _DISABLED)


_direct_calls = _DirectCalls()


def prepare() -> None:
    """Make the import cheaper. Call this before torch is imported; later it changes nothing."""
    during_import("torch", _keeping_interrupts)
    freeze_torch_objects()
    find_modules_by_name()
    defer_torch_compile()


def freeze_torch_objects() -> None:
    """Import torch without garbage collections, and freeze all objects afterwards.

    An import of torch makes 170,000 permanent objects. The collector would traverse them during the
    import, in every full collection of a training, and several times when the interpreter ends:
    0.45 s of the 1.6 s in which a process imports torch and ends.

    Nothing is frozen if a file is open for writing by then: if it is in a cycle, only a collection
    at the end of the interpreter flushes it.
    """
    during_import("torch", _without_collections)


@contextmanager
def _without_collections() -> Iterator[None]:
    may_be_permanent = not any(map(_is_open_for_writing, gc.get_objects()))
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
    if may_be_permanent:
        gc.freeze()


def _is_open_for_writing(thing: object) -> bool:
    """Whether it is a file that is open for writing, other than a standard stream."""
    if not isinstance(thing, io.BufferedWriter | io.BufferedRandom):
        return False
    with suppress(ValueError):  # it is detached, or has no descriptor
        return not thing.closed and thing.fileno() > 2
    return False


@contextmanager
def _keeping_interrupts() -> Iterator[None]:
    """Raise a KeyboardInterrupt at the end that came in between and was lost.

    Python ignores one that is raised in a callback of a weak reference or in `__del__`, of which an
    import of torch calls thousands, and extension modules may drop one in their code of C++.
    """
    original = signal.getsignal(signal.SIGINT)
    if not in_main_thread() or original is not signal.default_int_handler:
        yield
        return
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handle:
            signal.signal(signal.SIGINT, original)
    if received:
        raise KeyboardInterrupt


def find_modules_by_name() -> None:
    """Let `inspect.getmodule` find the module of a frame by its name, as long as this process runs.

    torch asks for it where a library registers an operator. By itself the function compares files:
    it resolves those of all modules, in 10,700 of the 29,500 system calls of an import of torch,
    and in 49,000 of the 138,000 of a script with transformers, of which each is several in a rank
    that sees files through a layer of its own.
    """
    original = inspect.getmodule

    @functools.wraps(original)
    def getmodule(object: Any, *args: Any, **kwargs: Any) -> ModuleType | None:  # noqa: A002
        if isinstance(object, FrameType):
            module = sys.modules.get(object.f_globals.get("__name__", ""))
            if getattr(module, "__dict__", None) is object.f_globals:
                return module
        return original(object, *args, **kwargs)

    inspect.getmodule = getmodule


def defer_torch_compile() -> None:
    """Let torch._dynamo be imported when something is compiled, and not by the first optimizer.

    It brings sympy and 800 other modules, which takes each process as long as torch itself.
    """
    after_import("torch._dynamo", _direct_calls.end)
    after_import("torch._compile", _defer_in_disable)
    after_import("torch.optim.optimizer", _defer_in_step)
    after_import("torch.autograd", _defer_in_make_grads)


def _defer_in_disable(module: Any) -> None:
    """Where nothing is compiled there is nothing to disable: the functions are called as they are.

    torch calls what it finds in an attribute of the function, and imports torch._dynamo to make it.
    """
    original = getattr(module, "_disable_dynamo", None)
    if original is None:  # another version of torch
        return

    @functools.wraps(original)
    def disable(fn: Function | None = None, recursive: bool = True) -> Function:
        if fn is None:
            return functools.partial(disable, recursive=recursive)
        disabled: Function = original(fn, recursive)
        if not _direct_calls.is_over:
            _direct_calls.add(fn)
        return disabled

    module._disable_dynamo = disable


def _defer_in_step(module: Any) -> None:
    """`step` of an optimizer imports torch._dynamo to end graphs; without graphs it need not."""
    original = getattr(module, "_use_grad_for_differentiable", None)
    if original is None:  # another version of torch
        return

    def decorate(step: Function) -> Function:
        import torch

        compiled = original(step)

        @functools.wraps(step)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _direct_calls.is_over:
                return compiled(self, *args, **kwargs)
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return step(self, *args, **kwargs)

        return run

    module._use_grad_for_differentiable = decorate


def _defer_in_make_grads(module: Any) -> None:
    """A backward from given gradients imports sympy to compare their shapes with the outputs',
    which need it only while something is compiled."""
    original = getattr(module, "_make_grads", None)
    if original is None:  # another version of torch
        return

    @functools.wraps(original)
    def make_grads(outputs: Any, grads: Any, is_grads_batched: bool) -> Any:
        fit = len(outputs) == len(grads) and all(map(_fits, outputs, grads))
        if is_grads_batched or not fit:
            return original(outputs, grads, is_grads_batched)
        return tuple(grads)

    module._make_grads = make_grads
    after_import(
        "torch.fx.experimental.symbolic_shapes",
        lambda _: setattr(module, "_make_grads", original),
    )


def _fits(output: Any, grad: Any) -> bool:
    """Whether this is certainly a gradient for an output, and not a wrong or an uncommon one."""
    return (
        all(hasattr(each, "is_nested") and not each.is_nested for each in (output, grad))
        and output.shape == grad.shape
        and output.is_complex() == grad.is_complex()
    )
