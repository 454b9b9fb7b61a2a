"""Landlock: a Linux thread denies itself, and what it starts, writing outside of directories.

It needs no privileges and cannot be undone. A denied call fails with EACCES. See landlock(7).
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
"""All rights from _REMOVE_DIR to _MAKE_SYM."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathRule(ctypes.Structure):
    # The kernel's is packed: it reads these 12 bytes, and not the padding after them.
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def version() -> int:
    """The version of the kernel's Landlock; 0 if there is none, or this container forbids it."""
    try:
        return _call(_CREATE_RULESET, None, 0, _VERSION)
    except OSError:
        return 0


def restrict_writes(directories: Iterable[str]) -> None:
    """Let this thread, and what it starts, change files only below these `directories`.

    Directories that do not exist are skipped; files that are open stay open. Raises OSError if
    the kernel refuses.
    """
    supported = version()
    rights = _WRITE_FILE | _MAKE_AND_REMOVE
    rights |= (_REFER if supported >= 2 else 0) | (_TRUNCATE if supported >= 3 else 0)
    wanted = _Ruleset(rights)
    ruleset = _call(_CREATE_RULESET, ctypes.byref(wanted), ctypes.sizeof(wanted), 0)
    try:
        for directory in directories:
            _allow(ruleset, directory, rights)
        _call(None, _NO_NEW_PRIVS, 1, 0, 0, 0)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, directory: str, rights: int) -> None:
    try:
        fd = os.open(directory, os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        rule = _PathRule(rights, fd)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(fd)


def _call(number: int | None, *args: object) -> int:
    """Make a system call; None: prctl. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    result: int = library.prctl(*args) if number is None else library.syscall(number, *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
