"""Masks the launcher's environment variables and other ranks' devices from the script.

It can restore what it masks.
"""

from __future__ import annotations

import os

from instep.distributed.errors import DeviceError
from instep.distributed.identity import accelerators, launchers
from instep.distributed.identity.accelerators import Accelerator
from instep.distributed.identity.world import World
from instep.process import settings

_masked: dict[str, str] = {}
"""The launcher's variables, while they are masked."""


def is_masked(name: object) -> bool:
    """Whether this is a variable of the launcher that the script has not set itself."""
    return name in _masked and name not in [*os.environ]


def launched_environ() -> dict[str, str]:
    """The environment as it is, with what is masked."""
    return {**os.environ, **_masked}


def mask() -> None:
    """Remove the launcher's variables from the environment of this process and its children.

    The job's name stays, because `instep run` finds by it what the script leaves behind.
    """
    for name in [*filter(launchers.is_launcher_variable, os.environ)]:
        _masked[name] = os.environ.pop(name)


def restore() -> None:
    """Restore what is masked, but for the rendezvous socket, which does not exist any more."""
    _masked.pop(launchers.STORE_FD, None)
    os.environ.update(_masked)
    _masked.clear()


def add_note(error: BaseException, world: World) -> None:
    """Note on a KeyError that only another launcher sets this variable."""
    name = str(error.args[0]) if isinstance(error, KeyError) and error.args else ""
    if launchers.is_launcher_variable(name) and name not in launched_environ():
        error.add_note(
            f"instep: {world.source} does not set {name}. Start the script with the launcher that "
            "does, or let it read RANK, WORLD_SIZE and LOCAL_RANK."
        )


def unset_threads() -> None:
    """Let processes that the script starts use all cores, unless the user has set their number."""
    if launchers.has_chosen_threads(launched_environ()):
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.pop(name, None)


def set_visible_device(world: World) -> None:
    """Let `cuda` and `cuda:0`, or `npu` and the like, mean this rank's own device. Must be called
    before torch looks at the devices.

    Raises DeviceError if this host has fewer devices than ranks.
    """
    if str(settings.DEVICE) == "cpu":
        for row in accelerators.ACCELERATORS:
            if row.hidden == "" or (row.hidden and accelerators.is_usable(row)):
                os.environ[row.variables[0]] = row.hidden
        return
    found = accelerators.find_on_host()
    if found is None:
        return
    row, visible = found
    variable = row.variable()
    device = own_device(visible, world, row)
    if device is not None and variable is not None:
        os.environ[variable] = device


def own_device(visible: list[str], world: World, row: Accelerator) -> str | None:
    """The device of this rank; None if the variable is right as it is (pure)."""
    if world.size == 1 or len(visible) < 2:
        return None
    if len(visible) < world.local_size:
        raise DeviceError.not_enough(world.local_size, len(visible), row.title, row.variable())
    return visible[world.local_rank]
