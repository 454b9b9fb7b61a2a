"""The proof of one script: run it, judge it, say so."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from instep.verify.report import as_json, table
from instep.verify.runs import (
    Alone,
    InstepRun,
    Rehearsal,
    Starter,
    Together,
    run_alone,
    run_rounded,
    run_together,
)
from instep.verify.verdict import Report, Verdict, judge, unsteady, usable_noise


def verify(
    command: Sequence[str],
    sizes: Sequence[int],
    steps: int | None = None,
    start: Starter | None = None,
    say: Callable[[str], None] = lambda name: None,
) -> Report:
    """Run `command` at 1 and at each of `sizes`, and judge.

    Raises ScriptFailedError, ScriptLateError, StepsError. Writes to a private folder, which is
    gone afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="instep-verify-") as folder:
        rehearsal = Rehearsal(command, Path(folder), start or InstepRun(), say)
        alone = run_alone(rehearsal, steps, usable_noise)
        others = sorted(set(sizes) - {1})
        if unsteady(alone):
            say(f"one process does not repeat itself, so {others} ranks are not compared")
            others = []
        return settle(rehearsal, alone, [run_together(rehearsal, n, steps, alone) for n in others])


def settle(rehearsal: Rehearsal, alone: Alone, together: Sequence[Together]) -> Report:
    """Judge. Before a gradient is called wrong, measure how far off rounding alone can be.

    Raises ScriptFailedError, ScriptLateError, StepsError.
    """
    report = judge(alone, together)
    if report.parting is None or report.parting.what != "gradient":
        return report
    return judge(run_rounded(rehearsal, alone), together)


def prove(
    command: Sequence[str],
    sizes: Sequence[int],
    steps: int | None,
    json: str | None,
    plot: str | None,
    start: Starter | None = None,
) -> int:
    """What the command line asks for. Returns 0 for the same numbers, else 1."""
    report = verify(command, sizes, steps, start, _say)
    if json is not None:
        Path(json).write_text(as_json(report), encoding="utf-8")
    if plot is not None:
        from instep.verify.plot import draw  # matplotlib is optional

        draw(report, plot, " ".join(command))
    print(table(report))
    return int(report.verdict is Verdict.DIFFERENT)


def _say(name: str) -> None:
    print(f"instep verify: {name} ...", file=sys.stderr, flush=True)
