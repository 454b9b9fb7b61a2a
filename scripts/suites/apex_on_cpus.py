"""Apex's tests of amp without a GPU: the stand-in says of CPU tensors that they are on one.

It is the same on instep and beside it on Apex. On instep half precision is float16, as on a GPU,
and not the bfloat16 of CPUs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch


def on_a_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, for which "cuda" is a CPU."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if isinstance(each, str) and each == "cuda" else each for each in args)
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return wrapper


def install() -> None:
    """Change PyTorch's classes, for this whole process."""
    tensor: Any = torch.Tensor
    kind, move = torch.Tensor.type, torch.Tensor.cpu

    def same(self: Any, *_: Any, **__: Any) -> Any:
        return self

    def type_on_a_gpu(self: torch.Tensor, to: Any = None, *more: Any, **named: Any) -> Any:
        if to is None:
            is_moved = hasattr(self, "is_moved")
            return kind(self) if is_moved else kind(self).replace("torch.", "torch.cuda.")
        if isinstance(to, str):
            to = to.replace("torch.cuda.", "torch.")
        return kind(self, to, *more, **named)

    def moved_to_a_cpu(self: torch.Tensor) -> Any:
        there: Any = move(self).view_as(self)  # the tensor itself stays "on a GPU"
        there.is_moved = True
        return there

    tensor.type = type_on_a_gpu
    tensor.cpu = moved_to_a_cpu
    tensor.is_cuda = property(lambda _: True)
    tensor.cuda = torch.nn.Module.cuda = same
    for name in ("FloatTensor", "HalfTensor", "IntTensor", "LongTensor", "DoubleTensor"):
        setattr(torch.cuda, name, getattr(torch, name))
    for owner, names in (
        (torch, "arange empty full ones rand randn tensor zeros"),
        (torch.nn.Module, "to"),
        (torch.Tensor, "to"),
    ):
        for name in names.split():
            setattr(owner, name, on_a_cpu(getattr(owner, name)))
    if os.environ["SUITE_COMPAT"]:
        from instep.compat.apex.amp import amp, frontend

        setattr(amp, "default_half", lambda _: torch.float16)  # noqa: B010
        setattr(frontend, "default_half", lambda _: torch.float16)  # noqa: B010
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: 0
