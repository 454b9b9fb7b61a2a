"""Functions into which torch.compile must not look: they talk to other ranks, or keep state."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

Function = Callable[..., Any]
Class = TypeVar("Class", bound=type)


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
