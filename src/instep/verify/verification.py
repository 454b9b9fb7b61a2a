"""The whole verification of one script: run it, judge it, report."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from instep.errors import CommandLineError
from instep.verify.progress import RunProgress
from instep.verify.report import format_json, format_table, save_plot
from instep.verify.runs import (
    MultiRankRuns,
    RankStarter,
    ScriptRunner,
    SingleRankRuns,
    run_multi_rank,
    run_single_rank,
    run_with_rounding,
)
from instep.verify.verdict import (
    Report,
    Verdict,
    find_nondeterministic,
    in_full_precision,
    is_usable_noise,
    make_report,
)


def verify_script(
    command: Sequence[str],
    sizes: Sequence[int],
    start: RankStarter,
    steps: int | None = None,
    progress: RunProgress | None = None,
) -> Report:
    """Run `command` on 1 rank and on each of `sizes`, and judge the runs.

    `progress` is told of each run. The records lie in a temporary folder.

    Raises ScriptFailedError, ScriptLateError, StepsError.
    """
    with tempfile.TemporaryDirectory(prefix="instep-verify-") as folder:
        runner = ScriptRunner(command, Path(folder), start, progress)
        single = run_single_rank(runner, steps, is_usable_noise)
        others = sorted(set(sizes) - {1})
        if find_nondeterministic(single):
            if progress is not None:
                progress.note("one process does not repeat itself, so several are not compared")
            others = []
        return compare_with_rounding(
            runner, single, [run_multi_rank(runner, n, steps, single) for n in others]
        )


def compare_with_rounding(
    runner: ScriptRunner, single: SingleRankRuns, multi: Sequence[MultiRankRuns]
) -> Report:
    """Judge the runs. If a gradient seems wrong, first measure the effect of rounding alone.

    Raises ScriptFailedError, ScriptLateError, StepsError.
    """
    if _is_gradient_in_doubt(replace(single, full=None), multi):
        single = run_with_rounding(runner, single)
    if single.full and _is_gradient_in_doubt(single.full, in_full_precision(multi)):
        single = replace(single, full=run_with_rounding(runner, single.full))
    return make_report(single, multi)


def _is_gradient_in_doubt(single: SingleRankRuns, multi: Sequence[MultiRankRuns]) -> bool:
    divergence = make_report(single, multi).divergence
    return divergence is not None and divergence.what == "gradient"


def run_and_report(
    command: Sequence[str],
    sizes: Sequence[int],
    start: RankStarter,
    steps: int | None = None,
    json: str | None = None,
    plot: str | None = None,
) -> int:
    """Verify, print the report and write the files. Returns 0 for the same numbers, else 1.

    Raises CommandLineError if a file cannot be written.
    """
    with closing(RunProgress(sorted({*sizes} - {1}))) as progress:
        report = verify_script(command, sizes, start, steps, progress)
    print(format_table(report), flush=True)
    try:
        if json is not None:
            Path(json).write_text(format_json(report), encoding="utf-8")
        if plot is not None:
            save_plot(report, plot, " ".join(command))
    except OSError as error:
        raise CommandLineError(f"cannot write the report to a file: {error.strerror}") from None
    return int(report.verdict is Verdict.DIFFERENT)
