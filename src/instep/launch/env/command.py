"""`instep env` on the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

ENV = """\
Print a report on the ranks of this job, and test every collective among them.

Start it as you start your script: `mpirun -n 4 instep env`, `srun instep env`, `torchrun
--no-python --nproc-per-node 4 instep env`, `instep run -n 4 -m instep env`. Rank 0 prints a
table that can be pasted into an issue. The exit code is 1 if a collective fails or gives a wrong
result.
"""


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
    from instep.launch.env import (  # torch: `instep env --help` does without
        rank_report,
        self_test,
        table,
    )

    init()
    outcome = self_test.run_collectives(rank_report.find_device())
    mine = (rank_report.describe_rank(), outcome)
    everybody = gather_object(mine) if all(said == "ok" for _, said, _ in outcome) else [mine]
    if everybody is not None:
        ranks, tests = zip(*everybody, strict=True)
        report = {"job": rank_report.describe_job(), "ranks": list(ranks), "tests": list(tests)}
        print(
            json.dumps(report, indent=2) if asked.json else table.format_report(report), flush=True
        )
    return int(any(said != "ok" for _, said, _ in outcome))
