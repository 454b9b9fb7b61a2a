"""A script that turns out to speak for itself: what it asks for, and what it is told till then.

A script's text alone seldom tells whether it starts a process group of its own: many do only under
a launcher. So the launcher is hidden, and whoever asks in earnest is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from instep.unedited import launcher_env

Function = Callable[..., Any]
Claimed = Callable[[str], None]

_claimed: list[Claimed] = []


def begin(claimed: Claimed) -> None:
    """Call `claimed(reason)` when the script asks to be left alone."""
    _claimed[:] = [claimed]


def end() -> None:
    """Everything is what it is."""
    _claimed.clear()


def _claim(reason: str) -> None:
    if _claimed:
        _claimed[0](reason)


def claims(reason: str) -> Function:
    """A replacement for what only scripts call that are distributed already."""

    def claiming(original: Function, *args: Any, **kwargs: Any) -> Any:
        _claim(reason)
        return original(*args, **kwargs)

    return claiming


# -------------------------------------------------------------------------- the environment


def environ_getitem(original: Function, self: Any, name: str) -> Any:
    """For os.environ[...]: who takes RANK for granted was written for a launcher."""
    if name in launcher_env.hidden:
        _claim(f"it takes {name} for granted")
    return original(self, name)


def environ_get(original: Function, self: Any, name: str, default: Any = None) -> Any:
    """For os.environ.get: who asks politely hears of no launcher."""
    return default if name in launcher_env.hidden else original(self, name, default)


def environ_contains(original: Function, self: Any, name: object) -> Any:
    """For `in os.environ`."""
    return name not in launcher_env.hidden and original(self, name)


# ---------------------------------------------------------------------------- the window


def window(original: Function, name: str) -> Any:
    """For `instep.replicate` and so on, where the script's text did not show it."""
    if name in sys.modules["instep"].__all__ and not _is_ours(2):
        _claim(f"it uses instep.{name}")
    return original(name)


# ------------------------------------------------------------------------- torch.distributed


def is_initialized(original: Function) -> Any:
    """For torch.distributed.is_initialized: the script's own process group is not."""
    return original() if _is_ours(2) else False


def place(original: Function, group: Any = None) -> Any:
    """For torch.distributed.get_rank and get_world_size."""
    if not _is_ours(2):
        raise ValueError(
            "Default process group has not been initialized, please make sure to call "
            "init_process_group."
        )
    return original(group)


def _is_ours(above: int) -> bool:
    """Whether the caller of a patched function is instep or torch.distributed itself."""
    frame: FrameType | None = sys._getframe(above + 1)
    while frame is not None and _name(frame).startswith("importlib."):
        frame = frame.f_back
    return frame is not None and _name(frame).startswith(("instep.", "torch.distributed."))


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}."
