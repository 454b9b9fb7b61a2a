"""The entry of each rank: run the user's program, and keep what escapes from it.

`python -P -m instep.launch.worker.entry LINE lines|untouched unedited|plain script.py args…`,
where LINE is a socket to the supervisor.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from instep.distributed.identity.launchers import FAILURE_FILE, STORE_FD
from instep.launch.control_bytes import FAILED, GO, READY
from instep.launch.worker import program
from instep.process.failure import Failure
from instep.process.last_seen import LastSeen, expect_crash
from instep.process.tracebacks import in_words, is_consequence, line_of, origin, shown

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
        # No file object: heap.spare_torch() looks for those that are open for writing.
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        expect_crash(os.open(LastSeen(leave.file).crash_file, flags, 0o600))
        if buffering == LINES:
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        program.run(command, plain=way == PLAIN)
        leave.in_peace("the end of the script")
    except SystemExit as leaving:
        if leaving.code and not program.failing(f"SystemExit: {leaving.code}"):
            sys.exit(1)
        sys.exit(leave.by_exit(leaving))
    except KeyboardInterrupt as interrupt:
        if program.failing(in_words(interrupt)):
            leave.failure(interrupt, code=-signal.SIGINT)
        sys.excepthook = _say_nothing
        raise
    except BaseException as error:
        hook.written = error
        if not program.failing(in_words(error)):
            sys.exit(1)
        program.explain(error)
        leave.failure(error, code=1, raised=True)
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

    def by_exit(self, leaving: SystemExit) -> int:
        """What SystemExit means to the interpreter, with the message left to the supervisor."""
        meant = leaving.code
        if meant is None or isinstance(meant, int):
            code, text = (meant or 0) & 0xFF, ""
        else:
            code, text = 1, f"{meant}\n"
        if code:
            self._write(leaving, code, text)
        else:
            self.in_peace(line_of(leaving))
        return code

    def failure(self, error: BaseException, *, code: int, raised: bool = False) -> None:
        """What escaped from the script."""
        self._write(error, code, shown(error), raised)

    def _write(self, error: BaseException, code: int, text: str, raised: bool = False) -> None:
        """To the supervisor."""
        follows = is_consequence(error)
        missed = getattr(origin(error), "rank", None) if follows else None
        failure = Failure(
            self.rank, time.time(), code, raised, text, follows=follows, missed=missed
        )
        with program.real_files():
            failure.write(self.file)
        with suppress(BrokenPipeError):  # no supervisor any more: the guard ends this rank
            os.write(self.line, FAILED)

    def in_peace(self, line: str) -> None:
        """With exit code 0, which others may still have to hear of."""
        with program.real_files(), open(LastSeen(self.file).left_file, "w") as file:
            file.write(line)


def _say_nothing(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    """The supervisor says it, unless the user pressed Ctrl-C and knows."""


if __name__ == "__main__":
    main(*sys.argv[1:])
