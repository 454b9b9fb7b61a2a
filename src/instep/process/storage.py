"""Where a job keeps files of its own until it ends, the layers of unedited scripts among them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

BYTES_PER_RANK = 4 << 30
"""Bytes: 2 GiB of older checkpoints, the last one, and a share of what rank 0 keeps."""


def choose_folder(ranks: int) -> str:
    """Where folders for so many ranks of this host are to be made: under names of their own, with
    mode 0700.

    That is the first one with room for them: the temporary folder, /var/tmp, the user's cache. If
    there is none, the one with the most room.
    """
    free = {place: shutil.disk_usage(place).free for place in _places()}
    for place, bytes_free in free.items():
        if bytes_free >= ranks * BYTES_PER_RANK:
            return place
    return max(free, key=lambda place: free[place])


def describe_folder(place: str) -> str:
    """A folder, and what is free there."""
    return f"{place} ({shutil.disk_usage(place).free / 2**30:.1f} GiB free)"


def _places() -> Iterator[str]:
    """Those in which this process may write, one for each file system."""
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    seen = set()
    for place in (tempfile.gettempdir(), "/var/tmp", cache):
        if os.access(place, os.W_OK | os.X_OK):
            device = os.stat(place).st_dev
            if device not in seen:
                seen.add(device)
                yield place
