"""In the rank: a signal takes effect at the same point of the program on every rank.

A terminal or a launcher interrupts each rank at another time. If each raised KeyboardInterrupt at
once, one might have entered a collective that another never enters. So a rank that is interrupted
only reports it. The hub lets all ranks pause before their next collective, collects how many each
has entered, and chooses one that none has entered: the exception is raised at the script's next
line after that one. If no collective follows, the hub lets it be raised where the ranks are
(`interrupt_coordinator`).

The handler of an unedited script for another signal, which asks for a checkpoint, is called in the
same way: else one rank would leave after a step that another has ended before its signal came.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from instep.distributed.watchdog.messages import COMMON_SIGNALS
from instep.process import PACKAGE_FOLDER, in_main_thread
from instep.process.patching import Patch, PatchHandle

Send = Callable[..., None]
PAUSE_SECONDS = 10.0
"""For which a rank waits before a collective until the hub has chosen one."""
SAME_INTERRUPT_SECONDS = 0.5
"""Within which the signals from terminal and launcher are one Ctrl-C."""
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

_count = 0
"""The number of collectives of all ranks that this rank has entered."""
_send: Send | None = None
"""To the hub; None: interrupts take effect at once."""
_process = -1
_listener: Callable[[], bool] | None = None


class PendingInterrupt:
    """One signal, from the first report of it until it has taken effect on this rank."""

    def __init__(self) -> None:
        self.decided = threading.Event()
        """The hub has chosen the collective."""
        self.target = -1
        """The count of collectives after which it takes effect."""
        self.now = self.anywhere = False
        """It may take effect wherever the script of this rank is; inside of torch, too."""
        self.armed = self.over = False


class CommonSignal:
    """A signal that takes effect at the same point of the program on every rank."""

    def __init__(self, number: int, handler: Any) -> None:
        self.number = number
        self.handler = handler
        """What is called in the end: Python's handler, or the script's; None: it has none."""
        self.since = 0.0
        """The time when it came to this rank, or this rank learned that it came to another one; 0:
        not yet."""
        self.pending: PendingInterrupt | None = None
        self.is_own = False
        """Whether the script is about to send it to itself."""

    def call_handler(self, frame: FrameType | None) -> None:
        """Call the handler, if the rank's script is to know of the signal."""
        if _listener is not None and not _listener():
            return
        if callable(self.handler):
            self.handler(self.number, frame)
        elif self.handler == signal.SIG_DFL:
            signal.signal(self.number, signal.SIG_DFL)
            signal.raise_signal(self.number)

    def is_awaited(self) -> bool:
        """Whether it has come to a rank, and has not taken effect on this one."""
        return bool(self.since) and not (self.pending is not None and self.pending.over)

    def begin(self) -> None:
        """All ranks are about to choose a point."""
        if self.pending is None or (self.pending.over and self.number != signal.SIGINT):
            self.since = time.monotonic()
            self.pending = PendingInterrupt()
            _active.append(self)

    def take_effect(self, frame: FrameType | None) -> None:
        """Tell the hub, and call the handler."""
        assert self.pending is not None
        self.pending.over = True
        with suppress(ValueError):  # at the end of the script no other rank may know of it
            _active.remove(self)
        line = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
        _send_to_hub("interrupted", signal=self.number, line=line)
        self.call_handler(frame)

    def interrupt_main_thread(self) -> None:
        """Let it take effect where the main thread is. In another thread."""
        assert self.pending is not None
        self.pending.now = True
        if self.handler is None:
            self.take_effect(None)
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, self.number)


_ctrl_c = CommonSignal(signal.SIGINT, signal.default_int_handler)
_has_ctrl_c = False
"""Whether it comes to `_on_signal`."""
_signals: dict[int, CommonSignal] = {signal.SIGINT: _ctrl_c}
_active: list[CommonSignal] = []
"""Those that are pending and have not taken effect."""


def install(send: Send) -> None:
    """From now on signals take effect on this rank together with the others.

    Does nothing in other threads than the main one. An interrupt that is ignored stays so, as in a
    shell's background job.
    """
    global _send, _process, _has_ctrl_c
    if not in_main_thread() and os.getpid() != _process:
        return
    _send, _process = send, os.getpid()
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler) and handler is not _on_signal and in_main_thread():
        _ctrl_c.handler, _has_ctrl_c = handler, True
        signal.signal(signal.SIGINT, _on_signal)
        PatchHandle([Patch("multiprocessing.spawn", "get_preparation_data", _preparation_data)])


def disconnect() -> None:
    """The watcher has ended: an interrupt takes effect at once."""
    global _send
    _send = None
    for each in list(_signals.values()):
        if each.pending is not None:
            each.pending.decided.set()
        if each.number != signal.SIGINT and each.is_awaited():
            each.pending = each.pending or PendingInterrupt()
            each.interrupt_main_thread()


def set_listener(listener: Callable[[], bool]) -> None:
    """Call `listener()` before the handler of an interrupt, which is not called if it returns
    False."""
    global _listener
    _listener = listener


def count_collective() -> None:
    """This rank enters a collective of all ranks."""
    global _count
    _count += 1
    for each in list(_active) if _active else ():
        _pause(each)


def _pause(common: CommonSignal) -> None:
    pending = common.pending
    assert pending is not None
    pending.decided.wait(PAUSE_SECONDS)
    if 0 <= pending.target <= _count and not (pending.armed or pending.over):
        pending.armed = True
        if in_main_thread():
            _interrupt_at_next_line(sys._getframe(), common)
        else:
            common.interrupt_main_thread()


def end_of_script() -> None:
    """The script's last line has run: an interrupt that waits for a later one takes effect now."""
    if os.getpid() != _process:
        return
    for common in list(_signals.values()):
        if common.is_awaited():
            common.pending = common.pending or PendingInterrupt()
            common.take_effect(None)


# -------------------------------------------------------------------- messages from the hub


def handle_message(message_type: str, message: dict[str, Any]) -> None:
    """In the thread that listens. Other messages are ignored."""
    number = message.get("signal")
    if number not in COMMON_SIGNALS:
        return
    common = _signals.setdefault(number, CommonSignal(number, None))
    if message_type == "pause":
        common.begin()
        _send_to_hub("paused", signal=number, count=_count)
    elif message_type == "interrupt_at" and common.pending is not None:
        common.pending.target = message["count"]
        common.pending.decided.set()
    elif message_type == "interrupt_now":
        if common.pending is None:
            common.begin()
        _interrupt_now(common, anywhere=message["anywhere"])
    elif message_type == "get_progress":
        _send_to_hub("progress", signal=number, count=_count, line=message["line"])


def _interrupt_now(common: CommonSignal, *, anywhere: bool) -> None:
    assert common.pending is not None
    common.pending.anywhere = anywhere
    common.pending.decided.set()
    if not common.pending.over and (anywhere or not common.pending.armed):
        common.interrupt_main_thread()


def _send_to_hub(message_type: str, **fields: object) -> None:
    if _send is not None:
        _send(message_type, **fields)


# -------------------------------------------------------------------------- in the main thread


def _on_signal(number: int, frame: FrameType | None) -> None:
    """The handler of these signals."""
    common = _signals[number]
    pending = common.pending
    is_another = time.monotonic() - common.since > SAME_INTERRUPT_SECONDS
    if os.getpid() != _process:
        _on_signal_in_child(common, frame)
    elif common.is_own:
        common.is_own = False
        common.call_handler(frame)
    elif pending is not None and pending.now and not pending.over:
        pending.now, pending.armed = False, True
        script, inside = interrupt_frame(frame)
        if inside and script is not None and not pending.anywhere:
            _interrupt_at_next_line(frame, common)
        else:
            common.take_effect(frame)
    elif _send is None or (common.since and is_another and number == signal.SIGINT):
        common.call_handler(frame)  # the second Ctrl-C takes effect at once
    elif not common.since or (is_another and not common.is_awaited()):
        common.since = time.monotonic()
        _send("interrupt", signal=number)


def _preparation_data(original: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """For multiprocessing.spawn: what a child gets that is not forked from this process."""
    data = original(name)
    return data | {"instep_interrupts": _ChildHandler()} if os.getpid() == _process else data


class _ChildHandler:
    """Unpickling it installs the handler in a child that has not inherited it."""

    def __reduce__(self) -> tuple[object, ...]:
        return signal.signal, (signal.SIGINT, _on_signal)


def _on_signal_in_child(common: CommonSignal, frame: FrameType | None) -> None:
    """In a child process. Loader workers ignore Ctrl-C: the rank ends them, as torch does."""
    data = sys.modules.get("torch.utils.data")
    is_worker = data is not None and data.get_worker_info() is not None
    if not (is_worker and common.number == signal.SIGINT):
        common.call_handler(frame)


def is_from_signal(error: BaseException) -> bool:
    """Whether a signal's handler raised this exception, of which only this rank may know."""
    if isinstance(error, KeyboardInterrupt) and os.getpid() != _process:
        return True  # Python's own handler leaves no trace
    return any(map(is_of_handler, (frame for frame, _ in traceback.walk_tb(error.__traceback__))))


def is_of_handler(frame: FrameType) -> bool:
    """Whether this is the frame of a signal's handler."""
    handlers = [_on_signal, *map(signal.getsignal, signal.valid_signals())]
    return frame.f_code in [getattr(handler, "__code__", None) for handler in handlers]


def _interrupt_at_next_line(frame: FrameType | None, common: CommonSignal) -> None:
    """Interrupt at the script's next line: the call that it has made now returns first."""
    before = sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            sys.settrace(before)
            frame.f_trace = None
            if common.pending is not None and not common.pending.over:
                common.take_effect(frame)
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
    """signal.signal: the script's handlers of these signals are called at the same point on every
    rank."""
    is_script = os.getpid() == _process and in_main_thread()
    if not is_script or signalnum not in COMMON_SIGNALS or _is_own_handler(handler):
        return original(signalnum, handler)
    common = _signals.setdefault(signalnum, CommonSignal(signalnum, None))
    if signalnum == signal.SIGINT:
        if not _has_ctrl_c:
            return original(signalnum, handler)
        before, common.handler = common.handler, handler
        return before
    before = common.handler
    common.handler = handler if callable(handler) else None
    found = original(signalnum, handler if common.handler is None else _on_signal)
    return before if found is _on_signal else found


def _is_own_handler(handler: Any) -> bool:
    """Whether it is one of instep's, such as that of `instep.Checkpoint`, whose ranks agree by
    themselves."""
    module = getattr(handler, "__module__", None)
    return isinstance(module, str) and module.startswith("instep.")


def get_handler(original: Callable[..., Any], signalnum: int) -> Any:
    """signal.getsignal."""
    handler = original(signalnum)
    return _signals[signalnum].handler if handler is _on_signal else handler


def raise_signal(original: Callable[..., Any], signalnum: int) -> Any:
    """signal.raise_signal."""
    announce_own(signalnum)
    return original(signalnum)


def announce_own(number: int) -> None:
    """The script sends itself this signal at this point, on every rank."""
    common = _signals.get(number)
    is_script = in_main_thread() and os.getpid() == _process
    if common is not None and number != signal.SIGINT and is_script:
        common.is_own = get_handler(signal.getsignal, number) is common.handler is not None
