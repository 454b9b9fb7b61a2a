"""The seams in PyTorch where instep steps in: functions that torch looks up by name at each call.

A replacement receives the original first and passes everything through to it, unless the call
belongs to a replicated model. Modules, hooks, pickles and copies of the user's stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]

_originals: dict[tuple[object, str], Function] = {}


def step_in(owner: object, name: str, replacement: Function) -> bool:
    """Let `replacement(original, *args, **kwargs)` answer calls of `owner.name`.

    Returns False, and does nothing, where somebody has stepped in already.
    """
    if (owner, name) in _originals:
        return False
    original: Function = getattr(owner, name)
    _originals[owner, name] = original

    @functools.wraps(original)
    def seam(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, uncompiled(seam))
    return True


def uncompiled(function: Function) -> Function:
    """`function`, at which torch.compile breaks its graph: it talks, or keeps state."""
    disabled: Function = torch.compiler.disable(function)
    return disabled


def step_out() -> None:
    """Put every original back."""
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()
