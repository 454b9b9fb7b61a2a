"""Calls that a module makes of its own `forward` while a call of it is computed whole.

A detector's `forward` that gets a batch with targets returns `self.loss(batch)`, which calls
`self.forward(images)`. The boxes are no rows of the images, so the call is whole; the inner one,
most of the work, can be sharded if it goes through the module's `__call__`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from instep.unedited.objects.script_code import functions_of, names_in
from instep.unedited.sharded_call.plan.module_properties import CALL_HOOKS

_FORWARD = "forward"


@contextmanager
def as_calls(module: nn.Module) -> Iterator[None]:
    """Inside, a call of the module is under way, and its own calls of `forward` are calls, too."""
    if not _calls_forward(type(module)) or any(getattr(module, name) for name in CALL_HOOKS):
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


def _calls_forward(kind: type[nn.Module]) -> bool:
    """Whether a method of the class, but not nn.Module's, names `forward`."""
    if kind not in _known:
        _known[kind] = any(
            _FORWARD in names_in(method.__code__)
            for each in kind.__mro__
            if each is not nn.Module and issubclass(each, nn.Module)
            for method in functions_of(each)
        )
    return _known[kind]


_known: WeakKeyDictionary[type[nn.Module], bool] = WeakKeyDictionary()
