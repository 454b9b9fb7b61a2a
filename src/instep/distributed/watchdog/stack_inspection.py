"""Where the main thread of this process is: in which collective, if any, and at which line.

Read from the thread's stack when somebody asks, so that a collective itself costs nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from instep.distributed.shm.memory.signals import Signals
from instep.process import PACKAGE_FOLDER

_NOT_THE_SCRIPT = (PACKAGE_FOLDER, f"{Path(str(torch.__file__)).parent}/", contextlib.__file__)
_STDLIB = f"{Path(contextlib.__file__).parent}/"
_TORCH = dist.distributed_c10d.__file__
_WRAPPERS = (dist.c10d_logger.__file__, f"{PACKAGE_FOLDER}process/patching.py")
"""Of torch's functions' decorators, and of what answers for other functions in unedited scripts."""
_OF_ALL = frozenset(
    (
        *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all"),
        *("all_to_all_single", "barrier", "broadcast", "gather", "monitored_barrier", "reduce"),
        *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter"),
    )
)
"""Functions of torch.distributed that wait for every member of their `group`."""
_OF_PAIRS = {"send": ("dst", "group_dst"), "recv": ("src", "group_src")}
"""Those that wait for one rank, and which of their arguments says for whom."""


class Waiting:
    """One of torch's works; who waits for it has this object on the stack."""

    __slots__ = ("group", "op", "work")

    def __init__(self, work: Any, op: str, group: dist.ProcessGroup | None) -> None:
        self.work, self.op, self.group = work, op, group

    def wait(self) -> object:
        """Return when the tensor holds the result."""
        return self.work.wait()


def wait_at_exit(wait: Callable[[], object]) -> None:
    """Call `wait`, in which this rank, having come to the end of its script, waits for the others:
    should one of them wait for it, both are seen to wait in vain."""
    wait()


def of_script(frame: FrameType) -> FrameType:
    """The innermost frame from here outward that is neither instep's nor torch's
    (nor contextlib's, between two of these)."""
    while frame.f_code.co_filename.startswith(_NOT_THE_SCRIPT) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def line(frame: FrameType) -> str:
    """The file and the line at which a frame is."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def wait_of_main_thread() -> dict[str, object] | None:
    """The collective that it is in: its op and members, and the call and the line of the script.

    None outside of one. The thread should be asleep in it: its frames are read while they stand.
    In shared memory, where it wakes now and then to look, the turn tells one wait from the next.
    """
    frames = list(_frames())
    for frame in frames:
        found = _wait(frame)
        if found is not None:
            script = of_script(frame)
            inside = [f.f_code for f in frames[: frames.index(script)]]
            called = (
                code.co_name for code in reversed(inside) if code.co_filename not in _WRAPPERS
            )
            call = next(called, found["op"])
            return {"call": call, "line": line(script)} | found
    return None


def line_of_main_thread() -> str:
    """At which line of the script, or of a library that it uses, it is."""
    frames = [*_frames()]
    installed = (frame for frame in frames if not _is_pythons(frame))
    return line(of_script(next(installed, frames[0])))


def _is_pythons(frame: FrameType) -> bool:
    """Whether it is of Python's own library."""
    file = frame.f_code.co_filename
    return file.startswith(_STDLIB) and "-packages" not in file


def stack_of_main_thread() -> str:
    """Its frames in the script, as a traceback shows them."""
    innermost = of_script(next(_frames()))
    stack = traceback.extract_stack(innermost)
    shown = [entry for entry in stack if not entry.filename.startswith((PACKAGE_FOLDER, "<frozen"))]
    head = "Stack (most recent call last):\n" if shown else ""
    return head + "".join(traceback.format_list(shown))


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None:
        yield frame
        frame = frame.f_back


def _wait(frame: FrameType) -> dict[str, object] | None:
    """Op and members of the collective that this frame is the call of."""
    if frame.f_code is Waiting.wait.__code__:
        waiting: Waiting = frame.f_locals["self"]
        return _of_all(waiting.op, waiting.group)
    if frame.f_code is Signals.meet.__code__:
        signals: Signals = frame.f_locals["self"]
        return {"op": frame.f_locals["call"].text, "members": signals.ranks, "turn": signals.turn}
    if frame.f_code is wait_at_exit.__code__:
        shown: dict[str, object] = {"call": "exit", "line": "the end of the script"}
        return shown | {"op": "exit", "members": _members(None)}
    name = frame.f_code.co_name
    if frame.f_code.co_filename != _TORCH or name not in (*_OF_ALL, *_OF_PAIRS):
        return None
    arguments = frame.f_locals
    group = arguments["group"]
    if name in _OF_ALL:
        return _of_all(name, group)
    rank, place = (arguments[key] for key in _OF_PAIRS[name])
    if rank is None and place is not None:
        rank = _members(group)[place]
    return None if rank is None else {"op": name, "members": [dist.get_rank(), rank]}


def _of_all(op: str, group: dist.ProcessGroup | None) -> dict[str, object]:
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    return {"op": f"{op} in group {group.group_name}", "members": _members(group)}


def _members(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
