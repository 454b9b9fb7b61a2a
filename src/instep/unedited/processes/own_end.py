"""A script ends its process itself: by `os._exit`, a signal, or by becoming another program."""

from __future__ import annotations

import os
import signal
from typing import Any, Protocol

from instep.distributed.communication.rank_local import is_forked, is_rank_local
from instep.distributed.watchdog.signals import script_handlers
from instep.process import in_main_thread
from instep.process.patching import Function
from instep.process.process_value import ProcessValue
from instep.unedited.processes import children


class EndingRanks(Protocol):
    """The ranks of a script whose process is about to end."""

    def wait_to_exit(self, code: int) -> None:
        """Return when this rank may end with this exit code, -n for signal n: rank 0 has come so
        far, too, or is not going to."""

    def leave_to_successor(self) -> None:
        """Let the other ranks end: only rank 0 becomes another program. Collective."""


_ranks = ProcessValue[EndingRanks | None](None)
_DEADLY = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT)


def set_ranks(ranks: EndingRanks | None) -> None:
    """Let these ranks end together; None: each for itself."""
    _ranks.value = ranks


def exit_now(original: Function, status: int) -> Any:
    """For os._exit."""
    if isinstance(status, int) and (ranks := _own_ranks(in_any_thread=bool(status & 0xFF))):
        ranks.wait_to_exit(status & 0xFF)
    return original(status)


def abort(original: Function) -> Any:
    """For os.abort."""
    if ranks := _own_ranks():
        ranks.wait_to_exit(-signal.SIGABRT)
    return original()


def kill(original: Function, pid: int, number: int) -> Any:
    """For os.kill, of the process itself or of a command."""
    ends = number in _DEADLY and signal.getsignal(number) is signal.SIG_DFL
    if pid == os.getpid():
        script_handlers.announce_own(number)
    if pid == os.getpid() and ends and (ranks := _own_ranks()):
        ranks.wait_to_exit(-number)
    return children.kill(original, pid, number)


def execute(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For os.execv and os.execve, which the other functions of this kind call."""
    if not is_rank_local() and (ranks := _own_ranks()):
        ranks.leave_to_successor()
    return original(*args, **kwargs)


def _own_ranks(*, in_any_thread: bool = False) -> EndingRanks | None:
    """The ranks, if this is one of them, in its main thread, and no process that it has forked."""
    if is_forked():
        return None
    return _ranks.value if in_any_thread or in_main_thread() else None
