"""Which physical GPU is which visible one (pure)."""

from __future__ import annotations

VISIBLE = "CUDA_VISIBLE_DEVICES"


def physical(count: int, visible: str | None) -> list[str]:
    """For each of `count` visible devices the physical one, in the order of the variable.

    A number, or whatever else the variable has (GPU-… and MIG-… names); without the variable,
    device k is k. CUDA itself stops at the first entry that is no device.
    """
    if visible is None:
        return [str(k) for k in range(count)]
    return [name.strip() for name in visible.split(",")][:count]


def set_too_late(at_start: str | None, now: str | None, initialized: bool) -> str | None:
    """A warning, where the variable was changed after CUDA had read it."""
    if not initialized or at_start == now:
        return None
    shown = "unset" if at_start is None else repr(at_start)
    return (
        f"{VISIBLE} is {now!r} now, but was {shown} when this process started, and CUDA may have "
        "read it then. Set it before the process starts."
    )
