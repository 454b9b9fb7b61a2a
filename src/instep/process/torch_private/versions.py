"""The versions of PyTorch with which instep was tried."""

from __future__ import annotations

TRIED = ((2, 11), (2, 14))
"""The oldest and the newest PyTorch with which instep's tests were run (docs/versions.md)."""


def is_newer_than_tried(version: str) -> bool:
    """Whether this version of PyTorch, as in "2.15.0+cpu", is newer than any that was tried."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) > TRIED[1]
