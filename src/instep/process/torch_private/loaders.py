"""PyTorch's private names of DataLoader and its worker processes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import torch
import torch.utils.data._utils.pin_memory
import torch.utils.data._utils.signal_handling
import torch.utils.data.dataloader

Function = Callable[..., Any]

pin_memory: Function = torch.utils.data._utils.pin_memory.pin_memory
"""What a DataLoader does with a batch for pin_memory=True."""
DataLoaderIterator = torch.utils.data.dataloader._BaseDataLoaderIter
"""The base of a DataLoader's iterators."""


def end_loader_workers() -> None:
    """End the worker processes of all loaders that this process iterates over."""
    kind = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    for found in gc.get_objects():
        if isinstance(found, kind):
            found._shutdown_workers()


loader_signals = torch.utils.data._utils.signal_handling
"""Its `_error_if_any_worker_fails` is called when a child process has ended."""
_REAP_SECONDS = 1.0


def ended_loader_workers(iterator: Any) -> list[tuple[int, int]]:
    """The process ids and exit codes (-n for signal n) of workers of this iterator of a loader that
    have failed; none of one without workers."""
    workers = getattr(iterator, "_workers", ())
    closed = connection.wait([worker.sentinel for worker in workers], 0)
    for worker in workers:
        if worker.sentinel in closed:
            worker.join(_REAP_SECONDS)  # its end can be seen a moment before its exit code
    return [(worker.pid, worker.exitcode) for worker in workers if worker.exitcode]
