"""The entry point of each rank: run the user's program and report to the supervisor how it ended.

`python -P -m instep.launch.worker.entry FD lines|untouched unedited|plain script.py args…`, where
FD is a socket to the supervisor.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from instep.distributed import gloo_threads
from instep.distributed.conditions import note_condition
from instep.distributed.identity.launchers import FAILURE_FILE, STORE_FD
from instep.launch.worker import program
from instep.launch.worker.control_bytes import BEGUN, FAILED, GO, READY
from instep.process.exit_status import system_exit_code
from instep.process.failures.last_position import LastPosition, enable_faulthandler
from instep.process.failures.record import Failure
from instep.process.failures.tracebacks import (
    awaited_rank,
    format_error,
    format_traceback,
    is_caused_by_another_rank,
    note_interpreter,
    note_thread_limit,
    script_line,
    trim_traceback,
)

LINES = "lines"
"""The supervisor reads this rank's output, so that stdout is flushed after each line."""
PLAIN = "plain"
"""The script runs as it is, and nothing is divided."""


def main(line: str, buffering: str, mode: str, *command: str) -> None:
    """Run `command` and exit as it would, but write its exception to a file instead of stderr."""
    process = os.getpid()
    hook = sys.excepthook = ExceptHook()
    leave = ExitReporter(int(line), int(os.environ["RANK"]), Path(os.environ[FAILURE_FILE]))
    try:
        _wait_for_go(int(line))
        gloo_threads.wait_at_exit()
        # No file object: `freeze_torch_objects` looks for file objects that are open for writing.
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        enable_faulthandler(os.open(LastPosition(leave.file).crash_file, flags, 0o600))
        if buffering == LINES:
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        program.run_program(command, plain=mode == PLAIN, begin=lambda: _send(int(line), BEGUN))
        if os.getpid() == process:
            leave.report_success(_end_of_script())
    except BaseException as error:
        if os.getpid() == process:
            _leave_after(error, hook, leave)
        # A child that the script has forked is no rank: it ends as any process does.
        trim_traceback(error)
        raise


def _leave_after(error: BaseException, hook: ExceptHook, leave: ExitReporter) -> NoReturn:
    """Report how the script ended, and end this rank."""
    if isinstance(error, SystemExit):
        if (code := system_exit_code(error)) and not program.failing(
            f"SystemExit: {error.code}", alike=partial(leave.leave_report_to_rank_0, code)
        ):
            sys.exit(code)
        sys.exit(leave.report_exit(error))
    if isinstance(error, KeyboardInterrupt):
        if program.failing(format_error(error), error):
            leave.report_failure(error, code=-signal.SIGINT)
        sys.excepthook = _print_nothing
        raise error
    # Another loader worker may die now: torch's handler raised an error into the report.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    hook.written = error
    if not program.failing(
        format_error(error), error, alike=partial(leave.leave_report_to_rank_0, 1)
    ):
        sys.exit(1)
    program.explain(error)
    leave.report_failure(error, code=1, raised=True)
    sys.excepthook(type(error), error, error.__traceback__)
    sys.exit(1)


class ExceptHook:
    """The innermost sys.excepthook: does not print an exception that is already in the file.

    A library's hook is called as under plain Python. The one of torch.distributed prints what the
    hook before it prints, on every rank that a failed peer takes along.
    """

    written: BaseException | None = None

    def __call__(
        self, kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        """Print an exception for which the script itself called the hook."""
        if error is not self.written:
            sys.__excepthook__(kind, error, frames)


def _wait_for_go(line: int) -> None:
    os.set_inheritable(line, False)
    if STORE_FD in os.environ:
        os.set_inheritable(int(os.environ[STORE_FD]), False)
    _send(line, READY)
    if os.read(line, 1) != GO:
        os._exit(1)  # the supervisor was killed before the reaper knew this rank


def _send(line: int, message: bytes) -> None:
    with suppress(BrokenPipeError):  # the supervisor is gone: the reaper ends this rank
        os.write(line, message)


@dataclass(frozen=True)
class ExitReporter:
    """Writes how this rank ended, for the supervisor."""

    line: int
    rank: int
    file: Path

    def report_exit(self, leaving: SystemExit) -> int:
        """Report SystemExit and return its exit code; the supervisor prints its message."""
        code, line = system_exit_code(leaving), script_line(leaving)
        if not code:
            self.report_success(line)
        elif isinstance(leaving.code, int):
            self._write(leaving, code, f"It left at {line}.\n" if line else "")
        else:
            self._write(leaving, code, f"{leaving.code}\n")
        return code

    def report_failure(self, error: BaseException, *, code: int, raised: bool = False) -> None:
        """Report an exception that escaped from the script."""
        note_thread_limit(error)
        note_interpreter(error)
        client = sys.modules.get("instep.distributed.watchdog.client")  # if the ranks have met
        if client is not None:
            note_condition(error)
            client.report_collectives(error)
        self._write(error, code, format_traceback(error), raised)

    def leave_report_to_rank_0(self, code: int) -> None:
        """Note that rank 0 fails in the same way: it may still be about to report that, so that the
        supervisor is not told."""
        now = time.time()
        failure = Failure(self.rank, now, code, is_consequence=True, is_as_of_rank_0=True)
        with program.real_files():
            failure.write(self.file)

    def _write(self, error: BaseException, code: int, text: str, raised: bool = False) -> None:
        follows = is_caused_by_another_rank(error)
        missed = awaited_rank(error)
        failure = Failure(
            self.rank, time.time(), code, raised, text, is_consequence=follows, awaited_rank=missed
        )
        self._write_failure(failure)

    def _write_failure(self, failure: Failure) -> None:
        with program.real_files():
            failure.write(self.file)
        _send(self.line, FAILED)

    def report_success(self, line: str) -> None:
        """Write the line at which the rank ended with code 0, for ranks that still wait for it."""
        path = LastPosition(self.file).finished_file
        with (
            program.real_files(),
            open(path, "w", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.write(line)


def _end_of_script() -> str:
    """Where a rank is at its end: the line that ended the script is not known, perhaps a return."""
    recorder = sys.modules.get("instep.distributed.flight_record.recorder")  # if ranks have met
    return "the end of the script" if recorder is None else str(recorder.end_of_script())


def _print_nothing(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    """Print nothing: the supervisor reports an interrupt, unless the user pressed Ctrl-C."""


if __name__ == "__main__":
    main(*sys.argv[1:])
