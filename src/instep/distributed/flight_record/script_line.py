"""The frames that are the script's: those outside of instep, torch and contextlib."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import warnings
from pathlib import Path
from types import FrameType

import torch

from instep.errors import InstepWarning
from instep.process import PACKAGE_FOLDER

OUTSIDE_SCRIPT = (PACKAGE_FOLDER, f"{Path(str(torch.__file__)).parent}/", contextlib.__file__)
"""Files whose frames are not the script's begin with one of these."""
_INSTALLED = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib", "stdlib", "scripts")}
)
"""Files of installed packages, of their commands and of Python itself begin with one of these."""


def script_frame(frame: FrameType) -> FrameType:
    """From `frame` outward, the first that is the script's; else the outermost."""
    while frame.f_code.co_filename.startswith(OUTSIDE_SCRIPT) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def user_frame(frame: FrameType) -> FrameType:
    """From `frame` outward, the first that is the script's and in no installed package, such as
    torchmetrics; where all are (`python -m package`), the first that is the script's."""
    first = each = script_frame(frame)
    while each.f_code.co_filename.startswith((*OUTSIDE_SCRIPT, *_INSTALLED, "<frozen ")):
        if each.f_back is None:
            return first
        each = each.f_back
    return each


def location(frame: FrameType) -> str:
    """The file and the line of a frame, as text that any file takes: bytes of a path that are no
    UTF-8 are written as Python's tracebacks write them."""
    file = frame.f_code.co_filename.encode(errors="backslashreplace").decode()
    return f"{file}:{frame.f_lineno}"


def warn_at_script_line(text: str) -> None:
    """Warn (InstepWarning) as if the script's line that leads here did, also through functions of
    installed packages."""
    frame = user_frame(sys._getframe(1))
    place = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, InstepWarning, *place)
