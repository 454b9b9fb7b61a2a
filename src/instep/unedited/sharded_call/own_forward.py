"""Calls that a module makes of its own `forward` while a call of it is computed whole.

A detector's `forward` that gets a batch with targets returns `self.loss(batch)`, which calls
`self.forward(images)`. The boxes are no rows of the images, so the call is whole; the inner one,
most of the work, can be sharded if it goes through the module's `__call__`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from instep.unedited.sharded_call.plan.module_state.module_properties import CALL_HOOKS, is_named_in

_FORWARD = "forward"


@contextmanager
def as_calls(module: nn.Module) -> Iterator[None]:
    """Inside, a call of the module is under way, and its own calls of `forward` are calls, too."""
    if not is_named_in(type(module), _FORWARD) or any(getattr(module, name) for name in CALL_HOOKS):
        yield
        return
    instance = vars(module)
    before = instance.get(_FORWARD)
    forward: Callable[..., Any] = module.forward
    is_outer = True

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_outer
        if is_outer:
            is_outer = False
            return forward(*args, **kwargs)
        restore()
        try:
            return module(*args, **kwargs)
        finally:
            instance[_FORWARD] = call

    def restore() -> None:
        if before is None:
            instance.pop(_FORWARD, None)
        else:
            instance[_FORWARD] = before

    instance[_FORWARD] = call
    try:
        yield
    finally:
        restore()
