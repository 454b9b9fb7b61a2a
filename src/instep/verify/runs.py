"""Which runs are made of a script, and how one is made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from instep.errors import VerificationError
from instep.process import settings
from instep.verify.errors import ScriptFailedError, ScriptLateError, StepsError
from instep.verify.recording.records import Plan, Run, read_run

PINNED = 5
"""How many first steps are compared at the oracle's own parameters."""
REVERSED = "each batch's samples in reverse order"
PERTURBED = "parameters one rounding error away before the first step"
ROUNDINGS = 2
"""How often the pinned steps are made again with other rounding, where it is in doubt."""
EQUAL = {settings.SEED.name: "0", "PYTHONHASHSEED": "0"}
"""What would be drawn anew for each run of a script that is not seeded."""
PATIENCE = 60.0
SLOWER = 20.0
"""A run may take this many seconds, plus this many times as long as one process took."""


class Starter(Protocol):
    """A way to run a command as ranks."""

    def __call__(self, n: int, folder: Path, command: Sequence[str], limit: float | None) -> None:
        """Return when all `n` ranks (0: one plain process) have ended well.

        Raises ScriptFailedError, or ScriptLateError after `limit` seconds.
        """


@dataclass(frozen=True)
class Alone:
    """The runs of one process, which all others are compared with."""

    oracle: Run
    """One process, the whole batch."""
    again: Run
    """The same again as far as the last pinned step, with whole gradients and states."""
    plain: Run | None
    """The first steps in plain Python, without instep; None if the script cannot run so."""
    noise: Run
    """One process against itself."""
    noise_by: str
    """How: REVERSED or PERTURBED."""
    states: str
    """Folder of the states before the pinned steps."""
    rounded: tuple[Run, ...] = ()
    """The pinned steps, each from a rounding error beside its state; empty where nothing was in
    doubt."""

    @property
    def with_other_rounding(self) -> tuple[Run, ...]:
        """Those whose gradients differ from the oracle's by rounding only."""
        return ((self.noise,) if self.noise_by == REVERSED else ()) + self.rounded


@dataclass(frozen=True)
class Together:
    """The runs on several ranks."""

    pinned: Run
    """The pinned steps, each from the oracle's own state."""
    free: Run
    """All steps."""


class Rehearsal:
    """Makes runs of one command, each in a folder of its own."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        start: Starter,
        say: Callable[[str], None],
    ) -> None:
        self._command = command
        self._folder = folder
        self._start = start
        self._say = say
        self._limit: float | None = None

    def run(self, name: str, n: int, plan: Plan) -> Run:
        """One run. Raises ScriptFailedError, ScriptLateError, StepsError."""
        self._say(name)
        folder = self._folder / name.replace(" ", "-")
        folder.mkdir()
        plan.write(folder)
        begun = time.monotonic()
        self._start(n, folder, self._command, self._limit)
        seconds = time.monotonic() - begun
        if self._limit is None:
            self._limit = PATIENCE + SLOWER * seconds
        run = read_run(folder, max(n, 1), seconds)
        if not run.steps:
            raise StepsError(n)
        return run

    def path(self, name: str) -> str:
        """Where the run of this name lies."""
        return str(self._folder / name.replace(" ", "-"))


def run_alone(rehearsal: Rehearsal, steps: int | None, usable: Callable[[Run, Run], bool]) -> Alone:
    """Every run of one process that a verdict needs.

    Args:
        steps: where to stop; None: where the script ends.
        usable: whether a run with reversed batches (second) differs from another one (first) by
            rounding, and not by more or by nothing.

    Raises ScriptFailedError, ScriptLateError, StepsError.
    """
    free = Plan(stop=steps, final=True)
    oracle = rehearsal.run("oracle", 1, free)
    keep = steps_to_pin(oracle)
    again = rehearsal.run("oracle again", 1, Plan(stop=keep[-1] + 1, keep=keep, states=True))
    plain = _plain(rehearsal, Plan(stop=len(keep), without_instep=True))
    noise, noise_by = _noise(rehearsal, oracle, again, replace(free, keep=(0,)), usable)
    return Alone(oracle, again, plain, noise, noise_by, rehearsal.path("oracle again"))


def run_together(rehearsal: Rehearsal, n: int, steps: int | None, alone: Alone) -> Together:
    """Both runs on `n` ranks. Raises ScriptFailedError, ScriptLateError, StepsError."""
    keep = tuple(alone.again.gradients)
    pin = Plan(stop=keep[-1] + 1, keep=keep, pin=alone.states)
    return Together(
        pinned=rehearsal.run(f"pinned at {n}", n, pin),
        free=rehearsal.run(f"free at {n}", n, Plan(stop=steps, final=True)),
    )


def run_rounded(rehearsal: Rehearsal, alone: Alone) -> Alone:
    """How far off the pinned gradients may be by rounding alone: where a unit is on for one
    rounding and off for another (ReLU, max-pooling), by much more than a rounding error.

    Raises ScriptFailedError, ScriptLateError, StepsError.
    """
    keep = tuple(alone.again.gradients)
    runs = [
        rehearsal.run(
            f"rounding {k}", 1, Plan(stop=keep[-1] + 1, keep=keep, pin=alone.states, rounding=k)
        )
        for k in range(1, ROUNDINGS + 1)
    ]
    return replace(alone, rounded=tuple(runs))


def steps_to_pin(oracle: Run) -> tuple[int, ...]:
    """The first steps, and the first one with another number of samples (the tail of an epoch)."""
    first = range(min(PINNED, oracle.steps))
    samples = [step.samples for step in oracle.ranks[0].steps]
    tail = next((k for k, count in enumerate(samples) if count != samples[0]), 0)
    return tuple(sorted({*first, tail}))


def _plain(rehearsal: Rehearsal, plan: Plan) -> Run | None:
    try:
        return rehearsal.run("plain python", 0, plan)
    except VerificationError:
        return None


def _noise(
    rehearsal: Rehearsal,
    oracle: Run,
    again: Run,
    plan: Plan,
    usable: Callable[[Run, Run], bool],
) -> tuple[Run, str]:
    """With reversed batches or, where that is of no use, with perturbed parameters."""
    end = oracle.ranks[0].end
    if end is not None and end.indices:
        backwards = rehearsal.run(REVERSED, 1, replace(plan, reverse=True))
        if usable(again, backwards):
            return backwards, REVERSED
    return rehearsal.run(PERTURBED, 1, replace(plan, rounding=1)), PERTURBED


class InstepRun:
    """Starts ranks with `instep run`; the script has no input, and its output is kept back."""

    def __call__(self, n: int, folder: Path, command: Sequence[str], limit: float | None) -> None:
        """As Starter has it."""
        launcher = ["-m", "instep", "run", "--nnodes", "1", "-n", str(n)] if n else []
        entry = ["-m", "instep.verify.recording.entry", str(folder)]
        output = folder / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *launcher, *entry, *command],
                env=EQUAL | os.environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                raise ScriptLateError(n, limit or 0.0, _reached(folder, n)) from None
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    process.wait()
        if code:
            raise ScriptFailedError(n, _last_words(output, n), _reached(folder, n))


def _last_words(output: Path, n: int) -> str:
    """What the supervisor reported, or else the end of what was printed."""
    text = output.read_text(errors="replace")
    start = text.rfind("\ninstep: rank ") if n else -1
    if start < 0 and not text.startswith("instep: "):
        lines = text.splitlines()
        return os.linesep.join(lines[-30:])
    return text[start + 1 :].rstrip()


def _reached(folder: Path, n: int) -> list[int]:
    return [len(rank.steps) for rank in read_run(folder, n, 0.0).ranks]
