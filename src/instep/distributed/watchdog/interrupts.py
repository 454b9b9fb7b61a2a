"""In the rank: Ctrl-C takes effect at the same point of the program on every rank.

A terminal or a launcher interrupts each rank at another moment. If each raised KeyboardInterrupt
there, one might have entered a collective that another never comes to. So a rank that is
interrupted only says so. The hub stops all of them before their next collective, hears how many
each has begun, and names one that none has begun: the exception is raised at the script's next
line after that. Where no collective comes, the hub lets it be raised where the ranks are
(`agreement`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from instep.process import PACKAGE_FOLDER

Say = Callable[..., None]
HELD = 10.0
"""Seconds that a rank waits before a collective to hear which one it is to be."""
TOGETHER = 0.5
"""Seconds. What one Ctrl-C sends by two ways (terminal and launcher) is one interrupt."""
_LET_THROUGH = (
    "process/patching.py",
    "unedited/rank0_relay.py",
    "unedited/std_streams.py",
    "unedited/processes/children.py",
)
"""Of instep's modules, those that wait for what the script waits for: input, a child process."""
_WHOLE = ("nn/", "autograd/", "optim/", "utils/data/", "_dynamo/", "_tensor.py")
_WHOLE_TOO = ("distributed/distributed_c10d.py", "distributed/c10d_logger.py")
"""Of torch's, those that are not interrupted half-way: a step of some parameters on some ranks."""

_begun = 0
"""How many collectives of all ranks this one has begun."""
_round: Round | None = None
"""While Ctrl-C is to take effect."""
_say: Say | None = None
"""To the hub; None: this rank is on its own."""
_process = -1
_since = 0.0
"""When this rank was interrupted, or heard that another was; 0: not yet."""
_handler: Any = signal.default_int_handler
"""What an interrupt is to call: Python's handler, or the script's."""


class Round:
    """One Ctrl-C, from the first news of it until it has taken effect here."""

    def __init__(self) -> None:
        self.known = threading.Event()
        """Whether it is said after which collective."""
        self.target = -1
        self.here = False
        """Whether it may take effect wherever this rank is."""
        self.armed = self.over = False


def begin(say: Say) -> None:
    """From now on this rank, which has met the others, is interrupted together with them.

    Does nothing in another thread than the main one, or where interrupts are ignored.
    """
    global _say, _process, _handler
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if handler is _interrupted:
        _say = say
    elif main and callable(handler):
        _say, _process, _handler = say, os.getpid(), handler
        signal.signal(signal.SIGINT, _interrupted)


def alone() -> None:
    """The watch is gone: an interrupt takes effect at once."""
    global _say
    _say = None
    if _round is not None:
        _round.known.set()


def count_collective() -> None:
    """This rank begins a collective of all ranks."""
    global _begun
    _begun += 1
    if _round is not None and not _round.over:
        _stop_before(_round)


def _stop_before(round_: Round) -> None:
    round_.known.wait(HELD)
    if 0 <= round_.target <= _begun and not round_.armed:
        round_.armed = True
        if threading.current_thread() is threading.main_thread():
            _at_next_line(sys._getframe())
        else:
            _wake_main_thread(round_)


# ------------------------------------------------------------------------- what the hub says


def hear(word: str, facts: dict[str, Any]) -> bool:
    """In the thread that listens. Whether it was about an interrupt."""
    global _round, _since
    if word == "halt":
        _since = _since or time.monotonic()
        _round = _round or Round()
        _tell("halted", begun=_begun)
    elif word == "after" and _round is not None:
        _round.target = facts["begun"]
        _round.known.set()
    elif word == "here":
        _since = _since or time.monotonic()
        _round = _round or Round()
        _round.known.set()
        if not (_round.armed or _round.over):
            _wake_main_thread(_round)
    elif word == "point":
        _tell("point", begun=_begun, line=facts["line"])
    else:
        return False
    return True


def _tell(word: str, **facts: object) -> None:
    if _say is not None:
        _say(word, **facts)


def _wake_main_thread(round_: Round) -> None:
    round_.here = True
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


# -------------------------------------------------------------------------- in the main thread


def _interrupted(number: int, frame: FrameType | None) -> None:
    """The handler of SIGINT."""
    global _since
    if os.getpid() != _process:
        _in_child(frame)
    elif _round is not None and _round.here and not _round.over:
        _round.here, _round.armed = False, True
        script, inside = script_frame(frame)
        if inside and script is not None:
            _at_next_line(frame)
        else:
            _take_effect(frame)
    elif not _since and _say is not None:
        _since = time.monotonic()
        _say("interrupt")
    elif _say is None or time.monotonic() - _since > TOGETHER:
        _call(frame)


def _in_child(frame: FrameType | None) -> None:
    """Of a process that was forked: the rank ends its loader's workers, as torch's rank does."""
    data = sys.modules.get("torch.utils.data")
    if data is None or data.get_worker_info() is None:
        _call(frame)


def _take_effect(frame: FrameType | None) -> None:
    assert _round is not None
    _round.over = True
    line = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
    _tell("taken", line=line)
    _call(frame)


def _call(frame: FrameType | None) -> None:
    if callable(_handler):
        _handler(signal.SIGINT, frame)
    elif _handler == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)


def _at_next_line(frame: FrameType | None) -> None:
    """Take effect when the script comes to its next line: what it has called goes on till then."""
    before = sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            sys.settrace(before)
            frame.f_trace = None
            _take_effect(frame)
            return None
        if event == "return":
            frame.f_trace = None
            follow(frame.f_back)
            return None
        return trace

    def follow(frame: FrameType | None) -> None:
        script, _ = script_frame(frame)
        if script is None:
            sys.settrace(before)
        else:
            script.f_trace = trace

    sys.settrace(lambda *_: None)
    follow(frame)


def script_frame(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """The innermost frame of the script, from which what must not stop half-way was called, and
    whether there is such a call. None where the script has not begun, or has ended."""
    stack = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    while stack and _is_in(stack[-1], (PACKAGE_FOLDER, "<frozen ")):
        stack.pop()  # what has begun the script
    script = None
    whole = _whole()
    through = tuple(f"{PACKAGE_FOLDER}{file}" for file in _LET_THROUGH)
    for inner in reversed(stack):
        if _is_in(inner, whole) and not _is_in(inner, through):
            return script, True
        script = inner
    return script, False


def _is_in(frame: FrameType, places: tuple[str, ...]) -> bool:
    return frame.f_code.co_filename.startswith(places)


def _whole() -> tuple[str, ...]:
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch is None:
        return (PACKAGE_FOLDER,)
    above = f"{Path(torch).parent}/"
    return (PACKAGE_FOLDER, *(f"{above}{place}" for place in (*_WHOLE, *_WHOLE_TOO)))


# ------------------------------------------------------------- for the table of unedited scripts


def set_handler(original: Callable[..., Any], number: int, handler: Any) -> Any:
    """For signal.signal: the script's handler of SIGINT is called at the same point on every
    rank."""
    global _handler
    main = threading.current_thread() is threading.main_thread()
    if number != signal.SIGINT or os.getpid() != _process or not main:
        return original(number, handler)
    before, _handler = _handler, handler
    return before


def get_handler(original: Callable[..., Any], number: int) -> Any:
    """For signal.getsignal."""
    handler = original(number)
    return _handler if handler is _interrupted else handler
