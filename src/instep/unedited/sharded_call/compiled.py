"""Modules that torch.compile has a hand in."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


def is_compiled(parts: Iterable[nn.Module]) -> bool:
    """Whether any of these is compiled."""
    return any(hasattr(part, "dynamo_ctx") or part._compiled_call_impl for part in parts)


def keep_buffers() -> None:
    """Let torch.compile make backward functions that can be called more than once."""
    from torch._functorch import config  # heavy; there by now, as something is compiled

    config.donated_buffer = False


@contextmanager
def compiling(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, torch.compile looks at the `.grad` of what is no leaf, which warns: of aliases of
    parameters, and of what a graph leaves to the next one."""
    if not is_compiled(parts):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a")
        yield
