"""The order and the threads in which the collectives of a group run.

A blocking collective runs in its caller, unless asynchronous ones are still pending: then it queues
behind them. Asynchronous ones run on one thread of the group, in the order of issue.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.futures import Future

from instep.distributed.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    ForkedChildError,
    SharedMemoryError,
)
from instep.distributed.flight_record.recorder import enter, issued, leave, wait
from instep.distributed.shm.memory.flat import flatten, write_back
from instep.process.torch_private.compiler import skip_methods
from instep.process.torch_private.dispatch import profiler_enabled
from instep.process.torch_private.distributed import Work


@skip_methods
class CompletedWork(Work):
    """The Work of a collective that has succeeded."""

    def __init__(self, result: list[Tensor]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def result(self) -> list[Tensor]:
        """The tensors that it wrote."""
        return self._result

    def get_future(self) -> Future[list[Tensor]]:
        """A future that holds the tensors."""
        future: Future[list[Tensor]] = Future()
        future.set_result(self._result)
        return future


@skip_methods
class QueuedWork(Work):
    """The Work of a collective that the group's thread will run or is running."""

    def __init__(
        self,
        text: str,
        result: list[Tensor],
        run_until_done: Callable[[QueuedWork], None],
        number: int,
    ) -> None:
        """`number`: in the flight record."""
        super().__init__()
        self._text = text
        self._result = result
        self._run_until_done = run_until_done
        self._number = number
        self._error: BaseException | None = None
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._source: Future[BaseException | None] | None = None
        self._future: Future[list[Tensor]]

    def finish(self, error: BaseException | None, forget: Callable[[QueuedWork], None]) -> None:
        """Wake the waiters, run the callbacks of the future, then call `forget(self)`."""
        with self._lock:
            self._error = error
            source = self._source
            if source is None:
                forget(self)
            self._finished.set()
        if source is not None:
            source.set_result(error)
            forget(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True when it has succeeded. Raises its error, or CollectiveTimeoutError."""
        if not self._finished.is_set():
            wait(self._number)
        self._run_until_done(self)
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._finished.wait(seconds if seconds > 0 else None):
            raise CollectiveTimeoutError([], self._text, seconds)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, with success or an error."""
        return self._finished.is_set()

    def is_success(self) -> bool:
        """Whether it has ended with success."""
        return self._finished.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Its error, if it has ended with one."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that it writes."""
        return self._result

    def get_future(self) -> Future[list[Tensor]]:
        """A future of the tensors. C++ (DDP) waits on it and sees an error as RuntimeError."""
        with self._lock:
            if self._source is None:
                self._source = Future()
                self._future = self._source.then(self._result_of)
                if self._finished.is_set():
                    self._source.set_result(self._error)
            return self._future

    def _result_of(self, source: Future[BaseException | None]) -> list[Tensor]:
        error = source.value()
        if error is not None:
            raise error
        return self._result


T = TypeVar("T")
_NO_EVENT = nullcontext()
_CLOSE_SECONDS = 10.0
"""A collective that waits for its peers for longer is left to the group's timeout."""
_EXCHANGE_SECONDS = 1.0
"""The same where the process ends and the group was not destroyed."""
Step = Callable[[list[Tensor], list[Tensor], timedelta | None], None]
"""An exchange between the ranks: flat tensors that it writes, those that it only reads, timeout."""
Signature = tuple[str, tuple[int, ...] | None, torch.dtype | None, str, int | None, str]
"""The arguments of `flight_record.recorder.enter`."""


class Collective(NamedTuple):
    """One collective for a work queue."""

    step: Step
    written: Sequence[Tensor] = ()
    read: Sequence[Tensor] = ()
    timeout: timedelta | None = None
    signature: Signature | None = None
    """For the flight record."""


class WorkQueue:
    """Runs the collectives of one group, one at a time, in the order in which they were issued.

    A collective that a future's callback issues on the group's thread runs at once: after the
    collective of the callback and before the next, so the order is the same on every rank.

    After an error in an exchange the ranks are out of step for good: every later collective raises
    BrokenGroupError. An error before or after the exchange (a tensor that cannot be read or
    written) concerns this rank only, and the ranks stay in step.
    """

    def __init__(self, abort: Callable[[str], None], leave: Callable[[], None]) -> None:
        self._abort = abort
        self._leave = leave
        self._error: Exception | None = None
        self._running = threading.Lock()
        self._pending: set[QueuedWork] = set()
        self._queue: SimpleQueue[tuple[Collective, QueuedWork, int] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        _queues.add(self)

    def issue(
        self, collective: Collective, text: str, result: list[Tensor], is_async: bool
    ) -> Work:
        """Run `collective` now; queue it if others are queued, or if `is_async`, and return."""
        if is_async and threading.current_thread() is not self._thread:
            return self._enqueue(collective, text, result)
        self.run(collective, text, result)
        return CompletedWork(result)

    def run(self, collective: Collective, text: str, result: list[Tensor]) -> None:
        """Run `collective` now, or wait for it in the queue behind others."""
        if self._pending and threading.current_thread() is not self._thread:
            self._enqueue(collective, text, result).wait()
            return
        number = _enter(collective)
        try:
            with self._running, _event(text):
                self._run(collective)
        finally:
            leave(number)

    def call(self, exchange: Callable[[], T], signature: Signature) -> T:
        """As `run`, of an exchange without tensors, in less time; returns its result."""
        if self._pending and threading.current_thread() is not self._thread:
            results: list[T] = []
            collective = Collective(lambda *_: results.append(exchange()), signature=signature)
            self.run(collective, signature[0], [])
            return results[0]
        number = enter(*signature)
        try:
            with self._running, _event(signature[0]):
                return self._in_step(exchange)
        finally:
            leave(number)

    def close(self) -> None:
        """Leave the group after the queued collectives."""
        if isinstance(self._error, ForkedChildError):
            return
        if self._thread is None:
            self._leave()
        else:
            self._queue.put(None)
            self._thread.join(_CLOSE_SECONDS)
            self._thread = None

    def join_at_exit(self) -> None:
        """Wait for the thread's callbacks, but not for an exchange that waits for its peers."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_EXCHANGE_SECONDS)
            if not self._running.locked():
                self._thread.join(_CLOSE_SECONDS)
            self._thread = None

    def reset_after_fork(self) -> None:
        """In a forked child, which has no such thread and is no member of the group."""
        self._error = ForkedChildError()
        self._running = threading.Lock()
        self._pending = set()
        self._thread = None

    def _run(self, collective: Collective) -> None:
        written = list(map(flatten, collective.written))
        read = list(map(flatten, collective.read))
        self._in_step(collective.step, written, read, collective.timeout)
        for values, tensor in zip(written, collective.written, strict=True):
            write_back(values, tensor)

    def _in_step(self, exchange: Callable[..., T], *args: Any) -> T:
        """The result of an exchange; an error in it breaks the group."""
        if self._error is not None:
            raise self._error
        try:
            return exchange(*args)
        except SharedMemoryError:  # on all ranks alike: they are still in step
            raise
        except BaseException as error:
            cause = str(error) or type(error).__name__
            self._error = BrokenGroupError(
                f"an earlier collective of this process group failed: {cause} "
                "Destroy the group and make a new one, or end the job."
            )
            self._abort(cause)
            raise

    def _enqueue(self, collective: Collective, text: str, result: list[Tensor]) -> QueuedWork:
        if isinstance(self._error, ForkedChildError):
            raise self._error
        with _event(text):
            number = _enter(collective)
        issued(number)
        work = QueuedWork(text, result, self._run_until_done, number)
        self._pending.add(work)
        self._queue.put((collective, work, number))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="instep-shm", daemon=True)
            self._thread.start()
        return work

    def _run_until_done(self, work: QueuedWork) -> None:
        """Run the queue if a callback waits for `work`: it blocks the only thread that does."""
        if threading.current_thread() is self._thread:
            while not work.is_completed():
                self._serve_one()

    def _serve(self) -> None:
        while self._serve_one():
            pass
        self._leave()

    def _serve_one(self) -> bool:
        """Run the next collective and its callbacks, or return False when the group closes."""
        item = self._queue.get()
        if item is None:
            return False
        collective, work, number = item
        error: BaseException | None = None
        try:
            # Autograd may set requires_grad on an output of a functional collective meanwhile.
            with self._running, torch.no_grad():
                self._run(collective)
        except BaseException as raised:
            error = raised
        leave(number)
        work.finish(error, self._pending.discard)
        return True


def _event(text: str) -> AbstractContextManager[object]:
    """An event "instep:text" of torch.profiler, if one runs in this thread.

    It lasts as long as a blocking collective, and as long as the issue of an asynchronous one.
    """
    return record_function(f"instep:{text}") if profiler_enabled() else _NO_EVENT


def _enter(collective: Collective) -> int:
    """Its number in the flight record; -1 if it has no signature."""
    return enter(*collective.signature) if collective.signature is not None else -1


_queues: weakref.WeakSet[WorkQueue] = weakref.WeakSet()


def _reset_after_fork() -> None:
    for queue in _queues:
        queue.reset_after_fork()


os.register_at_fork(after_in_child=_reset_after_fork)


def _join_at_exit() -> None:
    # A thread that runs a callback of torch's C++ code when the interpreter ends aborts the process
    # ("terminate called without an active exception").
    for queue in list(_queues):
        queue.join_at_exit()


atexit.register(_join_at_exit)
