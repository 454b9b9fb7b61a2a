"""Every INSTEP_* variable that a user may set: name, default, meaning.

What `instep run` itself tells its ranks is not a knob; it stands in `launchers.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from instep.errors import LaunchVariablesError


@dataclass(frozen=True)
class Knob:
    """One variable; `str(knob)` and `int(knob)` read the environment as it is now."""

    name: str
    default: str
    meaning: str

    def __str__(self) -> str:
        return os.environ.get(self.name, self.default)

    def __int__(self) -> int:
        try:
            return int(str(self))
        except ValueError:
            raise LaunchVariablesError.not_a_number(self.name, str(self)) from None


DEVICE = Knob("INSTEP_DEVICE", "auto", "auto: CUDA where there is one; cpu: never.")
BACKEND = Knob(
    "INSTEP_BACKEND",
    "auto",
    "What CPU ranks talk through: gloo; shm: shared memory on each host; auto: shm if possible.",
)
TIMEOUT = Knob("INSTEP_TIMEOUT", "600", "Seconds until a collective or a rendezvous gives up.")
ARRIVAL_NOTICE = Knob(
    "INSTEP_ARRIVAL_NOTICE", "30", "Seconds until one line says for which ranks others wait."
)
BUCKET_MIB = Knob("INSTEP_BUCKET_MIB", "25", "Gradients that travel together, in MiB.")
SEED = Knob("INSTEP_SEED", "", "What unedited scripts are seeded with; unset: drawn by rank 0.")
LOAD = Knob(
    "INSTEP_LOAD",
    "own",
    "In an unedited script, own: each rank loads its rows of every batch; whole: each rank loads "
    "everything, with the random numbers of plain Python.",
)
DIST_FILE = Knob(
    "INSTEP_DIST_FILE",
    "",
    "Where the ranks of several hosts meet without MASTER_ADDR: a file that all of them see.",
)
WATCH = Knob("INSTEP_WATCH", "on", "off: no process beside each rank that sees it die or hang.")


def patience() -> timedelta:
    """How long a collective or a rendezvous waits: INSTEP_TIMEOUT."""
    return timedelta(seconds=int(TIMEOUT))
