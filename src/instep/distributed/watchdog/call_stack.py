"""The script's line, and the collective in which the main thread waits, read from its stack.

The stack is read only when the watcher asks, so that a collective itself costs nothing.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import filterfalse
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn

from instep.distributed.flight_record.recorder import end_of_script, issued, leave, phase, wait
from instep.distributed.flight_record.script_line import OUTSIDE_SCRIPT, location, script_frame
from instep.distributed.shm.memory.signals import Signals
from instep.process import PACKAGE_FOLDER, is_stdlib
from instep.process.exit_status import rank_ranges

_TORCH = dist.distributed_c10d.__file__
_NO_SCRIPT = (*OUTSIDE_SCRIPT, "<string>")
"""The last one is code that a library generates, as that of a dataclass."""
_WRAPPERS = (
    *(dist.c10d_logger.__file__, nn.modules.module.__file__),
    f"{PACKAGE_FOLDER}process/patching.py",
)
"""Files of torch's decorators, of its calls of modules, and of the patches in unedited scripts."""
_GROUP_OPS = frozenset(
    (
        *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all"),
        *("all_to_all_single", "barrier", "broadcast", "gather", "monitored_barrier", "reduce"),
        *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter"),
    )
)
"""Functions of torch.distributed that wait for every member of their `group`."""
_ROOT_ARGUMENTS = {"broadcast": ("src", "group_src"), "reduce": ("dst", "group_dst")}
"""Functions that have a root, and the arguments that name it."""
_PEER_ARGUMENTS = {"send": ("dst", "group_dst"), "recv": ("src", "group_src")}
"""Functions that wait for one rank, and the arguments that name it."""

NO_LINE = "Python's end"
"""Where the main thread runs no line: in a function of C that atexit calls, for example."""
START = "Python's start"
"""Where it runs instep's lines only, before the script's first one."""
_SHUTDOWN = threading.__file__, "_shutdown"
"""The function in which Python's end waits for threads."""
_NEW_GROUP = "new_group"
"""The function of torch.distributed in which the members of a new group meet."""
_WAITING = _GROUP_OPS | _PEER_ARGUMENTS.keys() | {_NEW_GROUP}


class TrackedWork:
    """A Work of torch; a thread that waits for it has this object on its stack."""

    __slots__ = ("group", "number", "op", "work")

    def __init__(
        self, work: Any, op: str, group: dist.ProcessGroup | None, number: int = -1
    ) -> None:
        """`number`: in the flight record."""
        self.work, self.op, self.group, self.number = work, op, group, number
        issued(number)

    def wait(self) -> object:
        """Return when the tensor holds the result."""
        wait(self.number)
        try:
            return self.work.wait()
        finally:
            leave(self.number)


def wait_at_exit(wait: Callable[[], object]) -> None:
    """Call `wait`, in which this rank waits for the others at the end of its script.

    If another rank waits for this one, both are found to be deadlocked.
    """
    with phase("exit"):
        wait()


def script_line() -> str:
    """The line of the script that calls this: of the innermost frame outside instep and torch."""
    return location(script_frame(sys._getframe(1)))


def main_thread_wait() -> dict[str, object] | None:
    """The collective in which the main thread waits: op, the ranges of its members, and the call
    and the line of the script.

    None outside of a collective. The thread should be asleep: its frames are read as they are. In
    shared memory, where it wakes now and then to look, the sequence number tells one wait from the
    next.
    """
    frames = main_thread_frames()
    for frame in frames:
        with no_garbage_collection():
            found = _wait(frame)
        if found is not None:
            script = script_frame(frame)
            inner = [f.f_code for f in frames[: frames.index(script)]]
            names = (code.co_name for code in reversed(inner) if code.co_filename not in _WRAPPERS)
            call = next(filterfalse(_is_replacement, names), found["op"])
            members = {"members": rank_ranges(found["members"])}
            return {"call": call, "line": location(script)} | found | members
    return None


def _is_replacement(name: str) -> bool:
    """Whether a script does not call it by this name: a replacement of what it calls."""
    return name.startswith("_") and not name.startswith("__")


def main_thread_root() -> int | None:
    """The root of the broadcast or reduce of torch's in which the main thread waits."""
    for frame in main_thread_frames():
        if frame.f_code.co_filename == _TORCH and frame.f_code.co_name in _ROOT_ARGUMENTS:
            with no_garbage_collection():
                arguments = frame.f_locals
            rank, group_rank = (arguments[key] for key in _ROOT_ARGUMENTS[frame.f_code.co_name])
            return _members(arguments["group"])[group_rank] if rank is None else int(rank)
    return None


def main_thread_line() -> str:
    """The line of the script, or of a library that it uses, that the main thread runs.

    At Python's end it is the line of a thread for which the main thread waits.
    """
    frames = main_thread_frames()
    if not frames:
        return NO_LINE
    if (frames[-1].f_code.co_filename, frames[-1].f_code.co_name) == _SHUTDOWN:
        awaited = (each for each in threading.enumerate() if not each.daemon)
        waited_for = [each for each in awaited if each is not threading.main_thread()]
        frames = next(filter(None, map(thread_frames, waited_for)), frames)
    scripts = (
        frame
        for frame in frames
        if not is_stdlib(file := frame.f_code.co_filename) and not file.startswith(_NO_SCRIPT)
    )
    frame = next(scripts, frames[-1])
    return START if frame.f_code.co_filename.startswith("<frozen ") else location(frame)


def format_main_thread_stack() -> str:
    """The main thread's frames in the script, in the format of a traceback."""
    frames = main_thread_frames()
    lines = frames and format_frames(frames[frames.index(script_frame(frames[0])) :])
    return f"Stack (most recent call last):\n{lines}" if lines else ""


def format_frames(frames: Sequence[FrameType]) -> str:
    """Frames, of which the innermost is first, in the format of a traceback; without instep's."""
    stack = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in reversed(frames))
    entries = [e for e in stack if not e.filename.startswith((PACKAGE_FOLDER, "<frozen"))]
    return "".join(traceback.format_list(entries))


def main_thread_frames() -> list[FrameType]:
    """The main thread's frames, the innermost first."""
    return thread_frames(threading.main_thread())


def thread_frames(thread: threading.Thread) -> list[FrameType]:
    """A thread's frames, the innermost first; none if it has ended, or runs C code that no Python
    code has called."""
    with no_garbage_collection():
        innermost = sys._current_frames().get(thread.ident or 0)
        return [frame for frame, _ in traceback.walk_stack(innermost)] if innermost else []


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python 3.11 collects garbage while it makes a frame object. A finalizer may then let the
    frame's thread run, which leaves the frame, and the object is of freed memory: 'tuple' object
    has no attribute 'f_lineno', or a crash. Python 3.12 collects between instructions only."""
    is_enabled = gc.isenabled() and sys.version_info < (3, 12)
    if is_enabled:
        gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _wait(frame: FrameType) -> dict[str, Any] | None:
    """Op and members, if this frame is the call of a collective."""
    if frame.f_code is TrackedWork.wait.__code__:
        tracked: TrackedWork = frame.f_locals["self"]
        return _group_wait(tracked.op, tracked.group)
    if frame.f_code is Signals.barrier.__code__:
        signals: Signals = frame.f_locals["self"]
        op = frame.f_locals["signature"].text
        return {"op": op, "members": signals.ranks, "sequence": signals.sequence}
    if frame.f_code is wait_at_exit.__code__:
        try:
            members = _members(None)
        except (ValueError, KeyError):  # it has closed the groups by now, or does so meanwhile
            return None
        return {"call": "exit", "line": end_of_script(), "op": "exit", "members": members}
    name = frame.f_code.co_name
    if frame.f_code.co_filename != _TORCH or name not in _WAITING:
        return None
    arguments = frame.f_locals
    if name == _NEW_GROUP:
        ranks = arguments["ranks"]
        return {"op": name, "members": _members(None) if ranks is None else [*map(int, ranks)]}
    group = arguments["group"]
    if name in _GROUP_OPS:
        return _group_wait(name, group)
    rank, group_rank = (arguments[key] for key in _PEER_ARGUMENTS[name])
    if rank is None and group_rank is not None:
        rank = _members(group)[group_rank]
    return None if rank is None else {"op": name, "members": [dist.get_rank(), rank]}


def _group_wait(op: str, group: dist.ProcessGroup | None) -> dict[str, object]:
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    return {"op": f"{op} in group {group.group_name}", "members": _members(group)}


def _members(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
