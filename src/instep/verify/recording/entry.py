"""The entry point of each recorded rank.

`instep run -n N -m instep.verify.recording.entry FOLDER script.py args…` runs the script as
`instep run -n N script.py args…` does, with the recorder installed. FOLDER holds the run plan and
receives the records.
"""

from __future__ import annotations

import sys
from pathlib import Path

from instep.distributed.rendezvous import bootstrap
from instep.launch.worker import main_module, program
from instep.process.patching import PatchHandle
from instep.unedited import seeds
from instep.verify.recording.bit_recorder import BitRecorder
from instep.verify.recording.recorder import Recorder
from instep.verify.recording.records import RunPlan


def main(folder: str, *command: str) -> None:
    """Run `command` (`script.py args…` or `-m module args…`) and record it."""
    where = Path(folder)
    plan = RunPlan.read(where)
    if plan.without_instep:
        seeds.seed_everything(seeds.choose_seed())
        PatchHandle(seeds.SEED_PATCHES)
    else:
        program.start_session(command)
    kind = BitRecorder if plan.bits else Recorder
    recorder = kind(plan, where, bootstrap.current().rank)
    recorder.install()
    try:
        main_module.run_as_main(command)
    finally:
        recorder.finish()


if __name__ == "__main__":
    del sys.path[0]  # the folder that `-m` put there; the script brings its own
    main(*sys.argv[1:])
