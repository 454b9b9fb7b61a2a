"""The folder in which a job keeps its own files until it ends, overlays of ranks among them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

from instep.process.errors import LaunchVariablesError

BYTES_PER_RANK = 4 << 30
"""2 GiB of older checkpoints, the last one, and a share of the copies that rank 0 keeps."""


def choose_folder(ranks: int) -> str:
    """A folder in which to make folders, of mode 0700, for so many ranks of this host.

    It is the first with room for them of the temporary folder, /var/tmp and the user's cache; if
    none has, the one with the most room. Raises LaunchVariablesError where none can be written.
    """
    free = {folder: shutil.disk_usage(folder).free for folder in _writable_folders()}
    if not free:
        raise LaunchVariablesError.without_folder(cache_folder())
    for folder, bytes_free in free.items():
        if bytes_free >= ranks * BYTES_PER_RANK:
            return folder
    return max(free, key=lambda folder: free[folder])


def make_job_folder(ranks: int) -> tempfile.TemporaryDirectory[str]:
    """A new folder for the files of a job with so many ranks on this host."""
    return tempfile.TemporaryDirectory(prefix="instep-", dir=choose_folder(ranks))


def describe_folder(folder: str) -> str:
    """A folder, and the free space there."""
    return f"{folder} ({shutil.disk_usage(folder).free / 2**30:.1f} GiB free)"


def cache_folder() -> str:
    """The user's folder for caches."""
    return os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # none can be written
        return "/tmp"


def _writable_folders() -> Iterator[str]:
    """One for each file system."""
    seen = set()
    for folder in (_temporary_folder(), "/var/tmp", cache_folder()):
        if os.access(folder, os.W_OK | os.X_OK):
            device = os.stat(folder).st_dev
            if device not in seen:
                seen.add(device)
                yield folder
