"""The directories in which the layers of one rank are kept: two layers for each generation.

A generation starts when a command that the script started is known to have ended. From then on
`before` holds what the files were at that moment, and the rank's own layer is empty. The paths of
the layers lead through a link, `now`, so that processes which the rank has forked or spawned
change to the new generation too.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from instep.distributed.identity import launchers
from instep.distributed.identity.world import World
from instep.distributed.watchdog import client
from instep.process import pending_writes, storage
from instep.process.procfs import boot_id
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.layers import Layer
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.rank0_files import Rank0Files

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


@dataclass(frozen=True)
class SharedDirectory:
    """The directory of the ranks of rank 0's host, in which each has one of its own."""

    host: str
    path: str

    @classmethod
    def make(cls, world: World) -> SharedDirectory:
        """On rank 0. `instep run` deletes it whatever happens; under another launcher the last rank
        does."""
        failure_file = os.environ.get(launchers.FAILURE_FILE)
        parent = (
            storage.choose_folder(world.local_size)
            if failure_file is None
            else os.path.dirname(failure_file)
        )
        directory = _make_directory(parent)
        for rank in range(world.size):
            os.mkdir(os.path.join(directory, f"rank{rank}"))
        return cls(_host(), directory)

    def path_here(self) -> str | None:
        """None on another host, and in another container of the same one."""
        return self.path if self.host == _host() and os.path.isdir(self.path) else None


def _host() -> str:
    return f"{socket.gethostname()} {boot_id()}"


def _make_directory(parent: str) -> str:
    return os.path.realpath(tempfile.mkdtemp(prefix="instep-", dir=parent))


class LayerDirectories:
    """The directories that hold this rank's layers."""

    def __init__(self, directory: SharedDirectory, world: World) -> None:
        self.shared = directory.path_here()
        """None if this rank does not see that of rank 0's host."""
        own = self.shared and os.path.join(self.shared, f"rank{world.rank}")
        self._own = own or _make_directory(storage.choose_folder(world.local_size))
        self.generations = None if world.rank == 0 else Generations(self._own, self.shared)
        client.remove_after_exit(self._own, self.shared)

    def files(self) -> Rank0Files | OverlayFiles:
        """The files as this rank sees and changes them."""
        if self.generations is not None:
            return OverlayFiles(self.generations.rank_layer, self.generations.before)
        assert self.shared is not None
        return Rank0Files(before_layer(self.shared, 0))

    def writable(self) -> list[str]:
        """All directories in which this rank writes."""
        return [self._own, *([] if self.shared is None else [self.shared])]

    def marker(self) -> Path:
        """Where this rank marks that it writes a file: for the supervisor, or for its watcher."""
        if launchers.FAILURE_FILE in os.environ:
            return pending_writes.marker_path(Path(os.environ[launchers.FAILURE_FILE]))
        os.makedirs(self._own, mode=0o700, exist_ok=True)
        return Path(self._own, pending_writes.MARKER_NAME)

    def delete(self) -> None:
        """Delete this rank's directory; the last rank of the host also deletes the shared one."""
        with bypass_overlay():
            shutil.rmtree(self._own, ignore_errors=True)
            if self.shared is None:
                return
            with suppress(FileNotFoundError):  # another rank has deleted it meanwhile
                if not any(name.startswith("rank") for name in os.listdir(self.shared)):
                    shutil.rmtree(self.shared, ignore_errors=True)
