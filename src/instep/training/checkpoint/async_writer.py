"""Checkpoints written by a thread, while the training goes on."""

from __future__ import annotations

import threading
from pathlib import Path

from instep.process import print_line
from instep.training.checkpoint.errors import CheckpointError
from instep.training.checkpoint.folder_lock import FolderLock
from instep.training.checkpoint.on_disk import storage
from instep.training.checkpoint.on_disk.state_shards import ShardedWrite
from instep.training.checkpoint.resume_point import ResumePoint


class AsyncWriter:
    """Writes one checkpoint at a time to a folder, and removes all but the last `keep`."""

    def __init__(self, folder: Path, keep: int | None) -> None:
        self._folder = folder
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._last: storage.EncodedState | None = None
        self.lock: FolderLock | None = None
        """Of the folder. A write that goes on after the script has let go of its checkpoint has
        it: another job would remove what is being written."""

    def start(
        self, step: int, state: storage.EncodedState, shards: ShardedWrite | None = None
    ) -> None:
        """Copy `state`, and begin to write it. Waits until the last one is written.

        `shards`: this rank writes a part of it, together with others.
        """
        self.wait()
        if shards is not None:
            state = shards.own_part(state)
        self._last = state.copy(self._last)
        # No daemon: a script that ends, or fails, lets its last checkpoint be written.
        self._thread = threading.Thread(
            target=self._write, args=(step, self._last, shards), name="instep-checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def has_failed(self) -> bool:
        """Whether a write has failed."""
        return self._error is not None

    def pop_error(self) -> CheckpointError | None:
        """The error of a write that has failed, once."""
        error, self._error = self._error, None
        return error

    def _write(self, step: int, state: storage.EncodedState, shards: ShardedWrite | None) -> None:
        try:
            if shards is None:
                path = storage.write_encoded(self._folder, step, state)
            elif (published := shards.write(state)) is None:
                return  # rank 0 does the rest
            else:
                path = published
            ResumePoint(step, str(path)).note()
            if self._keep is not None:
                others = [each for each in storage.list_checkpoints(self._folder) if each != path]
                for each in others[self._keep - 1 :]:
                    storage.remove(each)
        except BaseException as error:
            path = storage.checkpoint_path(self._folder, step)
            self._error = CheckpointError.of_write(path, error)
            self._error.__cause__ = error
            if not threading.main_thread().is_alive():  # no call comes that would raise it
                print_line(self._error)
