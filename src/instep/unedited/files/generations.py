"""Where the layers of one rank lie: two of them for each generation.

A generation begins when a command that the script has started is known to have ended. `before`
then tells what the files were at that moment, and the rank's own layer is empty. The layers' paths
lead through a link, `now`, so that whatever process the rank forks or spawns changes with it.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from instep.unedited.files.layers import Layer

_NOW = "now"


def before_of(shared: str, number: int) -> Layer:
    """What rank 0 keeps in a generation, in the folder of this host's ranks."""
    return Layer(os.path.join(shared, "before", str(number)))


def in_use(shared: str) -> set[int]:
    """The generations of this host's ranks, of all but rank 0."""
    return {int(os.readlink(link)) for link in Path(shared).glob(f"rank*/{_NOW}")}


class Generations:
    """The layers of a rank other than 0, in `folder`; `shared` is its host's folder, if any."""

    def __init__(self, folder: str, shared: str | None) -> None:
        self._folder, self._shared = folder, shared
        self.begin(0)

    @property
    def number(self) -> int:
        """The present generation."""
        return int(os.readlink(os.path.join(self._folder, _NOW)))

    @property
    def own(self) -> Layer:
        """This rank's layer, in whichever generation."""
        return self._layer("own", self._folder)

    @property
    def before(self) -> Layer | None:
        """What rank 0 keeps, in whichever generation."""
        return None if self._shared is None else self._layer("before", f"{self._shared}/before")

    def _layer(self, name: str, beside: str) -> Layer:
        here = rf"{re.escape(self._folder)}/\w+/{name}"
        return Layer(f"{self._folder}/{_NOW}/{name}", rf"{here}|{re.escape(beside)}/\d+")

    def own_of(self, number: int) -> Layer:
        """This rank's layer of one generation."""
        return Layer(os.path.join(self._folder, str(number), "own"))

    def make(self, number: int) -> None:
        """Make room for a generation."""
        folder = os.path.join(self._folder, str(number))
        os.makedirs(folder, exist_ok=True)
        if self._shared is not None:
            with suppress(FileExistsError):
                os.symlink(f"../../before/{number}", os.path.join(folder, "before"))

    def begin(self, number: int) -> None:
        """From now on it is this generation."""
        self.make(number)
        draft = os.path.join(self._folder, f"{_NOW}-{number}")
        os.symlink(str(number), draft)
        os.replace(draft, os.path.join(self._folder, _NOW))


def emptied(folder: str) -> None:
    """Delete the files below `folder`. Its folders stay: processes may be in them."""
    for at, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(at, name))
