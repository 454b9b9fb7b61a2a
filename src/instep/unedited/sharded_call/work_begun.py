"""Whether a script's work has begun: from then on its ranks do not part any more."""

from __future__ import annotations

from collections.abc import Callable

_awaited: list[Callable[[], None]] = []


def when_begun(react: Callable[[], None] | None) -> None:
    """Call `react()` once, before the first divided call's result or the first backward."""
    _awaited[:] = [] if react is None else [react]


def begun() -> None:
    """Work begins now, or has begun before."""
    while _awaited:
        _awaited.pop()()
