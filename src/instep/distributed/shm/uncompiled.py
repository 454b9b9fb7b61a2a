"""What torch.compile does not look into: the methods of a process group and of its works."""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

Kind = TypeVar("Kind")


def uncompiled(kind: type[Kind]) -> type[Kind]:
    """`kind`, whose own methods, with what they call, run as they are inside of compiled code.

    DDP's C++ calls them there. It is what torch.compiler.disable does, without its import of
    torch.compile, which takes a second, and without a wrapper around each call.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            set_code_exec_strategy(method.__code__, skip)
    return kind
