"""What tests of Horovod's interface share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import instep.compat.horovod as hvd


@contextmanager
def initialized() -> Iterator[None]:
    """Between init() and shutdown(), both at the same time on all ranks."""
    hvd.init()
    yield
    hvd.barrier()
    hvd.shutdown()
