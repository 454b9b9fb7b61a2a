"""The lines of the script at which a signal may take effect: not inside of an optimizer's step."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from instep.process import PACKAGE_FOLDER

_INTERRUPTIBLE = (
    *("process/patching.py", "unedited/rank0_relay.py"),
    *("unedited/std_streams.py", "unedited/processes/children.py"),
)
"""Modules of instep that wait for what the script waits for: input, a child process."""
_UNINTERRUPTIBLE = (
    *("nn/", "autograd/", "optim/", "utils/data/", "_dynamo/", "_tensor.py"),
    *("distributed/distributed_c10d.py", "distributed/c10d_logger.py"),
)
"""Modules of torch that run to their end: else some ranks would update some of the parameters."""


def call_at_next_line(frame: FrameType | None, function: Callable[[FrameType], object]) -> None:
    """Call `function` with the script's frame at its next line: the call that it has made now
    returns first. Never, if the script has no further line."""
    before = sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            sys.settrace(before)
            frame.f_trace = None
            function(frame)
            return None
        if event == "return":
            frame.f_trace = None
            follow(frame.f_back)
            return None
        return trace

    def follow(frame: FrameType | None) -> None:
        script, _ = interrupt_frame(frame)
        if script is None:
            sys.settrace(before)
        else:
            script.f_trace = trace

    sys.settrace(lambda *_: None)
    follow(frame)


def interrupt_frame(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """The script's innermost frame that may be interrupted, or None outside of the script.

    Also returns whether that frame has called code that must run to its end.
    """
    stack = [each for each, _ in traceback.walk_stack(frame)] if frame is not None else []
    while stack and _is_in(stack[-1], (PACKAGE_FOLDER, "<frozen ")):
        stack.pop()  # the code that runs the script
    script = None
    uninterruptible = _uninterruptible()
    interruptible = tuple(f"{PACKAGE_FOLDER}{file}" for file in _INTERRUPTIBLE)
    for inner in reversed(stack):
        if _is_in(inner, uninterruptible) and not _is_in(inner, interruptible):
            return script, True
        script = inner
    return script, False


def _is_in(frame: FrameType, paths: tuple[str, ...]) -> bool:
    return frame.f_code.co_filename.startswith(paths)


def _uninterruptible() -> tuple[str, ...]:
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch is None:
        return (PACKAGE_FOLDER,)
    folder = f"{Path(torch).parent}/"
    return (PACKAGE_FOLDER, *(f"{folder}{path}" for path in _UNINTERRUPTIBLE))
