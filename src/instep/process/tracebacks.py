"""What is shown of an exception: which frames, in which words, and which one began it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType

from instep.errors import InstepError
from instep.process import PACKAGE_FOLDER


def _libraries() -> tuple[str, ...]:
    """Where instep, torch and Python's way to a program have their files."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return (
        PACKAGE_FOLDER,
        "<frozen ",
        *([os.path.join(os.path.dirname(torch), "")] if torch else ()),
    )


def root_cause(error: BaseException) -> BaseException:
    """The exception with which it began: the first of those that led to each other."""
    return [*_chain(error)][-1]


def is_caused_by_another_rank(error: BaseException) -> bool:
    """Whether it only says that another rank failed, left, or did something else."""
    began = root_cause(error)
    return isinstance(began, InstepError) and began.caused_by_another_rank


def format_error(error: BaseException) -> str:
    """Its class and message; an exception's own code may fail at that."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as why:
        return f"{type(error).__name__} (its message raises {type(why).__name__})"


def format_traceback(error: BaseException) -> str:
    """As Python prints it, without instep's frames but for the first and the last of each way
    through instep; where a collective failed because this rank was failing already, the exception
    with which that began, and a line about the other."""
    began = root_cause(error)
    by_us = isinstance(error, InstepError) and error.caused_by_another_rank
    told = began if by_us and not is_caused_by_another_rank(error) else error
    trim_traceback(told)
    text = "".join(traceback.format_exception(told))
    return text if told is error else f"{text}After that: {format_error(error)}\n"


def script_line(error: BaseException) -> str:
    """The file and the line of the script from which it was raised; empty if it was not there."""
    libraries = _libraries()
    for frame in reversed([*_frames(error.__traceback__)]):
        if not _is_in(frame, *libraries):
            return f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
    return ""


def trim_traceback(error: BaseException) -> None:
    """Take most of instep's frames out of its traceback, and of those that led to it."""
    for each in _chain(error):
        each.__traceback__ = _joined(_kept([*_frames(each.__traceback__)], each))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """It and what it followed from, back to the first."""
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


def _is_in(frame: TracebackType, *places: str) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(places)


def _kept(frames: list[TracebackType], error: BaseException) -> list[TracebackType]:
    """Those from the script's first on, without most of instep's."""
    kept: list[TracebackType] = []
    between: list[TracebackType] = []
    libraries = _libraries()
    for frame in frames:
        if _is_in(frame, *libraries):
            between.append(frame)
            continue
        kept += [*(_shortened(between) if kept else ()), frame]
        between = []
    if kept and between:
        unforeseen = _is_in(between[-1], PACKAGE_FOLDER) and not isinstance(error, InstepError)
        kept += between if unforeseen else _shortened(between)
    return kept


def _shortened(frames: list[TracebackType]) -> list[TracebackType]:
    """Only the first and the last of instep's."""
    ours = [frame for frame in frames if _is_in(frame, PACKAGE_FOLDER)]
    return [frame for frame in frames if frame not in ours[1:-1]]


def _joined(frames: list[TracebackType]) -> TracebackType | None:
    inner: TracebackType | None = None
    for frame in reversed(frames):
        frame.tb_next = inner
        inner = frame
    return inner
