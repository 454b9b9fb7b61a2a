"""`instep env` on the command line, and its report as a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instep.launch.env.rank_report import Facts

ENV = """\
Print a report on the ranks of this job, and test every collective among them.

Start it as you start your script: `mpirun -n 4 instep env`, `srun instep env`, `torchrun
--no-python --nproc-per-node 4 instep env`, `instep run -n 4 -m instep env`. Rank 0 prints a
table that can be pasted into an issue. The exit code is 1 if a collective fails or gives a wrong
result.
"""
RANK_COLUMNS = ("rank", "local_rank", "host", "pid", "cores", "threads", "device", "backend")


def add_command(commands: Any) -> None:
    """Add it to the subparsers of `instep`."""
    parser = commands.add_parser(
        "env",
        help="report on the ranks of a job, and test every collective",
        description=ENV,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=run)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(asked: argparse.Namespace, program: Sequence[str]) -> int:
    """Run it on every rank. Raises LaunchError if the ranks cannot reach each other."""
    from instep.distributed.communication.objects import gather_object
    from instep.distributed.rendezvous.bootstrap import init

    # These import torch, without which `instep env --help` does.
    from instep.launch.env import rank_report, self_test

    init()
    outcome = self_test.run_collectives(rank_report.find_device())
    mine = (rank_report.describe_rank(), outcome)
    passed = all(result == "ok" for _, result, _ in outcome)
    rows = gather_object(mine) if passed else [mine]
    if rows is not None:
        ranks, tests = zip(*rows, strict=True)
        report = {"job": rank_report.describe_job(), "ranks": list(ranks), "tests": list(tests)}
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
        *(f"layers      {seen}" for seen in _by_rank(ranks, "layers")),
        *(f"devices     {seen}" for seen in _by_rank(ranks, "accelerators")),
        *(f"WARNING     {seen}" for seen in _by_rank(ranks, "warnings") if seen != "none"),
        "",
        *_columns([RANK_COLUMNS, *([rank[name] for name in RANK_COLUMNS] for rank in ranks)]),
        "",
        *_columns([("collective", "ms", "result"), *_tests(report["tests"])]),
    ]
    return "\n".join(lines) + "\n"


def _by_rank(ranks: Sequence[Facts], name: str) -> Iterable[str]:
    """The ranks' values; one line if all are the same."""
    seen: dict[str, list[int]] = {}
    for rank in ranks:
        seen.setdefault(_format_value(rank[name]), []).append(rank["rank"])
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
        wrong = [
            f"rank {k}: {result}" for k, (_, result, _) in enumerate(outcomes) if result != "ok"
        ]
        slowest = max(milliseconds for _, _, milliseconds in outcomes)
        rows.append((outcomes[0][0], f"{slowest:.2f}", "; ".join(wrong) or "ok"))
    return rows


def _columns(rows: Sequence[Sequence[object]]) -> list[str]:
    widths = [max(len(str(row[k])) for row in rows) for k in range(len(rows[0]))]
    return [
        "  ".join(f"{entry!s:{width}}" for entry, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
