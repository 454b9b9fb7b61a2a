"""The report: a table, JSON, and a plot of the loss curves."""

from __future__ import annotations

import json
import math
from typing import Any

from instep.verify.compare import RunDifference, compare_losses
from instep.verify.recording.records import RunRecord
from instep.verify.verdict import OF_ITS_NOISE, Report, RunResult, Verdict

_HEADER = ("n", "seconds", "steps", "samples per rank", "final loss")
_SIZES = ("gradient", "loss curve", "parameters", "buffers")


def format_table(report: Report) -> str:
    """Format the report for the terminal."""
    run = f"<{report.tolerance.run:.0e}"
    rows = [
        (*_HEADER, *_SIZES),
        (*_run_cells(report.oracle), *["-"] * len(_SIZES)),
        *[(*_run_cells(r.run), *_difference_cells(r.difference)) for r in report.results],
        ("its own noise", "", "", "", "", *_difference_cells(report.noise)),
        ("rounding is", "", "", "", "", f"<{report.tolerance.gradient:.0e}", run, run, run),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join([*lines, "", *_notes(report), "", *_verdict(report)])


def _run_cells(run: RunRecord) -> tuple[str, ...]:
    final = run.losses[-1]
    return (
        str(run.n),
        f"{run.seconds:.1f}",
        str(run.steps),
        " ".join(map(str, run.samples_per_rank)),
        "-" if final is None else f"{final:.6g}",
    )


def _difference_cells(found: RunDifference) -> tuple[str, ...]:
    sizes = (found.gradient, found.loss, found.moved, found.buffers)
    return tuple("0" if size == 0 else f"{size:.1e}" for size in sizes)


def _notes(report: Report) -> list[str]:
    notes = [
        "gradient: difference at one process's own parameters, relative to its norm;\n"
        "loss curve: largest difference;\n"
        "parameters: final difference, relative to their movement in training.",
        f"its own noise: one process compared with itself, with {report.noise_by}.",
    ]
    if report.results:
        notes.append(_what_was_compared(report))
    if not report.results and report.verdict is Verdict.SAME:
        notes.append("only one process ran: -n 1,2 compares it with two.")
    if not sum(report.oracle.samples_per_rank):
        notes.append(
            "no module with parameters computed the loss, so that the samples of each rank are "
            "unknown."
        )
    if undivided := ", ".join(map(str, _undivided(report))):
        notes.append(
            f"at n = {undivided} every rank computed every sample: the numbers are the "
            "same, but it is not faster. `instep run` prints the reason."
        )
    if partly := ", ".join(map(str, _divided_inside(report))):
        notes.append(
            f"at n = {partly} every rank computed some modules whole, whose samples are counted; "
            "modules within them were divided. `instep run` prints the reason."
        )
    if reason := report.compare_with_python:
        notes.append(f"n = 1 differs from plain Python, without instep: {reason}.")
    return notes


def _what_was_compared(report: Report) -> str:
    """Which steps a mistake may be in so that it is seen, and how it is seen."""
    steps, stopped = report.oracle.steps, _is_stopped(report.oracle)
    end = f"; the script was stopped after step {steps}, and later ones were not seen" * stopped
    note = (
        f"gradients were compared in steps {_ranges(report.compared_steps)} of {steps}, the loss, "
        f"the parameters and the ranks with each other in all{end}."
    )
    if not (half := report.oracle.half_precision):
        return note
    if report.autocast:
        return (
            f"{note}\nthe script computes in {half}: errors of a gradient below "
            f"{report.tolerance.gradient:.0e}, or {OF_ITS_NOISE:.0f} times its noise, are not seen."
        )
    return (
        f"{note}\nthe script computes in {half} by autocast: gradients were compared without it, "
        "too, and their column says by how much these differ; all else was compared with it."
    )


def _is_stopped(run: RunRecord) -> bool:
    end = run.ranks[0].end
    return end is not None and not end.whole


def _ranges(steps: tuple[int, ...]) -> str:
    """Steps as a user counts them: `1 to 5, 10, 20`."""
    first = next((k for k, step in enumerate(steps) if step != k), len(steps))
    beginning = [f"1 to {first}" if first > 1 else "1"] if first else []
    return ", ".join([*beginning, *(str(step + 1) for step in steps[first:])])


def _undivided(report: Report) -> list[int]:
    """The numbers of ranks at which every rank computed all, and not as different numbers."""
    return [
        run.n
        for run in _runs_on_many(report)
        if not any(_divided_calls(run)) and (_divided_calls(run) or _have_all_samples(report, run))
    ]


def _divided_inside(report: Report) -> list[int]:
    """The numbers of ranks at which an unedited script was divided only within its modules."""
    return [
        run.n
        for run in _runs_on_many(report)
        if any(_divided_calls(run)) and _have_all_samples(report, run)
    ]


def _runs_on_many(report: Report) -> list[RunRecord]:
    results = (r for r in report.results if r.verdict is not Verdict.DIFFERENT)
    return [result.run for result in results if result.run.n > 1]


def _divided_calls(run: RunRecord) -> list[int]:
    """How many calls each rank of an unedited script divided; empty where it has the two lines."""
    ends = [rank.end for rank in run.ranks]
    return [end.divided for end in ends if end is not None and end.divided is not None]


def _have_all_samples(report: Report, run: RunRecord) -> bool:
    return 0 < sum(report.oracle.samples_per_rank) == min(run.samples_per_rank)


def _verdict(report: Report) -> list[str]:
    lines = [str(report.verdict)]
    if report.verdict is Verdict.NOISE:
        lines[0] += f" (at most {OF_ITS_NOISE:.0f} times as far off as one process from itself)"
    if (divergence := report.divergence) is not None:
        tensor = f" of {divergence.tensor}" if divergence.tensor else ""
        size = (
            f" (relative {divergence.difference:.1e})"
            if math.isfinite(divergence.difference)
            else ""
        )
        lines.append(
            f"  first at n = {divergence.n}, step {divergence.step}: "
            f"{divergence.what}{tensor}{size}"
        )
    if report.verdict is Verdict.DIFFERENT:
        lines.append(f"  likely cause: {report.cause or 'unknown'}")
    return lines


def format_json(report: Report) -> str:
    """Format the report as JSON; numbers that are not finite are null."""
    worst = report.max_difference
    value = {
        "verdict": str(report.verdict),
        "runs": [_run(report.oracle, None), *(_run(r.run, r) for r in report.results)],
        "gradient_difference": _number(worst.gradient),
        "loss_difference": _number(worst.loss),
        "max_relative_difference": _number(worst.parameters),
        "difference_of_distance_moved": _number(worst.moved),
        "buffer_difference": _number(worst.buffers),
        "noise": {"by": report.noise_by, **_difference(report.noise)},
        "tolerance": {"gradient": report.tolerance.gradient, "run": report.tolerance.run},
        "compared_steps": [step + 1 for step in report.compared_steps],
        "gradients_with_autocast": report.autocast,
        "first_divergence": None,
        "cause": report.cause,
        "compare_with_python": report.compare_with_python,
    }
    if report.divergence is not None:
        divergence = vars(report.divergence)
        value["first_divergence"] = divergence | {"difference": _number(divergence["difference"])}
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _run(run: RunRecord, result: RunResult | None) -> dict[str, Any]:
    final = run.losses[-1]
    figures = {
        "n": run.n,
        "seconds": round(run.seconds, 3),
        "steps": run.steps,
        "samples_per_rank": run.samples_per_rank,
        "final_loss": None if final is None else _number(final),
    }
    if result is None:
        return figures
    return figures | {"verdict": str(result.verdict), **_difference(result.difference)}


def _difference(found: RunDifference) -> dict[str, float | None]:
    return {name: _number(value) for name, value in vars(found).items()}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def save_plot(report: Report, path: str, title: str) -> None:
    """Write a PNG of the loss curves and, below, their differences from one process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # matplotlib is optional
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    curves, apart = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    runs = [report.oracle, *(result.run for result in report.results)]
    for layer, run in enumerate(runs):
        # Wide lines below narrow ones: all of them are visible if the curves agree.
        width = 1.2 + 2.4 * (len(runs) - 1 - layer)
        label = "one process" if run is report.oracle else f"{run.n} ranks"
        (line,) = curves.plot(*_points(run), linewidth=width, label=label)
        if run is not report.oracle:
            known = [d or math.nan for d in compare_losses(report.oracle, run)]  # no zero in logs
            steps = range(1, len(known) + 1)
            apart.plot(steps, known, ".-", color=line.get_color(), markersize=3, linewidth=0.8)
    apart.axhline(report.tolerance.run, color="grey", linestyle="--", label="rounding")
    if report.noise.loss > 0:
        apart.axhline(report.noise.loss, color="grey", linestyle=":", label="its own noise")
    apart.set(yscale="log", ylabel="relative difference", xlabel="optimizer step")
    curves.set(ylabel="loss of the global batch", title=f"{title}\n{report.verdict}")
    curves.legend(frameon=False)
    apart.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    for axes in (curves, apart):
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=120)


def _points(run: RunRecord) -> tuple[list[int], list[float]]:
    known = [(k + 1, loss) for k, loss in enumerate(run.losses) if loss is not None]
    return [k for k, _ in known], [loss for _, loss in known]
