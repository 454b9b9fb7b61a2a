"""What a rank's environment says about ranks and devices, out of the script's sight.

The one place besides `launch/` that writes to the environment: what it hides, it can put back.
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

hidden: dict[str, str] = {}
"""The launcher's variables, while they are hidden."""


def hide() -> None:
    """Take what launchers say out of this process's environment, and so out of its children's.

    The name of the job stays: by it `instep run` finds what the script leaves behind.
    """
    for name in [*os.environ]:
        if launchers.says_who(name):
            hidden[name] = os.environ.pop(name)


def show() -> None:
    """Put it back. The socket to meet at is not there any more."""
    hidden.pop(launchers.STORE_FD, None)
    os.environ.update(hidden)
    hidden.clear()


def narrow(world: World) -> None:
    """Let `cuda` and `cuda:0` mean this rank's own GPU. Call it before CUDA starts.

    Raises DeviceError where the ranks of this host have too few.
    """
    if str(settings.DEVICE) == "cpu":
        os.environ[_DEVICES] = ""
        return
    device = own_device(visible_devices(os.environ, _device_files()), world)
    if device is not None:
        os.environ[_DEVICES] = device


def visible_devices(environ: Mapping[str, str], files: Iterable[str]) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them (pure)."""
    if _DEVICES in environ:
        return [name for name in environ[_DEVICES].split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number, _ in enumerate(files)]


def own_device(visible: list[str], world: World) -> str | None:
    """The one that is this rank's; None where nothing is to be said (pure)."""
    if world.size == 1 or len(visible) < 2:
        return None
    if len(visible) < world.local_size:
        raise DeviceError.too_few(world.local_size, len(visible))
    return visible[world.local_rank]


def _device_files() -> list[str]:
    return [path.name for path in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", path.name)]
