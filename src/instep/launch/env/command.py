"""`instep env` on the command line, and its report as a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from instep.process.exit_status import group_ranks

if TYPE_CHECKING:
    from instep.launch.env.rank_report import Facts

ENV = """\
Print a report on the ranks of this job, and test every collective among them.

Start it as you start your script: `mpirun -n 4 instep env`, `srun instep env`, `torchrun
--no-python --nproc-per-node 4 instep env`, `instep run -n 4 -m instep env`. Rank 0 prints a
table that can be pasted into an issue. The exit code is 1 if a collective fails or gives a wrong
result.

`instep env --selftest` also trains small models and compares them with one process on the whole
batch: sums, batch normalisation, dropout, mixed precision, overlap, two models. Without a launcher
it starts a rank on each accelerator of this host, or two on the CPU, and then a job in which a rank
fails. It takes less than a minute.
"""
RANK_COLUMNS = ("rank", "local_rank", "host", "pid", "cores", "threads", "device", "backend")


def add_command(commands: Any) -> None:
    """Add it to the subparsers of `instep`."""
    parser = commands.add_parser(
        "env",
        help="report on the ranks of a job, and test every collective",
        description=ENV,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--selftest", action="store_true", help="also train small models, and let a rank fail"
    )


def run(asked: argparse.Namespace, program: Sequence[str]) -> int:
    """Run it on every rank. Raises LaunchError if the ranks cannot reach each other."""
    from instep.distributed.communication.objects import gather_object
    from instep.distributed.identity.torch_devices import own_device
    from instep.distributed.rendezvous.bootstrap import init

    # These import torch, without which `instep env --help` does.
    from instep.launch.env import rank_report, self_test, self_test_job, training_test

    if asked.selftest and self_test_job.must_start():
        return self_test_job.start(asked.json)
    init()
    device = own_device()
    outcome = self_test.run_collectives(device)
    passed = all(result == "ok" for _, result, _ in outcome)
    trained = training_test.run_trainings(device) if asked.selftest and passed else []
    passed = passed and all(training.verdict == "ok" for training in trained)
    mine = (rank_report.describe_rank(), outcome, [asdict(training) for training in trained])
    rows = gather_object(mine) if passed else [mine]
    if rows is not None:
        ranks, tests, trainings = map(list, zip(*rows, strict=True))
        report = {"job": rank_report.describe_job(), "ranks": ranks, "tests": tests}
        if asked.selftest:
            report["trainings"] = trainings
        print(json.dumps(report, indent=2) if asked.json else format_report(report), flush=True)
    return int(not passed)


# --------------------------------------------------------------------------- the table (pure)


def format_report(report: Facts) -> str:
    """Format the whole report."""
    job, ranks = report["job"], report["ranks"]
    why = _assignments(job["why"]) or "no launcher's variables are set"
    lines = [
        f"launcher    {job['launcher']} ({why})",
        f"ranks       {job['ranks']} on {job['hosts']} host{'s' * (job['hosts'] != 1)}",
        f"backends    {', '.join(job['available'])}",
        f"variables   {_assignments(job['set']) or 'none set'}",
        *(f"versions    {seen}" for seen in _by_rank(ranks, "versions")),
        *(f"interfaces  {seen}" for seen in _by_rank(ranks, "interfaces")),
        *(f"scratch     {seen}" for seen in _by_rank(ranks, "scratch")),
        *(f"devices     {seen}" for seen in _by_rank(ranks, "accelerators")),
        *(f"WARNING     {seen}" for seen in _by_rank(ranks, "warnings") if seen != "none"),
        "",
        *_columns([RANK_COLUMNS, *([rank[name] for name in RANK_COLUMNS] for rank in ranks)]),
        "",
        *_columns([("collective", "ms", "result"), *_tests(report["tests"])]),
    ]
    if trainings := report.get("trainings"):
        head = ("training", "seconds", "difference to one process", "result")
        lines += ["", *_columns([head, *_trainings(trainings)])]
    if job["ranks"] == 1:
        lines += ["", "One rank sends nothing. To test several: instep run -n 2 -m instep env"]
    return "\n".join(lines) + "\n"


def _trainings(trainings: Sequence[Sequence[Facts]]) -> list[tuple[str, str, str, str]]:
    """One row for each training: the slowest rank's time, and the errors of all ranks."""
    rows = []
    for outcomes in zip(*trainings, strict=False):
        verdicts = [outcome["verdict"] for outcome in outcomes]
        seconds, difference = (max(o[key] for o in outcomes) for key in ("seconds", "difference"))
        text = _wrong(verdicts)
        rows.append((outcomes[0]["name"], f"{seconds:.2f}", f"{difference:.1e}", text))
    return rows


def _wrong(verdicts: Sequence[str]) -> str:
    """The verdicts that are not "ok", with their ranks; "ok" if all are."""
    found = [f"rank {k}: {verdict}" for k, verdict in enumerate(verdicts) if verdict != "ok"]
    return "; ".join(found) or "ok"


def _by_rank(ranks: Sequence[Facts], name: str) -> Iterable[str]:
    """The ranks' values; one line if all are the same."""
    seen = group_ranks({rank["rank"]: _format_value(rank[name]) for rank in ranks})
    if len(seen) == 1:
        return list(seen)
    return [f"{value} (rank {', '.join(map(str, holders))})" for value, holders in seen.items()]


def _format_value(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {entry}" for name, entry in value.items())
    if isinstance(value, list):
        return "; ".join(map(_format_value, value)) or "none"
    return str(value)


def _assignments(values: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _tests(tests: Sequence[Sequence[tuple[str, str, float]]]) -> list[tuple[str, str, str]]:
    """One row for each collective: the slowest rank's time, and the errors of all ranks."""
    rows = []
    for outcomes in zip(*tests, strict=False):
        wrong = _wrong([result for _, result, _ in outcomes])
        slowest = max(milliseconds for _, _, milliseconds in outcomes)
        rows.append((outcomes[0][0], f"{slowest:.2f}", wrong))
    return rows


def _columns(rows: Sequence[Sequence[object]]) -> list[str]:
    widths = [max(len(str(row[k])) for row in rows) for k in range(len(rows[0]))]
    return [
        "  ".join(f"{entry!s:{width}}" for entry, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
