"""CUDA_VISIBLE_DEVICES: which physical GPU is which visible one, and was it read (pure)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"\d+|(GPU|MIG)-.+")


def physical_devices(count: int, visible: str | None) -> list[str]:
    """For each of `count` visible devices the physical one, in the order of the variable.

    A number, or whatever else the variable has (GPU-… and MIG-… names); without the variable,
    device k is k.
    """
    if visible is None:
        return [str(k) for k in range(count)]
    return _named(visible)[:count]


def late_change_warning(
    visible: str | None, at_start: str | None, uuids: Sequence[str]
) -> str | None:
    """A warning, where CUDA shows devices that the variable does not: it had read it before.

    `uuids` are those of the devices that CUDA shows; `at_start` is what this process began with.
    """
    if visible is None:
        return None
    named = _named(visible)
    if len(uuids) <= len(named) and all(map(_may_be, named, uuids)):
        return None
    shown = "unset" if at_start is None else repr(at_start)
    devices = f"{len(uuids)} device{'s' * (len(uuids) != 1)}"
    return (
        f"{VARIABLE} is {visible!r}, but CUDA shows {devices} ({', '.join(uuids)}): it was set "
        f"after CUDA had read it (it was {shown} when this process started). Set it before the "
        "process starts; in a script, before anything asks torch.cuda, is_available() included."
    )


def _named(visible: str) -> list[str]:
    """CUDA itself stops at the first entry that is no device."""
    return list(takewhile(_DEVICE.fullmatch, (name.strip() for name in visible.split(","))))


def _may_be(name: str, uuid: str) -> bool:
    """What number a device has is not known here; a name may be cut short."""
    return not name.startswith("GPU-") or uuid.startswith(name.removeprefix("GPU-"))
