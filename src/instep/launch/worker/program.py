"""Run the user's program in this process, as one of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from instep.distributed.identity import launchers
from instep.distributed.rendezvous import job_fingerprint
from instep.distributed.watchdog.signals.rank_signals import rank_signals
from instep.launch.worker import (
    local_rank_argument,
    main_module,
    static_opt_out,
    torch_import,
    torch_init,
)
from instep.process import settings
from instep.unedited import bitwise, session
from instep.unedited.errors import CannotSaveScriptError
from instep.unedited.files import bypass

real_files = bypass.bypass_overlay
failing, explain = session.reports_failure, session.add_notes


def run_program(
    command: Sequence[str], *, plain: bool = False, begin: Callable[[], None] = lambda: None
) -> None:
    """Run `script.py args…` or `-m package.module args…`. Its exceptions escape.

    It runs unedited, seeing one process and with its work divided, unless `plain` is set or its
    text opts out. `begin` is called when it is about to begin.
    """
    if not _is_instep_entry(command):
        job_fingerprint.announce(command)
    torch_import.prepare()
    torch_init.install_patches()
    local_rank_argument.add_local_rank(launchers.detect())
    if not plain:
        start_session(command)
    begin()
    folder = str(settings.CHECKPOINT)
    if folder and not _is_instep_entry(command):
        main_module.run_as_main(command, _saved_in(folder, command))
    else:
        main_module.run_as_main(command)
    rank_signals.end_of_script()


def _saved_in(folder: str, command: Sequence[str]) -> main_module.Compile:
    """How the files of a script are compiled whose training loops are saved in `folder`."""
    if session.current() is None:
        raise CannotSaveScriptError(
            f"--checkpoint {folder}: every rank runs this script as it is, and instep does not see "
            "what the ranks hold. Let the script save itself with instep.Checkpoint, and run it "
            "without --checkpoint."
        )
    from instep.launch.worker import training_loops  # it imports torch

    training_loops.install(command, Path(folder).absolute())
    return training_loops.compile_script


def start_session(command: Sequence[str]) -> None:
    """Start the unedited session for `command`, or print why its text opts out."""
    if _is_instep_entry(command):
        return
    reason = static_opt_out.find_opt_out(command)
    if reason is None:
        session.start()
    else:
        bitwise.check_divided(reason)
        session.print_opt_out(launchers.detect(), reason, static_opt_out.batch_effect(reason))


def _is_instep_entry(command: Sequence[str]) -> bool:
    """Whether this is a module of instep, which runs the user's program itself."""
    return command[0] == "-m" and command[1].partition(".")[0] == "instep"
