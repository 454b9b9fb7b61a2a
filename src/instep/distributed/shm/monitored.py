"""dist.monitored_barrier for groups of this backend: PyTorch asks for "gloo" by name."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from instep.distributed.shm.over_gloo import ProcessGroupOverGloo
from instep.process.patching import Patch, PatchHandle


def install() -> None:
    """Let PyTorch's function take groups of this backend, too. May be called twice."""
    PatchHandle(
        Patch(module, "monitored_barrier", _monitored_barrier, compile="break")
        for module in (dist, distributed_c10d)
    )


def _monitored_barrier(
    original: Any,
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, ProcessGroupOverGloo):
        original(group, timeout, wait_all_ranks)
        return
    if isinstance(timeout, int | float):
        timeout = timedelta(seconds=timeout)
    chosen.monitored_barrier(timeout, wait_all_ranks)
