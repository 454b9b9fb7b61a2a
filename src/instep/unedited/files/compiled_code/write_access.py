"""Ranks other than 0 cannot change the user's files past the overlay, whatever a library does.

Compiled code that opens files does not know of layers. On rank 0 its writes are right; on any
other rank the kernel denies them, and instep explains the error that follows.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
import traceback
from contextlib import suppress
from dataclasses import dataclass, field

from instep.process import storage
from instep.process.failures.tracebacks import format_error
from instep.unedited.files import overlay
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.compiled_code import landlock
from instep.unedited.files.paths import private_directories

_DENIED = re.compile(
    r"permission denied|os error 13\b|errno:? 13\b|not permitted|read-?only"
    r"|(can ?not|could not|unable to|failed to|failed) (be )?(open|creat|writ|sav|mak)",
    re.IGNORECASE,
)
"""What libraries say if a file cannot be written."""
_FULL = re.compile(r"no space left|quota exceeded|os error 28\b|unexpected pos", re.IGNORECASE)


@dataclass
class _WriteAccess:
    """Where this process, and what it starts, may write."""

    directories: list[str] = field(default_factory=list)
    is_restricted: bool = False
    """Whether the kernel denies it elsewhere: for good."""


_access = _WriteAccess()


def allow(*directories: str) -> None:
    """Let this rank write in these directories after `restrict` too."""
    _access.directories.extend(directories)


def restrict() -> None:
    """Deny the calling thread, and what it starts, to change the user's files."""
    if landlock.version() == 0 or _access.is_restricted:
        return
    with bypass_overlay():
        private = private_directories()
        if f"{os.path.realpath(storage.cache_folder())}/" in private:
            with suppress(OSError):
                os.makedirs(storage.cache_folder(), mode=0o700, exist_ok=True)
        temporary = os.path.realpath(tempfile.gettempdir())
        caches = [*private, os.path.expanduser("~/.nv")]
        landlock.restrict_writes([*caches, *_access.directories, temporary])
    _access.is_restricted = True


def add_notes(error: BaseException, rank: int) -> None:
    """Note on an exception of the script what this rank may have been denied."""
    _note_full_disk(error, rank)
    if not _access.is_restricted or not _DENIED.search(format_error(error)):
        return
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    if frame and frame[0].filename == overlay.__file__:
        return  # one process would get it, too
    where = f" ({frame[0].filename}:{frame[0].lineno})" if frame else ""
    error.add_note(
        f"instep: rank {rank} may not change the user's files: rank 0 does that once for all "
        f"ranks. If the call above{where} opens a file in compiled code, instep does not know of "
        "it. Let it write into a temporary file (tempfile) and move that with shutil.move, write "
        "with Python's open, or start the script with --plain."
    )


def _note_full_disk(error: BaseException, rank: int) -> None:
    """TorchScript and torch.save report a full disk only as a position that is unexpected."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if rank == 0 or not _access.directories or not (is_full or _FULL.search(format_error(error))):
        return
    with bypass_overlay():
        directory = storage.describe_folder(_access.directories[0])
    error.add_note(
        f"instep: rank {rank} keeps what the script writes below {directory}. Set TMPDIR to a "
        "directory with room for the checkpoints of all ranks of this host."
    )
