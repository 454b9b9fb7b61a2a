"""Masks the launcher's environment variables and other ranks' devices from the script.

Besides `launch/` this is the only module that writes to the environment. It can restore what it
masks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from instep.distributed.errors import DeviceError
from instep.distributed.identity import launchers
from instep.distributed.identity.world import World
from instep.process import settings

_DEVICES = "CUDA_VISIBLE_DEVICES"

masked: dict[str, str] = {}
"""The launcher's variables, while they are masked."""


def mask() -> None:
    """Remove the launcher's variables from the environment of this process and its children.

    The job's name stays, because `instep run` finds by it what the script leaves behind.
    """
    for name in [*os.environ]:
        if launchers.is_launcher_variable(name):
            masked[name] = os.environ.pop(name)


def restore() -> None:
    """Restore what is masked, but for the rendezvous socket, which does not exist any more."""
    masked.pop(launchers.STORE_FD, None)
    os.environ.update(masked)
    masked.clear()


def set_visible_device(world: World) -> None:
    """Let `cuda` and `cuda:0` mean this rank's own GPU. Must be called before CUDA starts.

    Raises DeviceError if this host has fewer GPUs than ranks.
    """
    if str(settings.DEVICE) == "cpu":
        os.environ[_DEVICES] = ""
        return
    device = own_device(visible_devices(os.environ, device_files()), world)
    if device is not None:
        os.environ[_DEVICES] = device


def visible_devices(environ: Mapping[str, str], files: Iterable[str]) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them (pure)."""
    if _DEVICES in environ:
        return [name for name in environ[_DEVICES].split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number, _ in enumerate(files)]


def own_device(visible: list[str], world: World) -> str | None:
    """The GPU of this rank; None if CUDA_VISIBLE_DEVICES is right as it is (pure)."""
    if world.size == 1 or len(visible) < 2:
        return None
    if len(visible) < world.local_size:
        raise DeviceError.not_enough(world.local_size, len(visible))
    return visible[world.local_rank]


def device_files() -> list[str]:
    """The names of the device files of this host's NVIDIA GPUs."""
    return [path.name for path in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", path.name)]
