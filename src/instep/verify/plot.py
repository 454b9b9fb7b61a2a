"""A plot of the loss curves. Needs matplotlib."""

from __future__ import annotations

import math

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from instep.verify.compare import compare_losses
from instep.verify.recording.records import RunRecord
from instep.verify.verdict import Report


def save_plot(report: Report, path: str, title: str) -> None:
    """Write a PNG of the loss curves and, below, their differences from one process."""
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
