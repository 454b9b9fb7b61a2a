"""Exceptions as text for the user: which frames are printed, and which exception came first."""

from __future__ import annotations

import contextlib
import errno
import linecache
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import groupby, islice
from types import TracebackType

from instep.errors import InstepError
from instep.process import PACKAGE_FOLDER, is_script_file
from instep.process.exit_status import UNKNOWN_RANK

_LOST_PEER = (
    ("gloo/transport", "Connection closed by peer"),
    ("gloo/transport", "Connection reset by peer"),
    ("NCCL", "remote process exited"),
    ("error when running the callback: PeerLeftError",),
)
"""Words of torch's RuntimeErrors which say no more than that a peer has gone."""

_REFUSED_THREAD = (os.strerror(errno.EAGAIN), "can't start new thread")
"""How RuntimeErrors of C++ and of Python begin where the system starts no more threads."""
_FORKS = ("_execute_child", "_launch")
"""The functions of subprocess and multiprocessing that start a process."""


def root_cause(error: BaseException) -> BaseException:
    """The first of the exceptions that led to each other."""
    return [*_chain(error)][-1]


def is_caused_by_another_rank(error: BaseException) -> bool:
    """Whether its root cause only says that another rank failed, left, or did something else."""
    cause = root_cause(error)
    if isinstance(cause, InstepError):
        return cause.caused_by_another_rank
    return is_lost_peer(cause)


def awaited_rank(error: BaseException) -> int | None:
    """The rank that has ended although this one waited for it, if that is the root cause; perhaps
    UNKNOWN_RANK."""
    cause = root_cause(error)
    if isinstance(cause, InstepError):
        return getattr(cause, "rank", None) if cause.caused_by_another_rank else None
    return UNKNOWN_RANK if is_lost_peer(cause) else None


def is_lost_peer(cause: BaseException) -> bool:
    """Whether it is an error of torch's which says no more than that a peer has gone."""
    return isinstance(cause, RuntimeError) and any(
        all(word in str(cause) for word in words) for words in _LOST_PEER
    )


def format_error(error: BaseException) -> str:
    """Its class and message; the message is an exception's own code, which may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as why:  # of that code
        return f"{type(error).__name__} (its message raises {type(why).__name__})"


def format_traceback(error: BaseException) -> str:
    """The traceback of an error as Python prints it, without frames of instep that pass a call on
    to the function of another library; of instep's other frames only the first and the last in
    a row.

    Where a collective failed because this rank was failing already, it is the traceback of the
    root cause, and a line about the collective.
    """
    by_us = isinstance(error, InstepError) and error.caused_by_another_rank
    printed = root_cause(error) if by_us and not is_caused_by_another_rank(error) else error
    trim_traceback(printed)
    text = "".join(traceback.format_exception(printed))
    return text if printed is error else f"{text}After that: {format_error(error)}\n"


def note_thread_limit(error: BaseException) -> None:
    """Add to an error which says that a thread or a process cannot be started what forbids it."""
    cause = root_cause(error)
    refused = isinstance(cause, RuntimeError) and str(cause).startswith(_REFUSED_THREAD)
    if isinstance(cause, BlockingIOError):
        frames = [*_frames(cause.__traceback__)][-2:]
        refused = any(frame.tb_frame.f_code.co_name in _FORKS for frame in frames)
    if refused:
        cause.add_note(
            "The system lets this user or container start no more processes and threads (ulimit "
            "-u; pids.max of the control group). Each rank needs some 40."
        )


def note_interpreter(error: BaseException) -> None:
    """Add to the error of a missing module which Python it is missing in, if the shell's `python`
    is of another installation, or of another virtual environment."""
    found = shutil.which("python") or sys.executable
    folder, other = (os.path.realpath(os.path.dirname(path)) for path in (sys.executable, found))
    if isinstance(error, ModuleNotFoundError) and folder != other and not _is_script(found):
        error.add_note(
            f"instep runs the script with {sys.executable}; the command python of this shell is "
            f"{found}. If the module is there, install instep there, too."
        )


def _is_script(path: str) -> bool:
    """Whether a command is a script, as pyenv's and asdf's `python`, which may start this one."""
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return True


def script_line(error: BaseException) -> str:
    """The file and the line of the script that raised it, or of a library that the script itself
    is part of; empty if no script did."""
    libraries = _libraries()
    frames = [f for f in _frames(error.__traceback__) if not _is_in(f, *libraries)]
    files = [frame.tb_frame.f_code.co_filename for frame in frames]
    own = [n for n, file in enumerate(files) if is_script_file(file)]
    for n in own[-1:] or range(len(files))[-1:]:
        return f"{files[n]}:{frames[n].tb_lineno}"
    return ""


def trim_traceback(error: BaseException) -> None:
    """Remove most of instep's frames from its traceback and from those of its causes."""
    for each in _chain(error):
        each.__traceback__ = _link(_select([*_frames(each.__traceback__)], each))


class OwnFrames(AbstractContextManager[None]):
    """Leaves no frame of instep's in the traceback of an exception that comes out of it, from the
    frame that it is used in on: what calls that one may make a text of it."""

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if error is not None:
            drop_own_frames(error)


def drop_own_frames(error: BaseException) -> None:
    """Remove all of instep's frames from its traceback and from those of its causes."""
    for each in _chain(error):
        frames = _frames(each.__traceback__)
        each.__traceback__ = _link([frame for frame in frames if not _is_in(frame, PACKAGE_FOLDER)])


def _libraries() -> tuple[str, ...]:
    """Prefixes of the files of instep, of torch, of contextlib and of Python's own start of a
    program."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return (
        PACKAGE_FOLDER,
        "<frozen ",
        contextlib.__file__,
        *([os.path.join(os.path.dirname(torch), "")] if torch else ()),
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, its cause, and so on to the first."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _frames(frames: TracebackType | None) -> Iterator[TracebackType]:
    while frames is not None:
        yield frames
        frames = frames.tb_next


def _is_in(frame: TracebackType, *prefixes: str) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(prefixes)


def _select(frames: list[TracebackType], error: BaseException) -> list[TracebackType]:
    """The frames from the script's first on, without most of instep's."""
    selected: list[TracebackType] = []
    between: list[TracebackType] = []
    libraries = _libraries()
    for frame in frames:
        if _is_in(frame, *libraries):
            between.append(frame)
            continue
        selected += [*(_shorten(_without_passed_on(between)) if selected else ()), frame]
        between = []
    between = _without_passed_on(between)
    if selected and between:
        if isinstance(error, InstepError) and _is_in(between[-1], PACKAGE_FOLDER):
            return selected  # the script's line and the message say it all
        selected += between if _is_in(between[-1], PACKAGE_FOLDER) else _shorten(between)
    return selected


def _without_passed_on(frames: list[TracebackType]) -> list[TracebackType]:
    """Without the rows of instep's frames at whose end an `original` function is called, as plain
    Python calls it, or an `original` exception is raised."""
    kept: list[TracebackType] = []
    for is_ours, row in groupby(frames, lambda frame: _is_in(frame, PACKAGE_FOLDER)):
        several = [*row]
        if not (is_ours and _calls_original(several[-1])):
            kept += several
    return kept


def _calls_original(frame: TracebackType) -> bool:
    """Whether this frame calls a function by the name `original`, or raises an exception of this
    name."""
    code = frame.tb_frame.f_code
    line, _, column, _ = next(islice(code.co_positions(), frame.tb_lasti // 2, None))
    text = linecache.getline(code.co_filename, line or 0).encode()
    return text[column or 0 :].startswith((b"original(", b"raise original"))


def _shorten(frames: list[TracebackType]) -> list[TracebackType]:
    """Only the first and the last of instep's."""
    ours = [frame for frame in frames if _is_in(frame, PACKAGE_FOLDER)]
    return [frame for frame in frames if frame not in ours[1:-1]]


def _link(frames: list[TracebackType]) -> TracebackType | None:
    inner: TracebackType | None = None
    for frame in reversed(frames):
        frame.tb_next = inner
        inner = frame
    return inner
