"""This rank's accelerator: its choice, and the checks that it is the rank's own."""

from __future__ import annotations

import os
import socket
import warnings

import torch
import torch.distributed as dist

from instep.distributed.errors import DeviceError
from instep.distributed.identity import cuda_visible_devices
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import join_check
from instep.errors import InstepWarning
from instep.process import settings
from instep.process.exit_status import format_ranks
from instep.process.procfs import read_environ


def take_device(world: World) -> torch.device:
    """This rank's own accelerator, made the current one before anything touches a device."""
    if str(settings.DEVICE) == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = max(torch.cuda.device_count(), 1)
    is_known = world.source != join_check.BY_THE_SCRIPT  # else not how many are on this host
    if is_known and 1 < count < world.local_size:
        raise DeviceError.not_enough(world.local_size, count)
    device = torch.device("cuda", world.local_rank % count)
    torch.cuda.set_device(device)
    if (warning := changed_devices_warning()) is not None:
        warnings.warn(warning, InstepWarning, stacklevel=4)
    return device


def changed_devices_warning() -> str | None:
    """A warning if CUDA, which is in use here, has read another CUDA_VISIBLE_DEVICES."""
    value = os.environ.get(cuda_visible_devices.VARIABLE)
    at_start = read_environ("self").get(cuda_visible_devices.VARIABLE)
    # torch.cuda.device_count() may count the variable's entries, and lets ask for no other device.
    known, shown = torch.cuda.device_count(), torch.accelerator.device_count()
    uuids = [
        str(torch.cuda.get_device_properties(k).uuid) if k < known else "…" for k in range(shown)
    ]
    return cuda_visible_devices.changed_after_init_warning(value, at_start, uuids)


def check_devices_differ(store: dist.Store, world: World, device: str) -> None:
    """Raise DeviceError on all ranks where two have one accelerator. Before NCCL sees it.

    A launcher may show each rank one GPU, and the same to two of them.
    """
    store.set(f"instep/device{world.rank}", f"{socket.gethostname()}, {device}")
    devices = store.multi_get([f"instep/device{rank}" for rank in range(world.size)])
    for name, ranks in group_ranks([str(each, "utf-8") for each in devices]).items():
        if len(ranks) > 1:
            raise DeviceError(
                f"{format_ranks(ranks)} share one GPU ({name}); each rank needs its own. "
                "Give every task one GPU, or start as many ranks as there are GPUs."
            )


def group_ranks(values: list[str]) -> dict[str, list[int]]:
    """The ranks that hold each value: the index of `values` is the rank."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return holders
