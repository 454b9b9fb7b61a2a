"""PyTorch's private names of torch.compile.

It must not look into functions that talk to other ranks, or keep state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

from instep.process.import_hooks import after_import

Function = Callable[..., Any]
Class = TypeVar("Class", bound=type)

COMPILER_NOTES = "_dynamo"
"""How the names of attributes begin in which torch.compile notes something of a parameter."""


def allow_repeated_backward() -> None:
    """Let torch.compile make backward functions that can be called more than once.

    They have a tag in its cache on disk. Without a tag the cache would return a function that was
    compiled to be called once, and that gives wrong gradients the second time.
    """
    from torch._functorch import config  # heavy; there by now, as something is compiled

    if config.donated_buffer:
        config.donated_buffer = False
        torch.compiler.config.cache_key_tag += "no donated buffers"


def disable_compile(function: Function) -> Function:
    """A function around `function` at which torch.compile ends a graph.

    torch.compiler.disable would import torch.compile, which takes a second, whether it is used or
    not, and what this takes of torch at the first call. Before something else has imported it,
    there is nothing to disable.
    """
    from torch._compile import _disable_dynamo

    disabled: Function = _disable_dynamo(function)
    if "torch._dynamo" not in sys.modules:
        if not _called_directly:
            after_import("torch._dynamo", _end_direct_calls)
        _called_directly.append(function)
        vars(function)[_DISABLED] = function
    return disabled


_DISABLED = "__dynamo_disable"
"""Where torch keeps for a function what it calls in its place."""
_called_directly: list[Function] = []


def _end_direct_calls(_: object) -> None:
    while _called_directly:
        vars(_called_directly.pop()).pop(_DISABLED, None)


def disallow_in_graph(function: Function) -> Function:
    """`function`, which torch.compile does not take for torch's own function of that name.

    Its table of these, by name, is drawn up anew after each init_process_group; then it held the
    patched function, and collectives ran on fake tensors.
    """
    allowed = torch.compiler.allow_in_graph(function)  # only what is allowed can be disallowed
    disallowed: Function = torch._dynamo.disallow_in_graph(allowed)
    return disallowed


def skip_frame(function: Any) -> None:
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
