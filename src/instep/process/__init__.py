"""This process and its host: settings, patches, /proc, exit statuses, tracebacks, files of a job.

It leans on the standard library and `instep.errors` only; PyTorch is imported by no module on top.
Begin with `settings` (every INSTEP_* variable) and `patching` (functions that answer for others).
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

PACKAGE_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
"""Where instep's own files are, with a separator at its end."""

_STDLIB = os.path.join(os.path.dirname(os.__file__), "")
_FROZEN = "<frozen "
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def is_stdlib(file: str) -> bool:
    """Whether a file of Python code is the standard library's."""
    return file.startswith(_FROZEN) or (file.startswith(_STDLIB) and not is_installed(file))


def is_installed(file: str) -> bool:
    """Whether a file of Python code belongs to an installed package."""
    return not _INSTALLED.isdisjoint(file.split(os.sep))


def is_script_file(file: str) -> bool:
    """Whether a file of Python code is the user's: not instep's, Python's or a package's."""
    return not (file.startswith(PACKAGE_FOLDER) or is_stdlib(file) or is_installed(file))


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """This frame, that of its caller, and so on to the outermost."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def in_main_thread() -> bool:
    """Whether this thread is the main one of its process."""
    return threading.current_thread() is threading.main_thread()


def print_line(text: object) -> None:
    """Print a line of instep's own on standard error, for the user, and not behind a progress bar
    of tqdm's."""
    with _without_progress_bars():
        print(f"instep: {text}", file=sys.stderr, flush=True)


def _without_progress_bars() -> AbstractContextManager[object]:
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if bars is None or not getattr(bars, "_instances", None):
        return nullcontext()
    mode: AbstractContextManager[object] = bars.external_write_mode(file=sys.stderr)
    return mode


def write_text(fd: int, text: str) -> None:
    """Write text by a file descriptor; bytes of a path that are no UTF-8 are written as Python's
    tracebacks write them."""
    os.write(fd, text.encode(errors="backslashreplace"))


def isolated_command(module: str, *arguments: str) -> list[str]:
    """The command that calls `main` of a module that needs the standard library only.

    `-I -S`: nothing of the user's is imported, and the start takes about 20 ms.
    """
    program = (
        f"import sys; sys.path.append(sys.argv[1]); from {module} import main; main(*sys.argv[2:])"
    )
    above = os.path.dirname(os.path.dirname(PACKAGE_FOLDER))
    return [sys.executable, "-I", "-S", "-c", program, above, *arguments]


def python_command(*arguments: str) -> list[str]:
    """A command of this Python, with the options that this process has of it (`-W error`, `-O`)."""
    flags = sys.flags
    letters = {
        "I": flags.isolated,
        "E": flags.ignore_environment and not flags.isolated,
        "s": flags.no_user_site and not flags.isolated,
        "S": flags.no_site,
        "B": flags.dont_write_bytecode,
        "b": flags.bytes_warning,
        "d": flags.debug,
        "O": flags.optimize,
        "v": flags.verbose,
    }
    options = [f"-{letter * count}" for letter, count in letters.items() if count]
    for warning in sys.warnoptions:
        options += ["-W", warning]
    for name, value in sys._xoptions.items():
        options += ["-X", name if value is True else f"{name}={value}"]
    return [sys.executable, *options, *arguments]
