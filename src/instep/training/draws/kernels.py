"""Operations that draw random numbers, of which a function takes the place.

On CPUs it takes the place of torch's kernels, which costs other operations nothing, and draws some
three microseconds. A dispatch mode sees those on other devices, too, but there every operation of
any kind takes some ten microseconds more.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from instep.process.torch_private import (
    TorchDispatchMode,
    dispatch_has_kernel,
    dispatch_op_names,
)
from instep.training.random_ops import draws_nothing
from instep.training.random_streams import default_generators

Draw = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called as `draw(func, args, kwargs)`, where `func` is one of torch.ops.aten."""


class _Interceptor(threading.local):
    draw: Draw | None = None


_interceptor = _Interceptor()
_libraries: list[torch.library.Library] = []
"""The kernels are torch's own again when this goes."""


def intercepted_draws(draw: Draw) -> AbstractContextManager[object]:
    """Inside, on this thread, `draw` runs what draws; what it calls is not intercepted."""
    is_on_cpus = len(default_generators()) == 1
    return _intercepted_on_cpus(draw) if is_on_cpus else _DrawMode(draw)


@contextmanager
def _intercepted_on_cpus(draw: Draw) -> Iterator[None]:
    if not _libraries:
        _replace_kernels()
    before, _interceptor.draw = _interceptor.draw, draw
    try:
        yield
    finally:
        _interceptor.draw = before


def _replace_kernels() -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*verriding a previously registered kernel")
        for name in dispatch_op_names():
            namespace, _, name_in_it = name.partition("::")
            if namespace != "aten" or not dispatch_has_kernel(name, "CPU"):
                continue
            packet, _, overload = name_in_it.partition(".")
            func = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if _may_draw(func):
                kernel = _kernel_in_place_of(func, torch.library.get_kernel(name, "CPU"))
                library.impl(name_in_it, kernel, "CPU", with_keyset=True, allow_override=True)


def _may_draw(func: Any) -> bool:
    return (
        torch.Tag.nondeterministic_seeded in func.tags
        # Attention that has a kernel for CPUs of its own has no dropout.
        and "scaled_dot_product" not in func._schema.name
        and func._schema.name != "aten::_fused_sdp_choice"
    )


def _kernel_in_place_of(func: Any, kernel: Any) -> Callable[..., Any]:
    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        draw = _interceptor.draw
        if draw is None or draws_nothing(func, args, kwargs):
            return kernel.call_boxed(keyset, *args, **kwargs)
        _interceptor.draw = None
        try:
            drawn = draw(func, args, kwargs)
        finally:
            _interceptor.draw = draw
        out = kwargs.get("out")
        return drawn if out is None or drawn is out else out.copy_(drawn)

    return run


class _DrawMode(TorchDispatchMode):
    def __init__(self, draw: Draw) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw = draw

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        return self._draw(func, args, kwargs)
