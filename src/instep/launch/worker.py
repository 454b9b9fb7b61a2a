"""The entry of each rank: run the user's program, and keep what escapes from it.

`python -P -m instep.launch.worker LINE lines|untouched unedited|plain script.py args…`, where LINE
is a socket to the supervisor.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from instep.failure import Failure
from instep.identity.launchers import FAILURE_FILE, STORE_FD
from instep.launch import program
from instep.launch.line import FAILED, GO, READY

LINES = "lines"
"""The supervisor reads this rank's output: send each line as it is printed."""
PLAIN = "plain"
"""Run the script as it is, and divide nothing."""


def main(line: str, buffering: str, way: str, *command: str) -> None:
    """Run `command` and exit as it would, except that what it raises is written, not printed."""
    hook = sys.excepthook = Hook()
    try:
        _wait_for_go(int(line))
        leave = Leave(int(line), int(os.environ["RANK"]), Path(os.environ[FAILURE_FILE]))
        if buffering == LINES:
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        program.run(command, plain=way == PLAIN)
    except SystemExit as leaving:
        if leaving.code and not program.failing(f"SystemExit: {leaving.code}"):
            sys.exit(1)
        sys.exit(leave.by_exit(leaving.code))
    except KeyboardInterrupt:
        sys.excepthook = _say_nothing
        raise
    except BaseException as error:
        if not program.failing(f"{type(error).__name__}: {error}"):
            hook.written = error
            sys.exit(1)
        hook.written = error.with_traceback(_users_frames(error))
        text = "".join(traceback.format_exception(error))
        leave.failure(code=1, raised=True, text=text)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


class Hook:
    """The innermost sys.excepthook: does not print again what is written already.

    A library's hook is called as under plain Python. torch.distributed sets one that prints what
    the hook before it prints, on every rank that a failed peer takes along.
    """

    written: BaseException | None = None

    def __call__(
        self, kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        """Print what a script shows it."""
        if error is not self.written:
            sys.__excepthook__(kind, error, frames)


def _wait_for_go(line: int) -> None:
    os.set_inheritable(line, False)
    if STORE_FD in os.environ:
        os.set_inheritable(int(os.environ[STORE_FD]), False)
    with suppress(BrokenPipeError):  # said below
        os.write(line, READY)
    if os.read(line, 1) != GO:
        os._exit(1)  # the supervisor was killed before the guard knew of this rank


@dataclass(frozen=True)
class Leave:
    """How this rank says that it failed."""

    line: int
    rank: int
    file: Path

    def by_exit(self, meant: object) -> int:
        """What SystemExit means to the interpreter, with the message left to the supervisor."""
        if meant is None:
            return 0
        if not isinstance(meant, int):
            self.failure(code=1, text=f"{meant}\n")
            return 1
        if code := meant & 0xFF:
            self.failure(code=code)
        return code

    def failure(self, *, code: int, raised: bool = False, text: str = "") -> None:
        """To the supervisor."""
        now = time.time()
        with program.real_files():
            Failure(self.rank, now, code, raised, text).write(self.file)
        with suppress(BrokenPipeError):  # no supervisor any more: the guard ends this rank
            os.write(self.line, FAILED)


def _users_frames(error: BaseException) -> TracebackType | None:
    """Its traceback without our own frames before the user's first."""
    ours = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    return frames


def _say_nothing(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    """The user pressed Ctrl-C: no traceback."""


if __name__ == "__main__":
    main(*sys.argv[1:])
