"""Ranks other than 0 cannot change the user's files past the layers, whatever library tries.

What opens files in compiled code knows nothing of layers. On rank 0 that is right; any other rank
is denied it by the kernel, and the error that comes of it is explained.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
import traceback
from contextlib import suppress

from instep.process import storage
from instep.process.tracebacks import in_words
from instep.unedited.files import landlock
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.paths import spared_folders

_DENIED = re.compile(
    r"permission denied|os error 13\b|errno:? 13\b|not permitted|read-?only"
    r"|(can ?not|could not|unable to|failed to|failed) (be )?(open|creat|writ|sav|mak)",
    re.IGNORECASE,
)
"""How libraries say that a file cannot be written."""
_FULL = re.compile(r"no space left|quota exceeded|os error 28\b|unexpected pos", re.IGNORECASE)
_own: list[str] = []
_confined: list[int] = []


def spare(*folders: str) -> None:
    """In these folders this rank writes for itself, later too."""
    _own.extend(folders)


def confine() -> None:
    """From now on the calling thread, and what it starts, may change no file of the user's."""
    if landlock.version() == 0 or _confined:
        return
    with bypass_overlay():
        folders = [*_caches(), *_own, os.path.realpath(tempfile.gettempdir())]
        with suppress(OSError):
            os.makedirs(folders[0], mode=0o700, exist_ok=True)
        landlock.deny_writing_outside(folders)
    _confined.append(os.getpid())


def _caches() -> list[str]:
    home = os.path.expanduser("~")
    first = os.environ.get("XDG_CACHE_HOME", f"{home}/.cache")
    return [first, *spared_folders(), f"{home}/.nv"]


def explain(error: BaseException, rank: int) -> None:
    """Note on an exception that escapes the script what may have been denied to this rank."""
    _explain_full_disk(error, rank)
    if not _confined or not _DENIED.search(in_words(error)):
        return
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({frame[0].filename}:{frame[0].lineno})" if frame else ""
    error.add_note(
        f"instep: rank {rank} may not change the user's files: rank 0 does that, once, for all. "
        f"If the call above{where} opens a file in compiled code, instep does not know it. Let it "
        "write into a temporary file (tempfile) and move that into place by shutil.move, write "
        "through Python's open, or start the script with --plain."
    )


def _explain_full_disk(error: BaseException, rank: int) -> None:
    """TorchScript's and torch.save's writers say no more than that a position is unexpected."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if rank == 0 or not _own or not (is_full or _FULL.search(in_words(error))):
        return
    with bypass_overlay():
        place = storage.said(_own[0])
    error.add_note(
        f"instep: rank {rank} keeps what the script writes below {place}. Let TMPDIR name a folder "
        "with room for the checkpoints of all ranks of this host."
    )
