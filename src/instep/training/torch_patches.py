"""The seams in PyTorch where instep steps in: functions that torch looks up by name at each call.

A replacement receives the original first and passes everything through to it, unless the call
belongs to a replicated model. Modules, hooks, pickles and copies of the user's stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from instep.process.torch_compile import uncompiled, unlike_torch

Function = Callable[..., Any]

_replacements: set[tuple[object, str, Function]] = set()


def step_in(owner: object, name: str, replacement: Function) -> bool:
    """Let `replacement(original, *args, **kwargs)` answer calls of `owner.name`.

    The last one that stepped in is asked first, and has the one before it as its original.
    Returns False, and does nothing, where this replacement has stepped in already.
    """
    if (owner, name, replacement) in _replacements:
        return False
    _replacements.add((owner, name, replacement))
    original: Function = getattr(owner, name)

    @functools.wraps(original)
    def seam(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, unlike_torch(uncompiled(seam)))
    return True
