"""What loading samples changes beside their values: files, and numbers that the data set keeps.

A rank that has not loaded a sample lacks what loading it would have changed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

from torch.utils.data import Subset, get_worker_info

from instep.unedited.files.os_functions import current_files

_PLAIN = (bool, int, float, str)


class LoadingEffects:
    """Sees what is changed from now on until `describe`."""

    def __init__(self, dataset: object) -> None:
        while type(dataset) is Subset:
            dataset = dataset.dataset
        self._dataset = dataset
        self._files = current_files()
        self._files.changed = ""
        self._before = self._state()

    def describe(self) -> str:
        """A predicate about loading samples; empty if nothing was changed."""
        if self._files.changed:
            return f"writes files ({os.path.basename(self._files.changed)})"
        for name, value in self._state().items():
            before = self._before.get(name, getattr(type(self._dataset), name, None))
            if type(before) is type(value) and before != value:
                return f"changes {type(self._dataset).__name__}.{name}"
        return ""

    def _state(self) -> Mapping[str, Any]:
        """Numbers and texts of the data set, and how far its files are written. In a worker none:
        the script does not see them there."""
        if get_worker_info() is not None:
            return {}
        state: dict[str, Any] = {}
        for name, value in getattr(self._dataset, "__dict__", {}).items():
            if type(value) in _PLAIN:
                state[name] = value
            elif isinstance(value, io.TextIOWrapper | io.BufferedWriter):
                state[name] = _position(value)
        return state


def _position(file: io.TextIOWrapper | io.BufferedWriter) -> int | None:
    """How far it is written, if that is known."""
    try:
        return file.tell() if file.writable() and file.seekable() else None
    except (OSError, ValueError):  # it is being read, or closed
        return None
