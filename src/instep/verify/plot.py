"""The loss curves over each other, as a picture. Needs matplotlib."""

from __future__ import annotations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from instep.verify.compare import loss_differences
from instep.verify.records import Run
from instep.verify.verdict import Report


def draw(report: Report, path: str, title: str) -> None:
    """Write a PNG: the curves, and below them how far each is from one process's."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    curves, apart = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    runs = [report.oracle, *(judgement.run for judgement in report.judgements)]
    for layer, run in enumerate(runs):
        # Wide lines below narrow ones: where curves agree, all of them are seen.
        width = 1.2 + 2.4 * (len(runs) - 1 - layer)
        label = "one process" if run is report.oracle else f"{run.n} ranks"
        (line,) = curves.plot(*_points(run), linewidth=width, label=label, alpha=0.85)
        if run is not report.oracle:
            differences = loss_differences(report.oracle, run)
            steps = range(1, len(differences) + 1)
            apart.plot(steps, [max(d, 1e-17) for d in differences], color=line.get_color())
    apart.axhline(report.tolerance.run, color="grey", linestyle="--", label="rounding")
    if report.noise.loss > 0:
        apart.axhline(report.noise.loss, color="grey", linestyle=":", label="its own noise")
    apart.set(yscale="log", ylabel="relative difference", xlabel="optimizer step")
    curves.set(ylabel="loss of the global batch", title=f"{title}\n{report.verdict}")
    for axes in (curves, apart):
        axes.legend(loc="best", frameon=False)
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=120)


def _points(run: Run) -> tuple[list[int], list[float]]:
    known = [(k + 1, loss) for k, loss in enumerate(run.losses) if loss is not None]
    return [k for k, _ in known], [loss for _, loss in known]
