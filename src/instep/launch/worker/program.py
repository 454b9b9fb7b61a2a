"""Run the user's program in this process, as one of several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from instep.distributed.identity import launchers
from instep.distributed.rendezvous import job_fingerprint
from instep.launch.worker import (
    gc_tuning,
    local_rank_argument,
    main_module,
    static_opt_out,
    torch_init,
)
from instep.unedited import session
from instep.unedited.files import bypass

real_files = bypass.bypass_overlay
failing, explain = session.reports_failure, session.add_notes


def run_program(command: Sequence[str], *, plain: bool = False) -> None:
    """Run `script.py args…` or `-m package.module args…`. Its exceptions escape.

    It runs unedited, seeing one process and with its work divided, unless `plain` is set or its
    text opts out.
    """
    if not _is_instep_entry(command):
        job_fingerprint.announce(command)
    gc_tuning.freeze_torch_objects()
    torch_init.install_patches()
    local_rank_argument.add_local_rank(launchers.detect())
    if not plain:
        start_session(command)
    main_module.run_as_main(command)


def start_session(command: Sequence[str]) -> None:
    """Start the unedited session for `command`, or print why its text opts out."""
    if _is_instep_entry(command):
        return
    reason = static_opt_out.find_opt_out(command)
    if reason is None:
        session.start()
    else:
        session.print_opt_out(launchers.detect(), reason)


def _is_instep_entry(command: Sequence[str]) -> bool:
    """Whether this is a module of instep, which runs the user's program itself."""
    return command[0] == "-m" and command[1].partition(".")[0] == "instep"
