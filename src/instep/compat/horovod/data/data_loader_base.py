"""BaseDataLoader and AsyncDataLoaderMixin: a class derived from both reads ahead in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

_END = object()
"""What the thread puts behind its last batch."""


class BaseDataLoader:
    """A loader of batches; a subclass has `__len__` and `_iterate`."""

    def __len__(self) -> int:
        """The number of batches."""
        raise NotImplementedError(f"{type(self).__name__} has no __len__.")

    def _iterate(self) -> Iterator[Any]:
        """The batches of one epoch."""
        raise NotImplementedError(f"{type(self).__name__} has no _iterate.")

    def _process_batch(self, batch: Any) -> Any:
        """What the script gets in place of a batch."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        return map(self._process_batch, self._iterate())


class AsyncDataLoaderMixin:
    """Reads batches ahead in a thread, into the next epoch too; comes before the loader's class.

        class Loader(AsyncDataLoaderMixin, BaseDataLoader): ...

    As in Horovod an iteration that stops early is continued by the next one. What `_iterate` raises
    is raised in the script, and ends the reading.
    """

    _iterate: Any
    _process_batch: Any

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """`async_loader_queue_size`: the batches that are read ahead at most; 0 for no thread.
        `debug_data_loader` has no effect. The rest is the loader's."""
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        super().__init__(*args, **kwargs)
        self.started = False
        if async_loader_queue_size > 0:
            self.finished_event = threading.Event()
            self.queue: queue.Queue[Any] = queue.Queue(async_loader_queue_size)
            self.thread = threading.Thread(target=self._async_worker, daemon=True)

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from map(self._process_batch, self._iterate())
            return
        if not self.started:
            self.started = True
            self.thread.start()
        while (batch := self.queue.get()) is not None:
            if batch is _END:
                self.queue.put(_END)  # for the next iteration
                return
            if isinstance(batch, Exception):
                raise batch
            yield self._process_batch(batch)

    def close_async_loader(self) -> None:
        """End the thread, and drop what it has read."""
        if not self.started or self.async_loader_queue_size <= 0:
            return
        self.finished_event.set()
        while self.queue.get() is not _END:
            pass
        self.thread.join()
        self.queue.put(_END)

    def _async_worker(self) -> None:
        try:
            while not self.finished_event.is_set():
                for batch in self._iterate():
                    self.queue.put(batch)
                    if self.finished_event.is_set():
                        break
                self.queue.put(None)
        except Exception as error:  # of the script's `_iterate`; raised in its loop
            self.queue.put(error)
        finally:
            self.queue.put(_END)
