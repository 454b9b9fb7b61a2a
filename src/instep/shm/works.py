"""In which order and on which thread the collectives of a group run.

A blocking collective runs in its caller, unless asynchronous ones are still on their way: then it
queues behind them. Asynchronous ones run on one thread of the group, in the order of issue.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue

from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from instep.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    ForkedChildError,
    SharedMemoryError,
)


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


class Pending(Work):
    """A collective on its way; it becomes a success or an error on the group's thread."""

    def __init__(self, text: str, result: list[Tensor]) -> None:
        super().__init__()
        self._text = text
        self._result = result
        self._error: BaseException | None = None
        self._finished = threading.Event()
        self._source: Future[BaseException | None] = Future()
        self._future = self._source.then(self._outcome)

    def finish(self, error: BaseException | None) -> None:
        """Wake whoever waits."""
        self._error = error
        self._source.set_result(error)
        self._finished.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True when it has succeeded. Raises its error, or CollectiveTimeoutError."""
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
        return self._future

    def _outcome(self, source: Future[BaseException | None]) -> list[Tensor]:
        error = source.value()
        if error is not None:
            raise error
        return self._result


_CLOSE_SECONDS = 10.0  # a job that still waits for its peers then is left to the group's timeout
Job = Callable[[], None]


class IssueOrder:
    """Runs the jobs of one group, one at a time, in the order in which they were issued.

    After an error the ranks are out of step for good: every later job raises BrokenGroupError.
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
        if is_async:
            return self._enqueue(job, text, result)
        self.run(job, text, result)
        return Done(result)

    def run(self, job: Job, text: str, result: list[Tensor]) -> None:
        """Run `job` now, or wait for it in the queue behind others."""
        if self._pending:
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
        try:
            job()
        except SharedMemoryError:  # on all ranks alike: they are still in step
            raise
        except BaseException as error:
            self._obstacle = BrokenGroupError(str(error) or type(error).__name__)
            self._tell(str(error) or type(error).__name__)
            raise

    def _enqueue(self, job: Job, text: str, result: list[Tensor]) -> Pending:
        if isinstance(self._obstacle, ForkedChildError):
            raise self._obstacle
        work = Pending(text, result)
        self._pending.add(work)
        self._queue.put((job, work))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="instep-shm", daemon=True)
            self._thread.start()
        return work

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            job, work = item
            error: BaseException | None = None
            try:
                with self._running:
                    self._run(job)
            except BaseException as raised:
                error = raised
            self._pending.discard(work)
            work.finish(error)
            del item, job, work, error
        self._leave()


_living: weakref.WeakSet[IssueOrder] = weakref.WeakSet()


def _forget_groups() -> None:
    for order in _living:
        order.forget()


os.register_at_fork(after_in_child=_forget_groups)
