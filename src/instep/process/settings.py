"""Every INSTEP_* variable: those that a user may set, with their values, and instep's own."""

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
    """One variable; `str(setting)` and `int(setting)` read the environment as it is now.

    Both raise LaunchVariablesError for a wrong value. An empty value is the same as none.
    """

    name: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()
    """The words that are allowed; empty: numbers or any text."""
    numbers: range | None = None
    """The whole numbers that are allowed; None: words or any text."""
    text: str = "the path of a file"
    """The meaning of a text, where any is allowed."""

    def __str__(self) -> str:
        return self.read(os.environ)

    def __int__(self) -> int:
        return int(str(self))

    def read(self, environ: Mapping[str, str]) -> str:
        """Its value there, or its default."""
        value = environ.get(self.name) or self.default
        if value != self.default and not self._allows(value):
            raise LaunchVariablesError(
                f"{self.name} takes {self.domain}, not {value!r}. {self.meaning}"
            )
        return value

    @property
    def domain(self) -> str:
        """The values that are allowed, in words."""
        if self.numbers is not None:
            return f"a whole number from {self.numbers[0]} to {self.numbers[-1]}"
        *others, last = self.choices or (self.text,)
        return f"{', '.join(others)} or {last}" if others else last

    def _allows(self, value: str) -> bool:
        if self.numbers is not None:
            # Python's int() reads at most 4300 digits, and also "1_0" and other scripts' digits.
            return (
                value.isascii()
                and value.isdigit()
                and len(value) < 20
                and int(value) in self.numbers
            )
        return value in self.choices or not self.choices


DEVICE = Setting(
    "INSTEP_DEVICE",
    "auto",
    "auto: the accelerator (GPU, NPU, …) where there is one; cpu: never.",
    choices=("auto", "cpu"),
)
BACKEND = Setting(
    "INSTEP_BACKEND",
    "auto",
    "Transport of CPU ranks: gloo; shm: shared memory on each host; auto: shm if possible.",
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
    "Seconds until a line says for which ranks others wait. The next one comes after twice as "
    "long; instep run then says so, too, if its ranks are still starting.",
    numbers=range(_LONGEST + 1),
)
BUCKET_MIB = Setting(
    "INSTEP_BUCKET_MIB",
    "25",
    "Size of gradient buckets, in MiB; 0: each gradient on its own.",
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
    "Seed of unedited scripts; unset: drawn by rank 0.",
    numbers=range(2**32),
)
CHECKPOINT = Setting(
    "INSTEP_CHECKPOINT",
    "",
    "The folder in which the training loop of an unedited script is saved, and from which it goes "
    "on; as `instep run --checkpoint`.",
    text="the path of a folder",
)
LOAD = Setting(
    "INSTEP_LOAD",
    "auto",
    "In an unedited script, own: each rank loads its rows of every batch, where that is faster, "
    "and a sample draws from a random stream of its own; whole: each rank loads everything, with "
    "the random numbers of plain Python; auto: own, but whole where samples draw and are small.",
    choices=("auto", "own", "whole"),
)
BITWISE = Setting(
    "INSTEP_BITWISE",
    "0",
    "The number of shards into which every batch is cut, so that the numbers have the same bits on "
    "any number of ranks that divides it: a power of two; 0: a shard for each rank.",
    numbers=range(1025),
)
DIVIDE = Setting(
    "INSTEP_DIVIDE",
    "auto",
    "In an unedited script, auto: module calls that take less time whole are computed whole on "
    "every rank, and on CPUs of one host rank 0 goes on alone where that takes less time than all "
    "ranks do; always: all calls that can be divided are.",
    choices=("auto", "always"),
)
HOST_COPY = Setting(
    "INSTEP_HOST_COPY",
    "auto",
    "on: CPU ranks of one host keep one copy of large parameters, of their optimizer's state, and "
    "of the sums of their gradients, and each computes its part; auto: if they run on one NUMA "
    "node; off: every rank keeps all.",
    choices=("auto", "on", "off"),
)
DIST_FILE = Setting(
    "INSTEP_DIST_FILE",
    "",
    "Where the ranks of several hosts meet without MASTER_ADDR: a file that all of them see.",
)
SECRET = Setting(
    "INSTEP_SECRET",
    "",
    "Proves that a process belongs to the job; the same on all hosts. On one host `instep run` "
    "draws one for each job.",
    text="16 characters or more",
)
WATCH = Setting(
    "INSTEP_WATCH",
    "on",
    "off: no process beside each rank that sees it die or hang.",
    choices=("on", "off"),
)
DRIFT_STEPS = Setting(
    "INSTEP_DRIFT_STEPS",
    "100",
    "Steps after which the ranks compare parameters, buffers and hyper-parameters again; 0: never.",
    numbers=range(_LONGEST + 1),
)
NAN = Setting(
    "INSTEP_NAN",
    "warn",
    "When an optimizer steps with a gradient that is not finite, warn: a warning, once; error: "
    "an error instead, for which each step waits for the GPU; off: nothing.",
    choices=("warn", "error", "off"),
)
TIMELINE = Setting(
    "INSTEP_TIMELINE",
    "",
    "A file for the collectives and phases of all ranks; `instep timeline` and Perfetto show it.",
)
RANK_LIMIT = Setting(
    "INSTEP_RANK_LIMIT",
    "memory",
    "memory: as many ranks on a host as its memory has room for, 128 MiB for each; none: as many "
    "as asked for.",
    choices=("memory", "none"),
)
STALL_SECONDS = Setting(
    "INSTEP_STALL_SECONDS",
    "30",
    "Seconds for which ranks wait in a collective until a report names the ranks that keep them "
    "from it; again after 2, 4 and 8 times as long. 0: no report.",
    numbers=range(_LONGEST + 1),
)

SETTINGS = (
    *(DEVICE, BACKEND, TIMEOUT, ARRIVAL_NOTICE, BUCKET_MIB, COMPRESSION),
    *(SEED, CHECKPOINT, LOAD, DIVIDE, BITWISE, HOST_COPY, DIST_FILE, SECRET, WATCH),
    *(DRIFT_STEPS, NAN, TIMELINE, RANK_LIMIT, STALL_SECONDS),
)
"""The settings for users; docs/variables.md shows them."""

INTERNAL = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *("ELASTIC_FD", "FAILURE_FILE", "HOST_CORES", "JOB", "RESTARTS", "SOURCE", "STANDBY"),
        "STORE_FD",
    )
)
"""Set by instep's own processes for each other; see `distributed/identity/launchers.py`."""


def check_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Raise LaunchVariablesError unless every INSTEP_* variable there is known and has an allowed
    value; the error names all that are wrong."""
    known = INTERNAL.union(setting.name for setting in SETTINGS)
    wrong = [
        LaunchVariablesError(f"instep has no variable {name}. {_advice(name)}")
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known
    ]
    for setting in SETTINGS:
        try:
            setting.read(environ)
        except LaunchVariablesError as error:
            wrong.append(error)
    if wrong:
        raise LaunchVariablesError("\n".join(map(str, wrong)))


def _advice(name: str) -> str:
    """Names the variable that is spelt nearly so, if there is one."""
    ends = [setting.name.removeprefix(PREFIX) for setting in SETTINGS]
    near = get_close_matches(name.removeprefix(PREFIX).upper(), ends, n=1, cutoff=0.7)
    if near:
        return f"Did you mean {PREFIX}{near[0]}?"
    return "docs/variables.md lists what there is."


def is_bitwise() -> bool:
    """Whether the number of shards of every batch is fixed: INSTEP_BITWISE."""
    return int(BITWISE) > 0


def divides_by_time() -> bool:
    """Whether measured times decide how calls are computed: INSTEP_DIVIDE."""
    return str(DIVIDE) == "auto" and not is_bitwise()


def timeout() -> timedelta:
    """The limit for a collective or a rendezvous: INSTEP_TIMEOUT."""
    return timedelta(seconds=int(TIMEOUT))
