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
from instep.verify.recording.records import RunPlan, RunRecord, read_run

PINNED = 5
"""How many first steps are compared at the oracle's own parameters."""
REVERSED = "each batch's samples in reverse order"
PERTURBED = "parameters one rounding error away before the first step"
ROUNDING_RUNS = 2
"""How often the pinned steps are made again with other rounding, where it is in doubt."""
FIXED_SEEDS = {settings.SEED.name: "0", "PYTHONHASHSEED": "0"}
"""What would be drawn anew for each run of a script that is not seeded."""
BASE_TIMEOUT = 60.0
TIMEOUT_FACTOR = 20.0
"""A run may take this many seconds, plus this many times as long as one process took."""


class RankStarter(Protocol):
    """A way to run a command as ranks."""

    def __call__(self, n: int, folder: Path, command: Sequence[str], limit: float | None) -> None:
        """Return when all `n` ranks (0: one plain process) have ended well.

        Raises ScriptFailedError, or ScriptLateError after `limit` seconds.
        """


@dataclass(frozen=True)
class SingleRankRuns:
    """The runs of one process, which all others are compared with."""

    oracle: RunRecord
    """One process, the whole batch."""
    again: RunRecord
    """The same again as far as the last pinned step, with whole gradients and states."""
    plain: RunRecord | None
    """The first steps in plain Python, without instep; None if the script cannot run so."""
    noise: RunRecord
    """One process against itself."""
    noise_by: str
    """How: REVERSED or PERTURBED."""
    states: str
    """Folder of the states before the pinned steps."""
    rounded: tuple[RunRecord, ...] = ()
    """The pinned steps, each from a rounding error beside its state; empty where nothing was in
    doubt."""

    @property
    def with_other_rounding(self) -> tuple[RunRecord, ...]:
        """Those whose gradients differ from the oracle's by rounding only."""
        return ((self.noise,) if self.noise_by == REVERSED else ()) + self.rounded


@dataclass(frozen=True)
class MultiRankRuns:
    """The runs on several ranks."""

    pinned: RunRecord
    """The pinned steps, each from the oracle's own state."""
    free: RunRecord
    """All steps."""


class ScriptRunner:
    """Makes runs of one command, each in a folder of its own."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        start: RankStarter,
        log: Callable[[str], None],
    ) -> None:
        self._command = command
        self._folder = folder
        self._start = start
        self._log = log
        self._limit: float | None = None

    def run(self, name: str, n: int, plan: RunPlan) -> RunRecord:
        """One run. Raises ScriptFailedError, ScriptLateError, StepsError."""
        self._log(name)
        folder = self._folder / name.replace(" ", "-")
        folder.mkdir()
        plan.write(folder)
        started = time.monotonic()
        self._start(n, folder, self._command, self._limit)
        seconds = time.monotonic() - started
        if self._limit is None:
            self._limit = BASE_TIMEOUT + TIMEOUT_FACTOR * seconds
        run = read_run(folder, max(n, 1), seconds)
        if not run.steps:
            raise StepsError(n)
        return run

    def path(self, name: str) -> str:
        """Where the run of this name lies."""
        return str(self._folder / name.replace(" ", "-"))


def run_single_rank(
    runner: ScriptRunner, steps: int | None, usable: Callable[[RunRecord, RunRecord], bool]
) -> SingleRankRuns:
    """Every run of one process that a verdict needs.

    Args:
        steps: where to stop; None: where the script ends.
        usable: whether a run with reversed batches (second) differs from another one (first) by
            rounding, and not by more or by nothing.

    Raises ScriptFailedError, ScriptLateError, StepsError.
    """
    free = RunPlan(stop=steps, final=True)
    oracle = runner.run("oracle", 1, free)
    keep = choose_pinned_steps(oracle)
    again = runner.run("oracle again", 1, RunPlan(stop=keep[-1] + 1, keep=keep, states=True))
    plain = _plain(runner, RunPlan(stop=len(keep), without_instep=True))
    noise, noise_by = _noise(runner, oracle, again, replace(free, keep=(0,)), usable)
    return SingleRankRuns(oracle, again, plain, noise, noise_by, runner.path("oracle again"))


def run_multi_rank(
    runner: ScriptRunner, n: int, steps: int | None, single: SingleRankRuns
) -> MultiRankRuns:
    """Both runs on `n` ranks. Raises ScriptFailedError, ScriptLateError, StepsError."""
    keep = tuple(single.again.gradients)
    pin = RunPlan(stop=keep[-1] + 1, keep=keep, pin=single.states)
    return MultiRankRuns(
        pinned=runner.run(f"pinned at {n}", n, pin),
        free=runner.run(f"free at {n}", n, RunPlan(stop=steps, final=True)),
    )


def run_with_rounding(runner: ScriptRunner, single: SingleRankRuns) -> SingleRankRuns:
    """How far off the pinned gradients may be by rounding alone: where a unit is on for one
    rounding and off for another (ReLU, max-pooling), by much more than a rounding error.

    Raises ScriptFailedError, ScriptLateError, StepsError.
    """
    keep = tuple(single.again.gradients)
    runs = [
        runner.run(
            f"rounding {k}", 1, RunPlan(stop=keep[-1] + 1, keep=keep, pin=single.states, rounding=k)
        )
        for k in range(1, ROUNDING_RUNS + 1)
    ]
    return replace(single, rounded=tuple(runs))


def choose_pinned_steps(oracle: RunRecord) -> tuple[int, ...]:
    """The first steps, and the first one with another number of samples (the tail of an epoch)."""
    first = range(min(PINNED, oracle.steps))
    samples = [step.samples for step in oracle.ranks[0].steps]
    tail = next((k for k, count in enumerate(samples) if count != samples[0]), 0)
    return tuple(sorted({*first, tail}))


def _plain(runner: ScriptRunner, plan: RunPlan) -> RunRecord | None:
    try:
        return runner.run("plain python", 0, plan)
    except VerificationError:
        return None


def _noise(
    runner: ScriptRunner,
    oracle: RunRecord,
    again: RunRecord,
    plan: RunPlan,
    usable: Callable[[RunRecord, RunRecord], bool],
) -> tuple[RunRecord, str]:
    """With reversed batches or, where that is of no use, with perturbed parameters."""
    end = oracle.ranks[0].end
    if end is not None and end.indices:
        backwards = runner.run(REVERSED, 1, replace(plan, reverse=True))
        if usable(again, backwards):
            return backwards, REVERSED
    return runner.run(PERTURBED, 1, replace(plan, rounding=1)), PERTURBED


class InstepRunStarter:
    """Starts ranks with `instep run`; the script has no input, and its output is kept back."""

    def __call__(self, n: int, folder: Path, command: Sequence[str], limit: float | None) -> None:
        """As Starter has it."""
        launcher = ["-m", "instep", "run", "--nnodes", "1", "-n", str(n)] if n else []
        entry = ["-m", "instep.verify.recording.entry", str(folder)]
        output = folder / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *launcher, *entry, *command],
                env=FIXED_SEEDS | os.environ,
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
