"""In the rank: Ctrl-C takes effect at the same point of the program on every rank.

A terminal or a launcher interrupts each rank at another time. If each raised KeyboardInterrupt at
once, one might have entered a collective that another never enters. So a rank that is interrupted
only reports it. The hub lets all ranks pause before their next collective, collects how many each
has entered, and chooses one that none has entered: the exception is raised at the script's next
line after that one. If no collective follows, the hub lets it be raised where the ranks are
(`interrupt_coordinator`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from instep.process import PACKAGE_FOLDER, in_main_thread
from instep.process.patching import Patch, PatchHandle

Send = Callable[..., None]
PAUSE_SECONDS = 10.0
"""For which a rank waits before a collective until the hub has chosen one."""
SAME_INTERRUPT_SECONDS = 0.5
"""Within which the signals from terminal and launcher are one Ctrl-C."""
_INTERRUPTIBLE = (
    "process/patching.py",
    "unedited/rank0_relay.py",
    "unedited/std_streams.py",
    "unedited/processes/children.py",
)
"""Modules of instep that wait for what the script waits for: input, a child process."""
_UNINTERRUPTIBLE = (
    *("nn/", "autograd/", "optim/", "utils/data/", "_dynamo/", "_tensor.py"),
    *("distributed/distributed_c10d.py", "distributed/c10d_logger.py"),
)
"""Modules of torch that run to their end: else some ranks would update some of the parameters."""

_count = 0
"""The number of collectives of all ranks that this rank has entered."""
_pending: PendingInterrupt | None = None
_send: Send | None = None
"""To the hub; None: interrupts take effect at once."""
_process = -1
_since = 0.0
"""The time when this rank was interrupted, or learned that another was; 0: not yet."""
_handler: Any = signal.default_int_handler
"""The handler that an interrupt calls in the end: Python's, or the script's."""
_listener: Callable[[], bool] | None = None


class PendingInterrupt:
    """One Ctrl-C, from the first report of it until it has taken effect on this rank."""

    def __init__(self) -> None:
        self.decided = threading.Event()
        """The hub has chosen the collective."""
        self.target = -1
        """The count of collectives after which it takes effect."""
        self.now = False
        """It may take effect wherever this rank is."""
        self.armed = self.over = False


def install(send: Send) -> None:
    """From now on this rank is interrupted together with the others.

    Does nothing in other threads than the main one, or where interrupts are ignored.
    """
    global _send, _process, _handler
    handler = signal.getsignal(signal.SIGINT)
    if handler is _on_sigint:
        _send = send
    elif callable(handler) and in_main_thread():
        _send, _process, _handler = send, os.getpid(), handler
        signal.signal(signal.SIGINT, _on_sigint)
        PatchHandle([Patch("multiprocessing.spawn", "get_preparation_data", _preparation_data)])


def disconnect() -> None:
    """The watcher has ended: an interrupt takes effect at once."""
    global _send
    _send = None
    if _pending is not None:
        _pending.decided.set()


def set_listener(listener: Callable[[], bool]) -> None:
    """Call `listener()` before the handler of an interrupt, which is not called if it returns
    False."""
    global _listener
    _listener = listener


def count_collective() -> None:
    """This rank enters a collective of all ranks."""
    global _count
    _count += 1
    if _pending is not None and not _pending.over:
        _pause(_pending)


def _pause(pending: PendingInterrupt) -> None:
    pending.decided.wait(PAUSE_SECONDS)
    if 0 <= pending.target <= _count and not pending.armed:
        pending.armed = True
        if in_main_thread():
            _interrupt_at_next_line(sys._getframe())
        else:
            _interrupt_main_thread(pending)


def end_of_script() -> None:
    """The script's last line has run: an interrupt that waits for a later one takes effect now."""
    global _pending
    if os.getpid() == _process and _since and not (_pending is not None and _pending.over):
        _pending = _pending or PendingInterrupt()
        _interrupt(None)


# -------------------------------------------------------------------- messages from the hub


def handle_message(message_type: str, message: dict[str, Any]) -> None:
    """In the thread that listens. Other messages are ignored."""
    global _pending, _since
    if message_type in ("pause", "interrupt_now"):
        _since = _since or time.monotonic()
        _pending = _pending or PendingInterrupt()
    if message_type == "pause":
        _send_to_hub("paused", count=_count)
    elif message_type == "interrupt_at" and _pending is not None:
        _pending.target = message["count"]
        _pending.decided.set()
    elif message_type == "interrupt_now" and _pending is not None:
        _pending.decided.set()
        if not (_pending.armed or _pending.over):
            _interrupt_main_thread(_pending)
    elif message_type == "get_progress":
        _send_to_hub("progress", count=_count, line=message["line"])


def _send_to_hub(message_type: str, **fields: object) -> None:
    if _send is not None:
        _send(message_type, **fields)


def _interrupt_main_thread(pending: PendingInterrupt) -> None:
    pending.now = True
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


# -------------------------------------------------------------------------- in the main thread


def _on_sigint(number: int, frame: FrameType | None) -> None:
    """The handler of SIGINT."""
    global _since
    if os.getpid() != _process:
        _on_sigint_in_child(frame)
    elif _pending is not None and _pending.now and not _pending.over:
        _pending.now, _pending.armed = False, True
        script, inside = interrupt_frame(frame)
        if inside and script is not None:
            _interrupt_at_next_line(frame)
        else:
            _interrupt(frame)
    elif not _since and _send is not None:
        _since = time.monotonic()
        _send("interrupt")
    elif _send is None or time.monotonic() - _since > SAME_INTERRUPT_SECONDS:
        _call_handler(frame)


def _preparation_data(original: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """For multiprocessing.spawn: what a child gets that is not forked from this process."""
    data = original(name)
    return data | {"instep_interrupts": _ChildHandler()} if os.getpid() == _process else data


class _ChildHandler:
    """Unpickling it installs the handler in a child that has not inherited it."""

    def __reduce__(self) -> tuple[object, ...]:
        return signal.signal, (signal.SIGINT, _on_sigint)


def _on_sigint_in_child(frame: FrameType | None) -> None:
    """In a child process. Loader workers ignore it: the rank ends them, as torch does."""
    data = sys.modules.get("torch.utils.data")
    if data is None or data.get_worker_info() is None:
        _call_handler(frame)


def _interrupt(frame: FrameType | None) -> None:
    assert _pending is not None
    _pending.over = True
    line = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
    _send_to_hub("interrupted", line=line)
    _call_handler(frame)


def _call_handler(frame: FrameType | None) -> None:
    if _listener is not None and not _listener():
        return
    if callable(_handler):
        _handler(signal.SIGINT, frame)
    elif _handler == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)


def is_from_signal(error: BaseException) -> bool:
    """Whether a signal's handler raised this exception, of which only this rank may know."""
    if isinstance(error, KeyboardInterrupt) and os.getpid() != _process:
        return True  # Python's own handler leaves no trace
    return any(map(is_of_handler, (frame for frame, _ in traceback.walk_tb(error.__traceback__))))


def is_of_handler(frame: FrameType) -> bool:
    """Whether this is the frame of a signal's handler."""
    handlers = [_on_sigint, *map(signal.getsignal, signal.valid_signals())]
    return frame.f_code in [getattr(handler, "__code__", None) for handler in handlers]


def _interrupt_at_next_line(frame: FrameType | None) -> None:
    """Interrupt at the script's next line: the call that it has made now returns first."""
    before = sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            sys.settrace(before)
            frame.f_trace = None
            _interrupt(frame)
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


# ---------------------------------------------------------------- patches of unedited scripts


def set_handler(original: Callable[..., Any], signalnum: int, handler: Any) -> Any:
    """signal.signal: the script's handler of SIGINT is called at the same point on every rank."""
    global _handler
    if signalnum != signal.SIGINT or os.getpid() != _process or not in_main_thread():
        return original(signalnum, handler)
    before, _handler = _handler, handler
    return before


def get_handler(original: Callable[..., Any], signalnum: int) -> Any:
    """signal.getsignal."""
    handler = original(signalnum)
    return _handler if handler is _on_sigint else handler
