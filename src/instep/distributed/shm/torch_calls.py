"""Two functions of PyTorch that work with its own backends only, patched for groups of this one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from instep.distributed.shm.over_gloo import ProcessGroupOverGloo
from instep.process.patching import Patch, PatchHandle, patches
from instep.process.torch_private.distributed import Reducer, Work


def install() -> None:
    """Install the patches. May be called twice."""
    PatchHandle(
        [
            *patches(
                "dist.monitored_barrier refuses groups that are not named gloo.",
                (dist, "monitored_barrier", _monitored_barrier),
                (distributed_c10d, "monitored_barrier", _monitored_barrier),
                compile="break",
            ),
            Patch(
                Reducer,
                "_set_forward_pass_work_handle",
                _set_forward_pass_work,
                "DDP.join keeps the C++ half of a Work, and not the Python half, which it needs.",
            ),
        ]
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


_works: WeakKeyDictionary[Reducer, Work] = WeakKeyDictionary()
"""The Work that each DDP model waits for in its next backward."""


def _set_forward_pass_work(original: Any, reducer: Reducer, work: Work, *args: Any) -> None:
    _works[reducer] = work
    original(reducer, work, *args)
