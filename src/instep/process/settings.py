"""Every INSTEP_* variable: those that a user may set, with what they take, and instep's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches

from instep.process.errors import LaunchVariablesError

PREFIX = "INSTEP_"
_LONGEST = 2_000_000
"""Seconds, 23 days: sockets take no more than 2**31 milliseconds."""


@dataclass(frozen=True)
class Setting:
    """One variable; `str(knob)` and `int(knob)` read the environment as it is now.

    Both raise LaunchVariablesError for a value that it does not take. An empty value is the same
    as none.
    """

    name: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()
    """The words that it takes; empty: numbers or any text."""
    numbers: range | None = None
    """The whole numbers that it takes; None: words or any text."""
    text: str = "the path of a file"
    """What any text means."""

    def __str__(self) -> str:
        return self.read(os.environ)

    def __int__(self) -> int:
        return int(str(self))

    def read(self, environ: Mapping[str, str]) -> str:
        """Its value there, or its default."""
        value = environ.get(self.name) or self.default
        if value != self.default and not self._takes(value):
            raise LaunchVariablesError(
                f"{self.name} takes {self.takes}, not {value!r}. {self.meaning}"
            )
        return value

    @property
    def takes(self) -> str:
        """What values it takes, in words."""
        if self.numbers is not None:
            return f"a whole number from {self.numbers[0]} to {self.numbers[-1]}"
        *others, last = self.choices or (self.text,)
        return f"{', '.join(others)} or {last}" if others else last

    def _takes(self, value: str) -> bool:
        if self.numbers is not None:
            # Python's int() reads at most 4300 digits, and also "1_0" and other scripts' digits.
            return value.isascii() and value.isdigit() and len(value) < 20 and self._in(value)
        return value in self.choices or not self.choices

    def _in(self, digits: str) -> bool:
        return self.numbers is not None and int(digits) in self.numbers


DEVICE = Setting(
    "INSTEP_DEVICE", "auto", "auto: CUDA where there is one; cpu: never.", choices=("auto", "cpu")
)
BACKEND = Setting(
    "INSTEP_BACKEND",
    "auto",
    "What CPU ranks talk through: gloo; shm: shared memory on each host; auto: shm if possible.",
    choices=("auto", "gloo", "shm"),
)
TIMEOUT = Setting(
    "INSTEP_TIMEOUT",
    "600",
    "Seconds until a collective or a rendezvous gives up.",
    numbers=range(1, _LONGEST + 1),
)
ARRIVAL_NOTICE = Setting(
    "INSTEP_ARRIVAL_NOTICE",
    "10",
    "Seconds until a line says for which ranks others wait; the next one after twice as long.",
    numbers=range(_LONGEST + 1),
)
BUCKET_MIB = Setting(
    "INSTEP_BUCKET_MIB",
    "25",
    "Gradients that travel together, in MiB; 0: each on its own.",
    numbers=range(2**20 + 1),
)
COMPRESSION = Setting(
    "INSTEP_COMPRESSION",
    "none",
    "How an unedited script's gradients are sent; all but none make them inexact.",
    choices=("none", "fp16", "bf16", "powersgd"),
)
SEED = Setting(
    "INSTEP_SEED",
    "",
    "What unedited scripts are seeded with; unset: drawn by rank 0.",
    numbers=range(2**32),
)
LOAD = Setting(
    "INSTEP_LOAD",
    "own",
    "In an unedited script, own: each rank loads its rows of every batch; whole: each rank loads "
    "everything, with the random numbers of plain Python.",
    choices=("own", "whole"),
)
DIST_FILE = Setting(
    "INSTEP_DIST_FILE",
    "",
    "Where the ranks of several hosts meet without MASTER_ADDR: a file that all of them see.",
)
SECRET = Setting(
    "INSTEP_SECRET",
    "",
    "What proves that a process belongs to the job; the same on all hosts. On one host "
    "`instep run` draws one for each job.",
    text="16 characters or more",
)
WATCH = Setting(
    "INSTEP_WATCH",
    "on",
    "off: no process beside each rank that sees it die or hang.",
    choices=("on", "off"),
)

SETTINGS = (
    *(DEVICE, BACKEND, TIMEOUT, ARRIVAL_NOTICE, BUCKET_MIB, COMPRESSION),
    *(SEED, LOAD, DIST_FILE, SECRET, WATCH),
)
"""What a user may set; docs/variables.md shows it."""

INTERNAL = frozenset({"INSTEP_FAILURE_FILE", "INSTEP_JOB", "INSTEP_SOURCE", "INSTEP_STORE_FD"})
"""What instep's own processes tell each other; see `distributed/identity/launchers.py`."""


def check_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Raise LaunchVariablesError unless every INSTEP_* variable there exists and has a value that
    it takes; the error names all that are wrong."""
    known = INTERNAL.union(knob.name for knob in SETTINGS)
    wrong = [
        LaunchVariablesError(f"instep has no variable {name}. {_advice(name)}")
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known
    ]
    for knob in SETTINGS:
        try:
            knob.read(environ)
        except LaunchVariablesError as error:
            wrong.append(error)
    if wrong:
        raise LaunchVariablesError("\n".join(map(str, wrong)))


def _advice(name: str) -> str:
    """Names the variable that is spelt nearly so, if there is one."""
    ends = [knob.name.removeprefix(PREFIX) for knob in SETTINGS]
    near = get_close_matches(name.removeprefix(PREFIX).upper(), ends, n=1, cutoff=0.7)
    if near:
        return f"Did you mean {PREFIX}{near[0]}?"
    return "docs/variables.md lists what there is."


def timeout() -> timedelta:
    """How long a collective or a rendezvous waits: INSTEP_TIMEOUT."""
    return timedelta(seconds=int(TIMEOUT))
