"""The directories of a job's ranks in which they keep their layers."""

from __future__ import annotations

import os
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
from instep.unedited.files.layers.generations import Generations, before_layer
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.rank0_files import Rank0Files


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
