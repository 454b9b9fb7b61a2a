"""Rank 0 writes a file to a draft beside it and renames that, so the file is complete or absent.

The draft has the file's own name, in a directory beside it: torch.save writes the name into the
file.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from instep.process.pending_writes import DRAFT_PREFIX, track_write
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.paths import PathResolver, StrOrBytesPath


@contextmanager
def atomic_write(path: StrOrBytesPath, files: PathResolver) -> Iterator[str]:
    """Yield where to write what is to be at `path` if this block ends without an exception.

    That is `path` itself if a rename would change more than the content: if it is no regular file
    or has a second name, or if this process may not make a directory beside it or give the draft
    the owner of the old file.
    """
    with bypass_overlay():
        target = os.path.realpath(os.fsdecode(path))
        draft = _draft_path(target)
        can_be_replaced = _can_be_replaced(path, target, files)
        # From before its directory is made until that has been removed.
        with track_write(draft) if can_be_replaced else nullcontext():
            if not (can_be_replaced and _make_directory(draft, files)):
                files.keep(path)
                yield os.fsdecode(path)
                return
            try:
                yield draft
                if os.path.lexists(target):
                    _copy_metadata(target, draft)
                files.keep(target, never_written_again=True)
                os.replace(draft, target)
            except OSError as error:
                if error.filename == draft:
                    error.filename = path
                raise
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(draft)
                with suppress(OSError):  # another process has put something into it
                    os.rmdir(os.path.dirname(draft))


def _draft_path(target: str) -> str:
    parent, name = os.path.split(target)
    return os.path.join(parent, f"{DRAFT_PREFIX}{os.getpid()}-{threading.get_native_id()}", name)


def _make_directory(draft: str, files: PathResolver) -> bool:
    """Make the directory of a draft; False if that is not possible."""
    directory = os.path.dirname(draft)
    files.keep(directory, follow=False)  # so that no other rank sees it
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:  # of a process that was killed
        pass
    except OSError:
        return False
    return True


def _can_be_replaced(path: StrOrBytesPath, target: str, files: PathResolver) -> bool:
    if any(files.is_private(name) for name in (os.path.abspath(os.fsdecode(path)), target)):
        return False
    try:
        status = os.lstat(target)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_nlink == 1
        and os.access(target, os.W_OK)
        and (os.geteuid() == 0 or _is_own(status))
    )


def _is_own(status: os.stat_result) -> bool:
    groups = (os.getegid(), *os.getgroups())
    return status.st_uid == os.geteuid() and status.st_gid in groups


def _copy_metadata(target: str, draft: str) -> None:
    """Copy owner, mode and extended attributes, but not the times."""
    written, status = os.stat(draft), os.stat(target)
    if (written.st_uid, written.st_gid) != (status.st_uid, status.st_gid):
        os.chown(draft, status.st_uid, status.st_gid)
    shutil.copystat(target, draft)
    os.utime(draft, ns=(written.st_atime_ns, written.st_mtime_ns))
