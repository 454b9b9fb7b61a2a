"""PyTorch's private names of torch.distributed: what a backend is called with and returns."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist


def is_fsdp_parameter(parameter: torch.Tensor) -> bool:
    """Whether FSDP keeps a part of it on each rank."""
    return hasattr(parameter, "_fsdp_flattened")


DDP_BEFORE_FORWARD = "_pre_forward"
"""The method that DistributedDataParallel.forward calls first, which is never compiled."""
_c10d = torch._C._distributed_c10d
AllgatherOptions = _c10d.AllgatherOptions
AllreduceCoalescedOptions = _c10d.AllreduceCoalescedOptions
AllreduceOptions = _c10d.AllreduceOptions
BarrierOptions = _c10d.BarrierOptions
BroadcastOptions = _c10d.BroadcastOptions
GatherOptions = _c10d.GatherOptions
ProcessGroup = _c10d.ProcessGroup
ReduceOptions = _c10d.ReduceOptions
ReduceScatterOptions = _c10d.ReduceScatterOptions
Reducer = _c10d.Reducer
ScatterOptions = _c10d.ScatterOptions
Work = _c10d.Work
dump_flight_record: Callable[[bool, bool, bool], bytes] | None = getattr(
    _c10d, "_dump_fr_trace", None
)
"""PyTorch's record of its last collectives; None in a build without it."""


_LOG_VARIABLE = "TORCH_CPP_LOG_LEVEL"
_ERRORS_ONLY = 2
_log_lock = threading.Lock()
_quiet_since: list[int] = []
"""The level before, once for each thread that is in `quiet_log`."""


def _log_level() -> ctypes.c_int | None:
    """The level of PyTorch's log in C++; None in a build without it, or where the user sets it."""
    if _LOG_VARIABLE not in os.environ:
        with suppress(OSError, ValueError):
            library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib/libc10.so"))
            return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    return None


_level = _log_level()


@contextmanager
def quiet_log() -> Iterator[None]:
    """PyTorch's C++ logs no warnings inside. A store whose process has ended logs 20 lines for each
    call, and raises DistNetworkError besides."""
    if _level is None:
        yield
        return
    with _log_lock:
        _quiet_since.append(_quiet_since[0] if _quiet_since else _level.value)
        _level.value = max(_quiet_since[0], _ERRORS_ONLY)
    try:
        yield
    finally:
        with _log_lock:
            before = _quiet_since.pop()
            if not _quiet_since:
                _level.value = before


def default_store() -> dist.Store:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def device_types(group: dist.ProcessGroup | None) -> list[str]:
    """The types of devices that a process group serves; None is the default one."""
    members = group or dist.group.WORLD
    assert members is not None
    return [device.type for device in members._device_types]


def process_groups() -> Iterable[dist.ProcessGroup]:
    """All process groups of this process."""
    groups: Iterable[dist.ProcessGroup] = dist.distributed_c10d._world.pg_map
    return groups


def has_backend(name: str) -> bool:
    """Whether a backend of this name, in capitals, was registered by someone."""
    return name in dist.Backend._plugins


def set_sequence_number(gloo: dist.ProcessGroupGloo) -> None:
    """Let a group count its collectives from 0. From 2.14 on it does by itself, and warns."""
    if torch.__version__ < "2.14":
        gloo._set_sequence_number_for_group()
