"""What one rank reports about itself, its host and its job."""

from __future__ import annotations

import os
import platform
import socket
from typing import Any

import numpy
import torch
import torch.distributed as dist

from instep import version
from instep.distributed import interfaces
from instep.distributed.identity import accelerators, launchers, torch_devices
from instep.distributed.rendezvous import bootstrap, devices
from instep.process import settings, storage
from instep.process.torch_private import versions
from instep.training.normalization.cpu_kernels import cpu_kernels
from instep.unedited.files.compiled_code import landlock

Facts = dict[str, Any]
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_NO_LANDLOCK = (
    "this kernel, or this container, has no Landlock (Linux 5.13 and later): a library that writes "
    "files in compiled code and that instep does not know writes them once on each rank of an "
    "unedited script"
)
NETWORK_VARIABLES = (*interfaces.IFNAME_VARIABLES, "NCCL_DEBUG")


def describe_rank() -> Facts:
    """The part of the report that may differ by rank."""
    world = bootstrap.current()
    return {
        "rank": world.rank,
        "local_rank": world.local_rank,
        "host": socket.gethostname(),
        "node": world.node_rank,
        "pid": os.getpid(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "device": str(torch_devices.own_device()),
        "accelerators": _accelerators(),
        "backend": dist.get_backend() if dist.is_initialized() else "none",
        "interfaces": [name for _, name in socket.if_nameindex()],
        "versions": _versions(),
        "scratch": storage.describe_folder(storage.choose_folder(world.local_size)),
        "warnings": _warnings(),
    }


def describe_job() -> Facts:
    """The part of the report that should be the same on all ranks."""
    world = bootstrap.current()
    return {
        "launcher": world.source,
        "why": _launcher_variables(),
        "ranks": world.size,
        "hosts": world.nodes,
        "available": [name for name, there in _backends().items() if there],
        "set": {
            name: os.environ[name]
            for name in (
                *(knob.name for knob in settings.SETTINGS),
                *THREADS,
                *NETWORK_VARIABLES,
                *dict.fromkeys(name for row in accelerators.ACCELERATORS for name in row.variables),
            )
            if name in os.environ and name != settings.SECRET.name
        },
    }


def _launcher_variables() -> dict[str, str]:
    """The variables by which the launcher was recognised."""
    for row in launchers.LAUNCHERS:
        if row.matches({*os.environ}):
            names = (*row.markers, row.rank, row.size, row.local_rank, row.local_size)
            return {name: os.environ[name] for name in names if name and name in os.environ}
    return {}


def _accelerators() -> list[Facts]:
    row = torch_devices.current_row()
    if str(settings.DEVICE) == "cpu" or row is None:
        return []
    variable = row.variable()
    visible = None if variable is None else os.environ.get(variable)
    physical = accelerators.physical_devices(torch.accelerator.device_count(), visible)
    return [
        {"visible": k, "physical": name, "name": torch_devices.describe(k)[0]}
        for k, name in enumerate(physical)
    ]


def _backends() -> dict[str, bool]:
    row = torch_devices.current_row()
    own = row.backend if row is not None else None
    return {
        "gloo": dist.is_gloo_available(),
        **({own: dist.is_backend_available(own)} if own is not None else {}),
        "mpi": dist.is_mpi_available(),
        "instep": True,
    }


def _versions() -> dict[str, str]:
    return {
        "instep": version.__version__,
        "kernels": "of torch" if cpu_kernels() is None else "in C",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cuda": str(torch.version.cuda),
        **({"hip": str(torch.version.hip)} if torch.version.hip else {}),
        **({"xpu": str(torch.version.xpu)} if torch.version.xpu else {}),
        "linux": platform.release(),
    }


def _warnings() -> list[str]:
    late = devices.changed_devices_warning() if torch_devices.is_in_use() else None
    found = [*([late] if late else []), *([] if landlock.version() else [_NO_LANDLOCK])]
    if versions.is_newer_than_tried(torch.__version__):
        newest = ".".join(map(str, versions.TRIED[1]))
        found.append(f"PyTorch {torch.__version__} is newer than any that was tried ({newest})")
    return found
