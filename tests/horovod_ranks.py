"""What tests of Horovod's interface share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import instep.compat.horovod as hvd
from instep.training import blocks


@contextmanager
def initialized() -> Iterator[None]:
    """Between init() and shutdown(), both at the same time on all ranks."""
    blocks._latest = None  # what an earlier test's loop has left
    hvd.init()
    yield
    hvd.barrier()
    hvd.shutdown()
