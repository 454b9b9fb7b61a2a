"""The layers of one rank in its directory: two for each generation.

A generation starts when a command that the script started is known to have ended. From then on
`before` holds what the files were at that moment, and the rank's own layer is empty. The paths of
the layers lead through a link, `now`, so that processes which the rank has forked or spawned
change to the new generation too.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from instep.unedited.files.layers.layer import Layer

_NOW = "now"


def before_layer(shared: str, number: int) -> Layer:
    """What rank 0 keeps in a generation, in the directory that this host's ranks share."""
    return Layer(os.path.join(shared, "before", str(number)))


def generations_in_use(shared: str) -> set[int]:
    """The generations of this host's ranks other than rank 0."""
    return {int(os.readlink(link)) for link in Path(shared).glob(f"rank*/{_NOW}")}


class Generations:
    """The layers of a rank other than 0, in `directory`.

    `shared` is the directory of rank 0's host; None if this rank runs on another host.
    """

    def __init__(self, directory: str, shared: str | None) -> None:
        self._directory, self._shared = directory, shared
        self.start(0)

    @property
    def number(self) -> int:
        """The present generation."""
        return int(os.readlink(os.path.join(self._directory, _NOW)))

    @property
    def rank_layer(self) -> Layer:
        """This rank's layer in the present generation, also after that has changed."""
        return self._layer("own", self._directory)

    @property
    def before(self) -> Layer | None:
        """What rank 0 keeps in the present generation, also after that has changed."""
        return None if self._shared is None else self._layer("before", f"{self._shared}/before")

    def _layer(self, name: str, parent: str) -> Layer:
        here = rf"{re.escape(self._directory)}/\w+/{name}"
        return Layer(f"{self._directory}/{_NOW}/{name}", rf"{here}|{re.escape(parent)}/\d+")

    def rank_layer_of(self, number: int) -> Layer:
        """This rank's layer of one generation."""
        return Layer(os.path.join(self._directory, str(number), "own"))

    def create(self, number: int) -> None:
        """Make the directory of a generation."""
        directory = os.path.join(self._directory, str(number))
        os.makedirs(directory, exist_ok=True)
        if self._shared is not None:
            with suppress(FileExistsError):
                os.symlink(f"../../before/{number}", os.path.join(directory, "before"))

    def start(self, number: int) -> None:
        """Make this generation the present one."""
        self.create(number)
        draft = os.path.join(self._directory, f"{_NOW}-{number}")
        os.symlink(str(number), draft)
        os.replace(draft, os.path.join(self._directory, _NOW))


def delete_files(directory: str) -> None:
    """Delete the files below a directory, but no directory: a process may be in it."""
    for at, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(at, name))
