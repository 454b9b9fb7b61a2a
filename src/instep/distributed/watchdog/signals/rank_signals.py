"""In the rank: the signals that take effect on it together with the other ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from instep.distributed.watchdog.messages import COMMON_SIGNALS
from instep.distributed.watchdog.signals.interrupt_frames import (
    call_at_next_line,
    interrupt_frame,
)
from instep.process import in_main_thread
from instep.process.patching import Patch, PatchHandle

Send = Callable[..., None]
PAUSE_SECONDS = 10.0
"""For which a rank waits before a collective until the hub has chosen one."""
SAME_INTERRUPT_SECONDS = 0.5
"""Within which the signals from terminal and launcher are one Ctrl-C."""


class PendingSignal:
    """One signal, from the first report of it until it has taken effect on this rank."""

    def __init__(self) -> None:
        self.decided = threading.Event()
        """The hub has chosen the collective."""
        self.target = -1
        """The count of collectives after which it takes effect."""
        self.now = self.anywhere = False
        """It may take effect wherever the script of this rank is; inside of torch, too."""
        self.armed = self.over = False
        """It takes effect at the script's next line; it has taken effect."""


class CommonSignal:
    """A signal that takes effect at the same point of the program on every rank."""

    def __init__(self, rank: RankSignals, number: int, handler: Any = None) -> None:
        self._rank = rank
        self.number = number
        self.handler = handler
        """What is called in the end: Python's handler, or the script's; None: it has none."""
        self.since = 0.0
        """The time when it came to this rank, or this rank learned that it came to another one; 0:
        not yet."""
        self.pending: PendingSignal | None = None
        self.is_own = False
        """Whether the script is about to send it to itself."""

    def call_handler(self, frame: FrameType | None) -> None:
        """Call the handler, if the rank's script is to know of the signal."""
        if self._rank.listener is not None and not self._rank.listener():
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
            self.pending = PendingSignal()
            self._rank.active.append(self)

    def pause(self) -> None:
        """Before a collective: wait until the hub has chosen one, and prepare to be interrupted
        after it if it is this one."""
        pending = self.pending
        assert pending is not None
        pending.decided.wait(PAUSE_SECONDS)
        if 0 <= pending.target <= self._rank.count and not (pending.armed or pending.over):
            pending.armed = True
            if in_main_thread():
                call_at_next_line(sys._getframe(), self.take_effect_once)
            else:
                self.interrupt_main_thread()

    def take_effect_once(self, frame: FrameType) -> None:
        """As `take_effect`, unless it has done so meanwhile."""
        if self.pending is not None and not self.pending.over:
            self.take_effect(frame)

    def take_effect(self, frame: FrameType | None) -> None:
        """Tell the hub, and call the handler."""
        assert self.pending is not None
        self.pending.over = True
        with suppress(ValueError):  # at the end of the script no other rank may know of it
            self._rank.active.remove(self)
        line = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
        self._rank.send_to_hub("interrupted", signal=self.number, line=line)
        self.call_handler(frame)

    def take_effect_now(self, *, anywhere: bool) -> None:
        """The hub lets it take effect where the ranks are; `anywhere`: inside of torch, too."""
        assert self.pending is not None
        self.pending.anywhere = anywhere
        self.pending.decided.set()
        if not self.pending.over and (anywhere or not self.pending.armed):
            self.interrupt_main_thread()

    def interrupt_main_thread(self) -> None:
        """Let it take effect where the main thread is. In another thread."""
        assert self.pending is not None
        self.pending.now = True
        if self.handler is None:
            self.take_effect(None)
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, self.number)

    # ------------------------------------------------------------------- in the main thread

    def receive(self, frame: FrameType | None) -> None:
        """Handle the signal, which has come to this process."""
        pending = self.pending
        is_another = time.monotonic() - self.since > SAME_INTERRUPT_SECONDS
        if not self._rank.is_this_process():
            self._receive_in_child(frame)
        elif self.is_own:
            self.is_own = False
            self.call_handler(frame)
        elif pending is not None and pending.now and not pending.over:
            pending.now, pending.armed = False, True
            script, inside = interrupt_frame(frame)
            if inside and script is not None and not pending.anywhere:
                call_at_next_line(frame, self.take_effect_once)
            else:
                self.take_effect(frame)
        elif self._rank.send is None or (
            self.since and is_another and self.number == signal.SIGINT
        ):
            self.call_handler(frame)  # the second Ctrl-C takes effect at once
        elif not self.since or (is_another and not self.is_awaited()):
            self.since = time.monotonic()
            self._rank.send("interrupt", signal=self.number)

    def _receive_in_child(self, frame: FrameType | None) -> None:
        """In a child process. Loader workers ignore Ctrl-C: the rank ends them, as torch does."""
        data = sys.modules.get("torch.utils.data")
        is_worker = data is not None and data.get_worker_info() is not None
        if not (is_worker and self.number == signal.SIGINT):
            self.call_handler(frame)


class RankSignals:
    """The signals of this process, if it is a rank of a job."""

    def __init__(self) -> None:
        self.process = -1
        """The id of the process that is the rank; its children have it, too."""
        self.send: Send | None = None
        """To the hub; None: signals take effect at once."""
        self.listener: Callable[[], bool] | None = None
        """Called before the handler of a signal, which is not called if it returns False."""
        self.count = 0
        """The number of collectives of all ranks that this rank has entered."""
        self.active: list[CommonSignal] = []
        """Those that are pending and have not taken effect."""
        self.has_ctrl_c = False
        """Whether SIGINT comes to `on_signal`."""
        ctrl_c = CommonSignal(self, signal.SIGINT, signal.default_int_handler)
        self._by_number: dict[int, CommonSignal] = {signal.SIGINT: ctrl_c}

    def find(self, number: int) -> CommonSignal:
        """The signal of this number."""
        found = self._by_number.get(number)
        if found is None:
            found = self._by_number[number] = CommonSignal(self, number)
        return found

    def is_this_process(self) -> bool:
        """Whether this process is the rank, and not a child of it."""
        return os.getpid() == self.process

    def is_main_thread_of_rank(self) -> bool:
        """Whether this is the thread of the rank in which handlers are called."""
        return self.is_this_process() and in_main_thread()

    def install(self, send: Send) -> None:
        """From now on signals take effect on this rank together with the others.

        Does nothing in other threads than the main one. An interrupt that is ignored stays so, as
        in a shell's background job.
        """
        if not in_main_thread() and not self.is_this_process():
            return
        self.send, self.process = send, os.getpid()
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and handler is not on_signal and in_main_thread():
            self.find(signal.SIGINT).handler, self.has_ctrl_c = handler, True
            signal.signal(signal.SIGINT, on_signal)
            PatchHandle([Patch("multiprocessing.spawn", "get_preparation_data", _preparation_data)])

    def disconnect(self) -> None:
        """The watcher has ended: a signal takes effect at once."""
        self.send = None
        for each in list(self._by_number.values()):
            if each.pending is not None:
                each.pending.decided.set()
            if each.number != signal.SIGINT and each.is_awaited():
                each.pending = each.pending or PendingSignal()
                each.interrupt_main_thread()

    def count_collective(self) -> None:
        """This rank enters a collective of all ranks."""
        self.count += 1
        for each in list(self.active) if self.active else ():
            each.pause()

    def end_of_script(self) -> None:
        """The script's last line has run: a signal that waits for a later one takes effect now."""
        if not self.is_this_process():
            return
        for common in list(self._by_number.values()):
            if common.is_awaited():
                common.pending = common.pending or PendingSignal()
                common.take_effect(None)

    def handle_message(self, message_type: str, message: dict[str, Any]) -> None:
        """Handle a message of the hub, in the thread that listens. Other messages are ignored."""
        number = message.get("signal")
        if number not in COMMON_SIGNALS:
            return
        common = self.find(number)
        if message_type == "pause":
            common.begin()
            self.send_to_hub("paused", signal=number, count=self.count)
        elif message_type == "interrupt_at" and common.pending is not None:
            common.pending.target = message["count"]
            common.pending.decided.set()
        elif message_type == "interrupt_now":
            if common.pending is None:
                common.begin()
            common.take_effect_now(anywhere=message["anywhere"])
        elif message_type == "get_progress":
            line = message["line"]
            self.send_to_hub("progress", signal=number, count=self.count, line=line)

    def send_to_hub(self, message_type: str, **fields: object) -> None:
        """Send a message, if there is a hub."""
        if self.send is not None:
            self.send(message_type, **fields)


rank_signals = RankSignals()


def on_signal(number: int, frame: FrameType | None) -> None:
    """The handler of these signals."""
    rank_signals.find(number).receive(frame)


def _preparation_data(original: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """For multiprocessing.spawn: what a child gets that is not forked from this process."""
    data = original(name)
    return data | {"instep_signals": _ChildHandler()} if rank_signals.is_this_process() else data


class _ChildHandler:
    """Unpickling it installs the handler in a child that has not inherited it."""

    def __reduce__(self) -> tuple[object, ...]:
        return signal.signal, (signal.SIGINT, on_signal)


def is_from_signal(error: BaseException) -> bool:
    """Whether a signal's handler raised this exception, of which only this rank may know."""
    if isinstance(error, KeyboardInterrupt) and not rank_signals.is_this_process():
        return True  # Python's own handler leaves no trace
    return any(map(is_of_handler, (frame for frame, _ in traceback.walk_tb(error.__traceback__))))


def is_of_handler(frame: FrameType) -> bool:
    """Whether this is the frame of a signal's handler."""
    handlers = [on_signal, *map(signal.getsignal, signal.valid_signals())]
    return frame.f_code in [getattr(handler, "__code__", None) for handler in handlers]
