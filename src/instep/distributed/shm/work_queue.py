"""In which order and on which thread the collectives of a group run.

A blocking collective runs in its caller, unless asynchronous ones are still on their way: then it
queues behind them. Asynchronous ones run on one thread of the group, in the order of issue.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from instep.distributed.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    ForkedChildError,
    SharedMemoryError,
)
from instep.distributed.shm.memory.flat import flat, write_back
from instep.process.torch_compile import skip_methods


@skip_methods
class Done(Work):
    """A collective that has succeeded."""

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
class Pending(Work):
    """A collective on its way; it becomes a success or an error on the group's thread."""

    def __init__(self, text: str, result: list[Tensor], help_along: Callable[[Pending], None]):
        super().__init__()
        self._text = text
        self._result = result
        self._help_along = help_along
        self._error: BaseException | None = None
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._source: Future[BaseException | None] | None = None
        self._future: Future[list[Tensor]]

    def finish(self, error: BaseException | None, forget: Callable[[Pending], None]) -> None:
        """Wake whoever waits, run the callbacks of its future, `forget` it when they have ended."""
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
        self._help_along(self)
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._finished.wait(seconds if seconds > 0 else None):
            raise CollectiveTimeoutError([], self._text, seconds)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self._finished.is_set()

    def is_success(self) -> bool:
        """Whether it is over and well."""
        return self._finished.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Its error, if it is over and not well."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that it writes."""
        return self._result

    def get_future(self) -> Future[list[Tensor]]:
        """A future of the tensors. C++ (DDP) waits on it and sees an error as RuntimeError."""
        with self._lock:
            if self._source is None:
                self._source = Future()
                self._future = self._source.then(self._outcome)
                if self._finished.is_set():
                    self._source.set_result(self._error)
            return self._future

    def _outcome(self, source: Future[BaseException | None]) -> list[Tensor]:
        error = source.value()
        if error is not None:
            raise error
        return self._result


_CLOSE_SECONDS = 10.0  # a job that still waits for its peers then is left to the group's timeout
Step = Callable[[list[Tensor], list[Tensor], timedelta | None], None]
"""An exchange between the ranks: flat tensors that it writes, those that it only reads, a limit."""


class Job(NamedTuple):
    """A collective as a group's thread finds it."""

    step: Step
    written: Sequence[Tensor] = ()
    read: Sequence[Tensor] = ()
    timeout: timedelta | None = None


class IssueOrder:
    """Runs the jobs of one group, one at a time, in the order in which they were issued.

    What a callback of a future issues, on the group's thread, runs at once: after the collective
    that the callback belongs to and before the next, so the order is the same on every rank.

    After an error in an exchange the ranks are out of step for good: every later job raises
    BrokenGroupError. An error before or after it (a tensor that cannot be read, or written) is this
    rank's own, and leaves them in step.
    """

    def __init__(self, tell: Callable[[str], None], leave: Callable[[], None]) -> None:
        self._tell = tell
        self._leave = leave
        self._obstacle: Exception | None = None
        self._running = threading.Lock()
        self._pending: set[Pending] = set()
        self._queue: SimpleQueue[tuple[Job, Pending] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        _living.add(self)

    def issue(self, job: Job, text: str, result: list[Tensor], is_async: bool) -> Work:
        """Run `job` now, or queue it if `is_async` (then return at once) or others are queued."""
        if is_async and threading.current_thread() is not self._thread:
            return self._enqueue(job, text, result)
        self.run(job, text, result)
        return Done(result)

    def run(self, job: Job, text: str, result: list[Tensor]) -> None:
        """Run `job` now, or wait for it in the queue behind others."""
        if self._pending and threading.current_thread() is not self._thread:
            self._enqueue(job, text, result).wait()
            return
        with self._running:
            self._run(job)

    def close(self) -> None:
        """Leave the group after the jobs that are queued, which may take a moment."""
        if isinstance(self._obstacle, ForkedChildError):
            return
        if self._thread is None:
            self._leave()
        else:
            self._queue.put(None)
            self._thread.join(_CLOSE_SECONDS)
            self._thread = None

    def forget(self) -> None:
        """In a forked child: it has neither the thread nor a part in the group."""
        self._obstacle = ForkedChildError()
        self._running = threading.Lock()
        self._pending = set()
        self._thread = None

    def _run(self, job: Job) -> None:
        if self._obstacle is not None:
            raise self._obstacle
        written = [flat(tensor) for tensor in job.written]
        read = [flat(tensor) for tensor in job.read]
        try:
            job.step(written, read, job.timeout)
        except SharedMemoryError:  # on all ranks alike: they are still in step
            raise
        except BaseException as error:
            self._obstacle = BrokenGroupError(str(error) or type(error).__name__)
            self._tell(str(error) or type(error).__name__)
            raise
        for values, tensor in zip(written, job.written, strict=True):
            write_back(values, tensor)

    def _enqueue(self, job: Job, text: str, result: list[Tensor]) -> Pending:
        if isinstance(self._obstacle, ForkedChildError):
            raise self._obstacle
        work = Pending(text, result, self._help_along)
        self._pending.add(work)
        self._queue.put((job, work))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="instep-shm", daemon=True)
            self._thread.start()
        return work

    def _help_along(self, work: Pending) -> None:
        """A callback waits for `work`: only the thread that it keeps can run it."""
        if threading.current_thread() is self._thread:
            while not work.is_completed():
                self._serve_one()

    def _serve(self) -> None:
        while self._serve_one():
            pass
        self._leave()

    def _serve_one(self) -> bool:
        """Run the next job and its callbacks, or return False where the group closes."""
        item = self._queue.get()
        if item is None:
            return False
        job, work = item
        error: BaseException | None = None
        try:
            # Autograd may mark an output, of a functional collective, while this runs.
            with self._running, torch.no_grad():
                self._run(job)
        except BaseException as raised:
            error = raised
        work.finish(error, self._pending.discard)
        return True


_living: weakref.WeakSet[IssueOrder] = weakref.WeakSet()


def _forget_groups() -> None:
    for order in _living:
        order.forget()


os.register_at_fork(after_in_child=_forget_groups)
