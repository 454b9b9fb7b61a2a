"""Compares the bits of runs on several numbers of ranks, and reports the first difference."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import cast

from instep.unedited.bitwise import check_ranks
from instep.verify.progress import RunProgress, all_steps
from instep.verify.recording.bit_recorder import Digests, StepBits
from instep.verify.recording.records import RunPlan, RunRecord
from instep.verify.runs import RankStarter, ScriptRunner


@dataclass(frozen=True)
class BitDifference:
    """The first value that has other bits on another number of ranks."""

    n: int
    step: int
    what: str
    shard: int | None
    """The shard of the batch; None for what all ranks have."""

    def describe(self, first: int, shards: int) -> str:
        """In words; `first`: the number of ranks with which it was compared."""
        where = "" if self.shard is None else f" for shard {self.shard + 1} of {shards}"
        return (
            f"DIFFERENT: on {_ranks(self.n)} {self.what}{where} has other bits than on "
            f"{_ranks(first)}, first in step {self.step + 1}."
        )


def find_difference(first: RunRecord, other: RunRecord) -> BitDifference | None:
    """The first value of `other` whose bits differ from those of `first`."""
    for step in range(max(first.steps, other.steps)):
        if step >= min(first.steps, other.steps):
            return BitDifference(other.n, step, "the number of steps", None)
        expected, found = _merged(first, step), _merged(other, step)
        for shard in sorted({*expected.of_shards, *found.of_shards}):
            pairs = (expected.of_shards.get(shard, []), found.of_shards.get(shard, []))
            if (what := _first_of(*pairs)) is not None:
                return BitDifference(other.n, step, what, shard)
        for bits in _bits_at(other, step):
            if (what := _first_of(expected.of_all, bits.of_all)) is not None:
                return BitDifference(other.n, step, what, None)
    return None


def _bits_at(run: RunRecord, step: int) -> list[StepBits]:
    """One step on all ranks, of a run of which the bits were recorded."""
    return cast("list[StepBits]", run.at(step))


def _merged(run: RunRecord, step: int) -> StepBits:
    """A step with the shards of all ranks."""
    ranks = _bits_at(run, step)
    shards = {shard: digests for each in ranks for shard, digests in each.of_shards.items()}
    return StepBits(shards, ranks[0].of_all, ranks[0].state)


def _first_of(expected: Digests, found: Digests) -> str | None:
    for theirs, ours in zip_longest(expected, found):
        if theirs != ours:
            return (theirs or ours)[0]
    return None


def verify_bits(
    command: Sequence[str],
    sizes: Sequence[int],
    shards: int,
    start: RankStarter,
    steps: int | None = None,
    progress: RunProgress | None = None,
) -> list[RunRecord]:
    """Run `command` on each of `sizes`, by a `start` that has every batch in so many shards.

    Raises BitwiseError, ScriptFailedError, ScriptLateError, StepsError.
    """
    for n in sizes:
        check_ranks(shards, n)
    with tempfile.TemporaryDirectory(prefix="instep-verify-") as folder:
        runner = ScriptRunner(command, Path(folder), start, progress)
        return [
            runner.run(f"bits at {n}", n, RunPlan(stop=steps, bits=True), all_steps(n))
            for n in sorted(set(sizes))
        ]


def report_bits(runs: Sequence[RunRecord], shards: int) -> Iterator[str]:
    """The lines of the report."""
    yield f"{'n':>3}  {'seconds':>7}  {'steps':>5}  sha256 of parameters, buffers, optimizer state"
    for run in runs:
        last = _bits_at(run, run.steps - 1)[0]
        yield f"{run.n:>3}  {run.seconds:>7.1f}  {run.steps:>5}  {last.state}"
    yield ""
    first, *others = runs
    found = [difference for run in others if (difference := find_difference(first, run))]
    if found:
        yield min(found, key=lambda each: each.step).describe(first.n, shards)
    else:
        sizes = ", ".join(str(run.n) for run in runs)
        yield f"IDENTICAL on {sizes} ranks, step by step, with every batch in {shards} shards."
    if not any(bits.of_shards for k in range(first.steps) for bits in _bits_at(first, k)):
        yield (
            "No call of a module was divided: every rank computed everything. `instep run -n 2 "
            f"--bitwise {shards}` of the script says why."
        )


def run_and_report_bits(
    command: Sequence[str],
    sizes: Sequence[int],
    shards: int,
    start: RankStarter,
    steps: int | None,
) -> int:
    """Verify, one rank too, and print the report. Returns 0 if all bits are the same, else 1."""
    sizes = sorted({1, *sizes})
    titles = [all_steps(n) for n in sizes]
    with closing(RunProgress(sizes, expected=titles)) as progress:
        runs = verify_bits(command, sizes, shards, start, steps, progress)
    lines = list(report_bits(runs, shards))
    print(os.linesep.join(lines))
    return int(not lines[-1].startswith("IDENTICAL"))


def _ranks(n: int) -> str:
    return f"{n} rank{'s' * (n != 1)}"
