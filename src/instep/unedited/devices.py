"""Scripts that name several devices: each rank has one, its own, whatever they are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

Function = Callable[..., Any]


def on_own(*names: str) -> Function:
    """What answers for a function whose arguments of these names are devices of the host's."""

    def answer(original: Function, *args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_available():
            return original(*args, **kwargs)
        bound = inspect.signature(original).bind(*args, **kwargs)
        for name in names:
            if name in bound.arguments:
                bound.arguments[name] = own_instead_of(bound.arguments[name])
        return original(*bound.args, **bound.kwargs)

    return answer


def own_instead_of(named: Any) -> Any:
    """This rank's device instead of those that a script names; the CPU stays what it is (pure).

    Args:
        named: a device in any of torch's spellings, a list of devices, or None.
    """
    if isinstance(named, Sequence) and not isinstance(named, str):
        return [own_instead_of(device) for device in named[:1]]
    if isinstance(named, int):
        return min(named, 0)  # -1 is the CPU
    if isinstance(named, str | torch.device) and torch.device(named).type == "cuda":
        return torch.device("cuda", 0)
    return named
