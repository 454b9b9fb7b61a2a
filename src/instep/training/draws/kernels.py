"""Functions in place of the operations that draw random numbers.

On CPUs they stand in for torch's kernels: that costs a draw some three microseconds, and other
operations nothing. On other devices a dispatch mode finds the draws, which costs every operation
some ten microseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from instep.process.patching import ignored_warnings
from instep.process.torch_private.dispatch import OperationMode
from instep.training.draws.operations import DRAWS_ON_CPUS, draws_nothing
from instep.training.random_streams import default_generators

RunDraw = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called as `run_draw(func, args, kwargs)`, where `func` is one of torch.ops.aten."""


class _Interceptor(threading.local):
    run_draw: RunDraw | None = None


_interceptor = _Interceptor()


class _ReplacedKernels:
    """The kernels that stand in for torch's."""

    library: torch.library.Library | None = None
    """Holds them; torch's are back when it goes."""
    is_used = False
    """Whether draws were intercepted since `release_if_idle`."""


_replaced = _ReplacedKernels()


def intercepted_draws(run_draw: RunDraw) -> AbstractContextManager[object]:
    """Inside, on this thread, `run_draw` runs what draws; what it calls is not intercepted."""
    is_on_cpus = len(default_generators()) == 1
    return _intercepted_on_cpus(run_draw) if is_on_cpus else DrawMode(run_draw)


@contextmanager
def _intercepted_on_cpus(run_draw: RunDraw) -> Iterator[None]:
    if _replaced.library is None:
        _replace_kernels()
    _replaced.is_used = True
    before, _interceptor.run_draw = _interceptor.run_draw, run_draw
    try:
        yield
    finally:
        _interceptor.run_draw = before


def release_if_idle() -> None:
    """Give torch its kernels back if nothing was intercepted since the last call: others' draws
    take three microseconds less. They are replaced again when that is due, within a millisecond."""
    if not _replaced.is_used:
        release()
    _replaced.is_used = False


def release() -> None:
    """Give torch its kernels back now."""
    _replaced.library = None


def _replace_kernels() -> None:
    library = _replaced.library = torch.library.Library("aten", "IMPL")
    with ignored_warnings("(?s).*verriding a previously registered kernel"):
        for name in DRAWS_ON_CPUS:
            packet, _, overload = name.partition(".")
            func = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if func is None:  # another version of torch has no such thing
                continue
            kernel = _kernel_in_place_of(func, torch.library.get_kernel(func, "CPU"))
            library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)


def _kernel_in_place_of(func: Any, kernel: Any) -> Callable[..., Any]:
    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        run_draw = _interceptor.run_draw
        if run_draw is None or draws_nothing(func, args, kwargs):
            return kernel.call_boxed(keyset, *args, **kwargs)
        _interceptor.run_draw = None
        try:
            drawn = run_draw(func, args, kwargs)
        finally:
            _interceptor.run_draw = run_draw
        out = kwargs.get("out")
        return drawn if out is None or drawn is out else out.copy_(drawn)

    return run


class DrawMode(OperationMode):
    """Inside, `run_draw` runs what draws, on any device; what it calls is not intercepted."""

    supports_higher_order_operators = True

    def __init__(self, run_draw: RunDraw) -> None:
        super().__init__()
        self._run_draw = run_draw

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code runs as such in this mode, and draws its seed here. Otherwise
        torch.compile would leave it uncompiled, afterwards as well, and its dropout would draw
        other numbers."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        return self._run_draw(func, args, kwargs)
