"""torch.compile: when it is imported, and functions into which it must not look, since they talk to
other ranks or keep state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakSet

from instep.process.import_hooks import after_import

Function = Callable[..., Any]
Class = TypeVar("Class", bound=type)

_DISABLED = "__dynamo_disable"
"""The attribute in which torch keeps what torch._dynamo makes of a function at its first call."""
_called_directly: WeakSet[Function] = WeakSet()
_is_imported = False
"""Whether torch._dynamo is."""


def defer_import() -> None:
    """Let torch._dynamo be imported when something is compiled, and not by the first optimizer.

    It brings sympy and 800 other modules, which takes each process as long as torch itself. Call
    this before torch is imported; later it changes nothing.
    """
    after_import("torch._dynamo", _end_deferral)
    after_import("torch._compile", _defer_in_disable)
    after_import("torch.optim.optimizer", _defer_in_step)


def _defer_in_disable(module: Any) -> None:
    """Where nothing is compiled there is nothing to disable: the functions are called as they are.

    torch calls what it finds in an attribute of the function, and imports torch._dynamo to make it.
    """
    original = module._disable_dynamo

    @functools.wraps(original)
    def disable(fn: Function | None = None, recursive: bool = True) -> Function:
        if fn is None:
            return functools.partial(disable, recursive=recursive)
        disabled: Function = original(fn, recursive)
        if not _is_imported:
            with suppress(AttributeError, TypeError):  # it takes no attributes or references
                _called_directly.add(fn)
                setattr(fn, _DISABLED, fn)
        return disabled

    module._disable_dynamo = disable


def _defer_in_step(module: Any) -> None:
    """`step` of an optimizer imports torch._dynamo to end graphs; without graphs it need not."""
    original = module._use_grad_for_differentiable

    def decorate(step: Function) -> Function:
        import torch

        compiled = original(step)

        @functools.wraps(step)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_imported:
                return compiled(self, *args, **kwargs)
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return step(self, *args, **kwargs)

        return run

    module._use_grad_for_differentiable = decorate


def _end_deferral(_: object) -> None:
    global _is_imported
    _is_imported = True
    while _called_directly:
        function = _called_directly.pop()
        with suppress(AttributeError):
            delattr(function, _DISABLED)


def disable_compile(function: Function) -> Function:
    """A function around `function` at which torch.compile ends a graph.

    torch.compiler.disable would import torch.compile, which takes a second, whether it is used or
    not; this does so at the first call.
    """
    from torch._compile import _disable_dynamo

    disabled: Function = _disable_dynamo(function)
    return disabled


def disallow_in_graph(function: Function) -> Function:
    """`function`, which torch.compile does not take for torch's own function of that name.

    Its table of these, by name, is drawn up anew after each init_process_group; then it held the
    patched function, and collectives ran on fake tensors.
    """
    import torch

    allowed = torch.compiler.allow_in_graph(function)  # only what is allowed can be disallowed
    disallowed: Function = torch._dynamo.disallow_in_graph(allowed)
    return disallowed


def skip_frame(function: FunctionType) -> None:
    """Let all functions with the code of `function`, and what they call, run uncompiled.

    That is what torch.compiler.disable does, without its import of torch.compile and without a
    wrapper around each call. It does not keep torch.compile from tracing a caller through it.
    """
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )

    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)


def skip_methods(owner: Class) -> Class:
    """Let the methods that this class defines run uncompiled: DDP's C++ calls them from there."""
    for method in vars(owner).values():
        if isinstance(method, FunctionType):
            skip_frame(method)
    return owner
