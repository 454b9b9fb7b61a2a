"""The runs of a script that a verdict needs."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from instep.errors import VerificationError
from instep.process import python_command, settings
from instep.verify import progress
from instep.verify.errors import ScriptFailedError, ScriptLateError, StepsError
from instep.verify.files.restored import put_back
from instep.verify.progress import RunProgress
from instep.verify.recording.records import RunPlan, RunRecord, read_run

PINNED = 5
"""Number of first steps that are compared at the oracle's own parameters."""
LATER_PINNED = (0.5, 0.75, 1.0)
PINNED_UP_TO = 100
"""Later steps that are compared so too: these shares of all steps, or of this many of them."""
PINNED_SHARE = 1 / 4
"""Steps 2, 4, 8, ... times PINNED_UP_TO are compared so too, up to this share of all steps: the
runs that compare gradients go on for them, and would end earlier without."""
REVERSED = "each batch's samples in reverse order"
PERTURBED = "parameters one rounding error away before the first step"
ROUNDING_RUNS = 2
"""Number of repetitions of the pinned steps with other rounding, if a gradient is in doubt."""
REPEATABLE = {
    settings.SEED.name: "0",
    settings.DIVIDE.name: "always",  # not by time
    settings.DRIFT_STEPS.name: "0",  # a verdict compares the ranks itself, and goes on
    "PYTHONHASHSEED": "0",
    "NVIDIA_TF32_OVERRIDE": "0",  # whether an algorithm of cuDNN's uses TF32 depends on the rows
}
"""Seeds that every run of an unseeded script would draw anew, no choice by time, no end, and
float32 as such."""
BASE_TIMEOUT = 60.0
TIMEOUT_FACTOR = 20.0
"""A run may take the first in seconds, plus the second times the time of one process."""


class RankStarter(Protocol):
    """Runs a command on several ranks."""

    def __call__(self, n: int, folder: Path, command: Sequence[str], limit: float | None) -> None:
        """Return when all `n` ranks (0: one process of plain Python) have ended with code 0.

        Raises ScriptFailedError, or ScriptLateError after `limit` seconds.
        """


@dataclass(frozen=True)
class SingleRankRuns:
    """The runs of one process, with which all others are compared."""

    oracle: RunRecord
    """One process, the whole batch."""
    again: RunRecord
    """The same up to the last pinned step, with whole gradients and states."""
    plain: RunRecord | None
    """The first steps in plain Python without instep; None if the script needs instep."""
    noise: RunRecord
    """One process against itself."""
    noise_by: str
    """The difference between the two: REVERSED or PERTURBED."""
    states: str
    """Folder of the states before the pinned steps."""
    rounded: tuple[RunRecord, ...] = ()
    """The pinned steps with perturbed states; empty if no gradient was in doubt."""
    autocast: bool = True
    """Whether the pinned steps (`again` and `rounded`) were made with the script's autocast."""
    full: SingleRankRuns | None = None
    """The same with pinned steps without autocast; None if it makes no difference, or fails."""

    @property
    def with_other_rounding(self) -> tuple[RunRecord, ...]:
        """The runs whose gradients differ from the oracle's by rounding only."""
        return ((self.noise,) if self.noise_by == REVERSED else ()) + self.rounded


@dataclass(frozen=True)
class MultiRankRuns:
    """The runs on several ranks."""

    pinned: RunRecord
    """The pinned steps, each from the oracle's own state."""
    free: RunRecord
    """All steps."""
    full: RunRecord | None = None
    """The pinned steps without autocast, if one process has made them so."""


class ScriptRunner:
    """Runs one command several times, each time in a folder of its own."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        start: RankStarter,
        progress: RunProgress | None = None,
    ) -> None:
        """`progress` is told of each run that starts."""
        self._command = command
        self._folder = folder
        self._start = start
        self._progress = progress
        self._limit: float | None = None

    def run(self, name: str, n: int, plan: RunPlan, title: str = "") -> RunRecord:
        """One run, in a folder of this name. `title` says to the user what it is.

        Raises ScriptFailedError, ScriptLateError, StepsError."""
        if self._progress is not None:
            self._progress.start(title)
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
        """The folder of the run of this name."""
        return str(self._folder / name.replace(" ", "-"))


def run_single_rank(
    runner: ScriptRunner, steps: int | None, usable: Callable[[RunRecord, RunRecord], bool]
) -> SingleRankRuns:
    """Make every run of one process that a verdict needs.

    Args:
        steps: the number of steps; None: until the script ends.
        usable: whether a run with reversed batches (the second argument) differs from another run
            (the first) by rounding, and neither by more nor by nothing.

    Raises ScriptFailedError, ScriptLateError, StepsError.
    """
    free = RunPlan(stop=steps, final=True)
    oracle = runner.run("oracle", 1, free, progress.WHOLE)
    keep = choose_pinned_steps(oracle)
    first = RunPlan(stop=keep[-1] + 1, keep=keep, states=True)
    again = runner.run("oracle again", 1, first, progress.AGAIN)
    plain = _plain(runner, RunPlan(stop=len(keep), without_instep=True))
    noise, noise_by = _noise(runner, oracle, again, replace(free, keep=(0,)), usable)
    single = SingleRankRuns(oracle, again, plain, noise, noise_by, runner.path("oracle again"))
    return replace(single, full=_without_autocast(runner, single))


def run_multi_rank(
    runner: ScriptRunner, n: int, steps: int | None, single: SingleRankRuns
) -> MultiRankRuns:
    """Make both runs on `n` ranks. Raises ScriptFailedError, ScriptLateError, StepsError."""
    keep = tuple(single.again.gradients)
    pin = RunPlan(stop=keep[-1] + 1, keep=keep, pin=single.states)
    pinned = runner.run(f"pinned at {n}", n, pin, progress.pinned_steps(n))
    full = None
    if single.full is not None:
        title = progress.pinned_steps(n, autocast=False)
        full = runner.run(f"pinned at {n} in full", n, replace(pin, autocast=False), title)
    free = RunPlan(stop=steps, final=True)
    return MultiRankRuns(pinned, runner.run(f"free at {n}", n, free, progress.all_steps(n)), full)


def run_with_rounding(runner: ScriptRunner, single: SingleRankRuns) -> SingleRankRuns:
    """Measure how much the pinned gradients differ by rounding alone. They may differ by much more
    than a rounding error where a unit is on for one rounding and off for another (ReLU, max-pool).

    Raises ScriptFailedError, ScriptLateError, StepsError.
    """
    keep = tuple(single.again.gradients)
    plan = RunPlan(
        keep[-1] + 1,
        keep,
        pin=single.states,
        half_precision=single.again.half_precision,
        autocast=single.autocast,
    )
    name = "rounding" if single.autocast else "rounding in full"
    runs = [
        runner.run(f"{name} {k}", 1, replace(plan, rounding=k), progress.ROUNDING)
        for k in range(1, ROUNDING_RUNS + 1)
    ]
    return replace(single, rounded=tuple(runs))


def choose_pinned_steps(oracle: RunRecord) -> tuple[int, ...]:
    """The first steps, the first step with another number of samples (the end of an epoch), some
    later ones, and then ever fewer."""
    first = range(min(PINNED, oracle.steps))
    last = min(PINNED_UP_TO, oracle.steps) - 1
    later = [round(share * last) for share in LATER_PINNED]
    samples = [step.samples for step in oracle.ranks[0].steps]
    tail = next((k for k, count in enumerate(samples) if count != samples[0]), 0)
    end = max(tail + 1, math.floor(PINNED_SHARE * oracle.steps))
    doublings = range(1, (end // PINNED_UP_TO).bit_length())
    doubled = [PINNED_UP_TO * 2**k - 1 for k in doublings]
    return tuple(sorted({*first, tail, *later, *doubled}))


def _without_autocast(runner: ScriptRunner, single: SingleRankRuns) -> SingleRankRuns | None:
    """The runs of one process with its pinned steps in the dtype of its parameters; None if it
    computes in half precision otherwise than by autocast, or fails without."""
    halves = {torch.float16, torch.bfloat16}
    dtypes = {tensor.dtype for tensor in single.oracle.parameters.values()}
    if not single.oracle.half_precision or dtypes & halves:
        return None
    keep = tuple(single.again.gradients)
    plan = RunPlan(keep[-1] + 1, keep, pin=single.states, autocast=False)
    try:
        again = runner.run("oracle in full", 1, plan, progress.FULL)
    except VerificationError:
        return None
    return None if again.half_precision else replace(single, again=again, autocast=False)


def _plain(runner: ScriptRunner, plan: RunPlan) -> RunRecord | None:
    try:
        return runner.run("plain python", 0, plan, progress.PLAIN)
    except VerificationError:
        return None


def _noise(
    runner: ScriptRunner,
    oracle: RunRecord,
    again: RunRecord,
    plan: RunPlan,
    usable: Callable[[RunRecord, RunRecord], bool],
) -> tuple[RunRecord, str]:
    """A run with reversed batches or, if these change nothing, with perturbed parameters.

    In another order sums of float32 differ, but hardly what is rounded to half precision.
    """
    end, half = oracle.ranks[0].end, oracle.half_precision
    if end is not None and end.indices and not half:
        backwards = runner.run(REVERSED, 1, replace(plan, reverse=True), progress.NOISE)
        if usable(again, backwards):
            return backwards, REVERSED
    perturbed = replace(plan, rounding=1, half_precision=half)
    return runner.run(PERTURBED, 1, perturbed, progress.NOISE), PERTURBED


class InstepRunStarter:
    """Starts ranks with `instep run`; the script has no input, and its output goes to a file.

    The files that a run changes are put back after it."""

    def __init__(
        self, variables: Mapping[str, str] | None = None, *, overwrite: bool = False
    ) -> None:
        """`variables`: additional ones of the environment. `overwrite`: leave the files as the
        last run leaves them."""
        self._variables = {**REPEATABLE, **os.environ, **(variables or {})}
        self._overwrite = overwrite

    def __call__(self, n: int, folder: Path, command: Sequence[str], limit: float | None) -> None:
        """Run as RankStarter describes. Raises VerificationError if the kernel does not tell which
        files a run changes, or if one could not be copied or put back."""
        launcher = ["-m", "instep", "run", "--nnodes", "1", "-n", str(n)] if n else []
        entry = ["-m", "instep.verify.recording.entry", str(folder)]
        output = folder / "output"
        files = nullcontext(subprocess.Popen) if self._overwrite else put_back(folder)
        with output.open("wb") as file, files as start:
            process = start(
                python_command(*launcher, *entry, *command),
                env=self._variables,
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
    """The supervisor's report, after the end of the script's output if it has no traceback; or
    else the end of all output."""
    text = output.read_text(errors="replace")
    start = text.rfind("\ninstep: rank ") if n else -1
    if start < 0 and not text.startswith("instep: "):
        return _end_of(text, 30)
    report = text[start + 1 :].rstrip()
    if " exited with code " not in report.partition("\n")[0] or start < 0:
        return report
    return f"{_end_of(text[:start], 10)}\n{report}"


def _end_of(text: str, lines: int) -> str:
    return "\n".join(text.splitlines()[-lines:])


def _reached(folder: Path, n: int) -> list[int]:
    return [len(rank.steps) for rank in read_run(folder, n, 0.0).ranks]
