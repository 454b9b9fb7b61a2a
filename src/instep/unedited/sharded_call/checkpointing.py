"""Gradient checkpointing inside of a divided call: what backward computes again, it computes as
that call did.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from instep.process.patching import Function
from instep.unedited.sharded_call import region
from instep.unedited.sharded_call.region import Region

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _no_contexts() -> Contexts:
    return nullcontext(), nullcontext()


def checkpoint(
    original: Function,
    function: Function,
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Contexts] = _no_contexts,
    **kwargs: Any,
) -> Any:
    """torch.utils.checkpoint.checkpoint.

    Inside of a divided call never reentrant: that would compute with the parameters themselves
    instead of what represents them there. The numbers are the same.
    """
    call = region.current()
    if call is None:
        return original(
            function, *args, use_reentrant=use_reentrant, context_fn=context_fn, **kwargs
        )

    def contexts() -> Contexts:
        forward, again = context_fn()
        return forward, _Both(call, again)

    return original(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _Both:
    """A divided call, entered again, and inside of it the script's own context."""

    def __init__(self, call: Region, inner: AbstractContextManager[Any]) -> None:
        self._call, self._inner = call, inner

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(self._call.entered())
        self._stack.enter_context(self._inner)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
