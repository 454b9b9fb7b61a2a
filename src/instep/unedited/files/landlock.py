"""Linux lets a thread deny itself, and what it starts, writing outside of some folders: Landlock.

It needs no privileges, and there is no way back. Who is denied gets EACCES. See landlock(7).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls: the same numbers on every architecture."""
_VERSION = 1
_PATH_BENEATH = 1
_NO_NEW_PRIVS = 38
_WRITE_FILE, _REMOVE_DIR, _MAKE_SYM, _REFER, _TRUNCATE = 1 << 1, 1 << 4, 1 << 12, 1 << 13, 1 << 14
_MAKE_AND_REMOVE = 2 * _MAKE_SYM - _REMOVE_DIR
"""Every right between these two."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def version() -> int:
    """That of the kernel's Landlock; 0 where it is missing, or forbidden in this container."""
    try:
        return _call(_CREATE_RULESET, None, 0, _VERSION)
    except OSError:
        return 0


def deny_writing_outside(folders: Iterable[str]) -> None:
    """From now on this thread, and what it starts, changes files only beneath these `folders`.

    Those that do not exist are passed over; what is open stays open. Raises OSError where the
    kernel refuses.
    """
    rights = _rights(version())
    wanted = _Ruleset(rights)
    ruleset = _call(_CREATE_RULESET, ctypes.byref(wanted), ctypes.sizeof(wanted), 0)
    try:
        for folder in folders:
            _allow(ruleset, folder, rights)
        _call(None, _NO_NEW_PRIVS, 1, 0, 0, 0)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _rights(known: int) -> int:
    """To write, and to make and remove whatever lies in a folder, as far as this version knows."""
    rights = _WRITE_FILE | _MAKE_AND_REMOVE
    return rights | (_REFER if known >= 2 else 0) | (_TRUNCATE if known >= 3 else 0)


def _allow(ruleset: int, folder: str, rights: int) -> None:
    try:
        fd = os.open(folder, os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        rule = _Beneath(rights, fd)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(fd)


def _call(number: int | None, *args: object) -> int:
    """A system call, or prctl. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    result: int = library.prctl(*args) if number is None else library.syscall(number, *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
