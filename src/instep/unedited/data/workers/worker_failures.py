"""A loader's worker that was killed: its rank learns of it where it asks for the next batch.

torch raises an error wherever the main thread is when a worker ends. A script may catch it and go
on; then the other ranks, whose workers live, would be at another point of the script.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from instep.distributed.communication.transport import get_transport
from instep.process import in_main_thread
from instep.process.exit_status import describe_exit
from instep.process.patching import Function
from instep.process.torch_private.loaders import ended_loader_workers
from instep.unedited.errors import LostWorkerError


class _MainThread:
    """What the main thread does, and has missed."""

    is_loading = False
    """Whether it waits for a batch."""
    has_child_ended = False
    """Whether a child process has ended while it did something else."""


_main_thread = _MainThread()


def check_workers(original: Function) -> None:
    """For what torch calls in the main thread when a child process has ended: it raises an error
    if that was a worker which has failed."""
    if _main_thread.is_loading:
        original()
    else:
        _main_thread.has_child_ended = True


@contextmanager
def raising_here(batches: Any) -> Iterator[None]:
    """In here the main thread waits for a batch of torch's iterator, and gets the error."""
    before = _main_thread.is_loading
    try:
        if in_main_thread():
            _main_thread.is_loading = True
            if _main_thread.has_child_ended:
                _main_thread.has_child_ended = False
                if ended := ended_loader_workers(batches):
                    pid, code = ended[0]
                    raise RuntimeError(f"DataLoader worker (pid {pid}) {describe_exit(code)}")
        yield
    finally:
        _main_thread.is_loading = before


def check_is_known(error: BaseException, batches: Any) -> None:
    """Raise LostWorkerError if this rank alone got this error from torch's iterator, since one of
    its workers has ended."""
    transport = get_transport()
    if transport.size > 1 and (ended := ended_loader_workers(batches)):
        pid, code = ended[0]
        raise LostWorkerError(transport.rank, pid, describe_exit(code)) from error
