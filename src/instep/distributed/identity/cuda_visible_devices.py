"""CUDA_VISIBLE_DEVICES: the physical GPU of each visible one, and changes that came too late."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"\d+|(GPU|MIG)-.+")


def physical_devices(count: int, visible: str | None) -> list[str]:
    """The physical device of each of `count` visible ones, in the order of the variable.

    A number, or a name in the variable (GPU-…, MIG-…); without the variable, device k is k.
    """
    if visible is None:
        return [str(k) for k in range(count)]
    return _entries(visible)[:count]


def changed_after_init_warning(
    visible: str | None, at_start: str | None, uuids: Sequence[str]
) -> str | None:
    """A warning if CUDA shows other devices than the variable: it had read it before.

    `uuids` are those of the devices that CUDA shows; `at_start` is the value with which this
    process was started.
    """
    if visible is None:
        return None
    names = _entries(visible)
    if len(uuids) <= len(names) and all(map(_may_be, names, uuids)):
        return None
    started_with = "unset" if at_start is None else repr(at_start)
    devices = f"{len(uuids)} device{'s' * (len(uuids) != 1)}"
    return (
        f"{VARIABLE} is {visible!r}, but CUDA shows {devices} ({', '.join(uuids)}): it was set "
        f"after CUDA had read it (it was {started_with} when this process started). Set it before "
        "the process starts; in a script, before anything asks torch.cuda, is_available() included."
    )


def _entries(visible: str) -> list[str]:
    """CUDA stops at the first entry that is no device."""
    return list(takewhile(_DEVICE.fullmatch, (name.strip() for name in visible.split(","))))


def _may_be(name: str, uuid: str) -> bool:
    """A number may be any device; a name may be abbreviated."""
    return not name.startswith("GPU-") or uuid.startswith(name.removeprefix("GPU-"))
