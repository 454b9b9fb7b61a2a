"""A file that is written anew is whole or absent: it is written beside its place, then renamed.

The draft has the file's own name, in a folder beside it: torch.save writes the name into the file.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from instep.process.unfinished_files import DRAFTS, writing
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.paths import Path
from instep.unedited.files.rank0_files import Rank0Files


@contextmanager
def drafted(path: Path, keeper: Rank0Files) -> Iterator[str]:
    """Where to write what shall be at `path` when this block ends without an exception.

    That is `path` itself where a rename would change more than the content: for what is no regular
    file or has a second name, and where this process may not make a folder beside it, or may not
    give the draft the owner of what is there.
    """
    with bypass_overlay():
        target = os.path.realpath(os.fsdecode(path))
        if not _may_be_replaced(path, target, keeper):
            keeper.keep(path)
            yield os.fsdecode(path)
            return
        draft = _draft_of(target)
        with writing(draft):  # from before its folder is made until it has been removed
            if not _has_folder(draft, keeper):
                keeper.keep(path)
                yield os.fsdecode(path)
                return
            try:
                yield draft
                if os.path.lexists(target):
                    _describe_like(target, draft)
                keeper.keep(target, unwritten=True)
                os.replace(draft, target)
            except OSError as error:
                if error.filename == draft:
                    error.filename = path
                raise
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(draft)
                with suppress(OSError):  # what somebody else has put into it
                    os.rmdir(os.path.dirname(draft))


def _draft_of(target: str) -> str:
    """In a folder beside `target`."""
    above, name = os.path.split(target)
    return os.path.join(above, f"{DRAFTS}{os.getpid()}-{threading.get_native_id()}", name)


def _has_folder(draft: str, keeper: Rank0Files) -> bool:
    """Make the folder of a draft; False where that cannot be done."""
    folder = os.path.dirname(draft)
    keeper.keep(folder, follow=False)  # no other rank shall see it
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:  # of a process that was killed
        pass
    except OSError:
        return False
    return True


def _may_be_replaced(path: Path, target: str, keeper: Rank0Files) -> bool:
    if any(keeper.is_spared(name) for name in (os.path.abspath(os.fsdecode(path)), target)):
        return False
    try:
        seen = os.lstat(target)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return (
        stat.S_ISREG(seen.st_mode)
        and seen.st_nlink == 1
        and os.access(target, os.W_OK)
        and (os.geteuid() == 0 or _is_ours(seen))
    )


def _is_ours(seen: os.stat_result) -> bool:
    return seen.st_uid == os.geteuid() and seen.st_gid in (os.getegid(), *os.getgroups())


def _describe_like(target: str, draft: str) -> None:
    """Its owner, mode and extended attributes; the times are the draft's own."""
    written, seen = os.stat(draft), os.stat(target)
    if (written.st_uid, written.st_gid) != (seen.st_uid, seen.st_gid):
        os.chown(draft, seen.st_uid, seen.st_gid)
    shutil.copystat(target, draft)
    os.utime(draft, ns=(written.st_atime_ns, written.st_mtime_ns))
