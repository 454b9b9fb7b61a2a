"""This rank's accelerator: its choice, and the checks that it is the rank's own."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

from instep.distributed.errors import BackendError, DeviceError
from instep.distributed.flight_record.script_line import warn_at_script_line
from instep.distributed.identity import accelerators, torch_devices
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import join_check
from instep.process import settings
from instep.process.exit_status import format_ranks, group_ranks
from instep.process.procfs import read_environ


def take_device(world: World) -> torch.device:
    """This rank's own accelerator, made the current one before anything touches a device.

    The CPU, with a warning, where ranks cannot share a job on this kind (MPS). Raises DeviceError,
    BackendError.
    """
    row = None if str(settings.DEVICE) == "cpu" else torch_devices.current_row()
    if row is None:
        return torch_devices.CPU
    if row.backend is None:
        warn_at_script_line(
            f"{world.size} ranks compute on the CPU: torch.distributed has no backend for "
            f"{row.name}. One rank uses the {row.title}. [INS705]"
        )
        return torch_devices.CPU
    count = max(torch.accelerator.device_count(), 1)
    is_known = world.source != join_check.BY_THE_SCRIPT  # else not how many are on this host
    if is_known and 1 < count < world.local_size:
        raise DeviceError.not_enough(world.local_size, count, row.title, row.variable())
    device = torch.device(row.name, world.local_rank % count)
    backend_of(device)
    torch_devices.set_index(device.index)
    if (warning := changed_devices_warning()) is not None:
        warn_at_script_line(f"{warning} [INS706]")
    return device


def backend_of(device: torch.device) -> str:
    """The backend of torch.distributed for this device. Raises BackendError if torch has none."""
    row = accelerators.row_of(device.type)
    name = dist.Backend.default_device_backend_map.get(device.type) or row.backend
    if name is None or not dist.is_backend_available(name):
        raise BackendError(
            f"torch {torch.__version__} has no backend {name!r} of torch.distributed, by which the "
            f"ranks would exchange tensors on {device.type}. Install the package that brings it, "
            "or set INSTEP_DEVICE=cpu."
        )
    return name


def changed_devices_warning() -> str | None:
    """A warning if the accelerator, which is in use here, was chosen by another value of its
    variable of visible devices."""
    row = torch_devices.current_row()
    variable = None if row is None else row.variable()
    value = None if variable is None else os.environ.get(variable)
    if variable is None or value is None:
        return None
    at_start = read_environ("self").get(variable)
    # torch.cuda.device_count() may count the variable's entries, and lets ask for no other device.
    known = torch.get_device_module().device_count()
    names = [
        (torch_devices.describe(k)[1] if k < known else "") or "…"
        for k in range(torch.accelerator.device_count())
    ]
    return accelerators.changed_after_init_warning(variable, value, at_start, names)


def device_name(device: torch.device) -> str:
    """What tells this device from the others of its host: its UUID, or its physical number."""
    row = torch_devices.current_row()
    variable = row.variable() if row else None
    _, uuid = torch_devices.describe(device.index)
    if uuid:
        return uuid
    visible = None if variable is None else os.environ.get(variable)
    physical = accelerators.physical_devices(device.index + 1, visible)
    return f"{device.type} {physical[device.index] if len(physical) > device.index else device}"


def check_devices_differ(store: dist.Store, world: World, device: str, title: str = "GPU") -> None:
    """Raise DeviceError on all ranks where two have one accelerator. Before its backend sees it.

    A launcher may show each rank one device, and the same to two of them. `title`: what one is
    called.
    """
    store.set(f"instep/device{world.rank}", f"{socket.gethostname()}, {device}")
    devices = store.multi_get([f"instep/device{rank}" for rank in range(world.size)])
    for name, ranks in group_ranks([str(each, "utf-8") for each in devices]).items():
        if len(ranks) > 1:
            raise DeviceError(
                f"{format_ranks(ranks)} share one {title} ({name}); each rank needs its own. "
                f"Give every task one {title}, or start as many ranks as there are {title}s."
            )
