"""`instep timeline` on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.launch.timeline.events import format_summary, read_events, sum_up
from instep.launch.timeline.page import format_html

DESCRIPTION = """\
Draw a job's timeline: one HTML page, the ranks one above the other, and a summary of where the
time of each rank went. The file is what `instep run --timeline FILE` or INSTEP_TIMELINE=FILE has
written; it also opens in Perfetto (ui.perfetto.dev) and in chrome://tracing.

waited: in collectives, while the program stood still; hidden: in collectives, while it went on;
made wait: how long others have waited for this rank, where it came last.
"""


def add_command(commands: Any) -> None:
    """Add it to the subparsers of `instep`."""
    parser = commands.add_parser(
        "timeline",
        help="draw where the time of each rank went",
        description=DESCRIPTION,
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--html", metavar="PAGE", help="the page; by default FILE with .html")


def run(asked: argparse.Namespace, program: Sequence[str]) -> int:
    """Write the page and print the summary. Raises CommandLineError."""
    path = Path(asked.file)
    events = read_events(path)
    times = sum_up(events)
    page = Path(asked.html) if asked.html else path.with_suffix(".html")
    page.write_text(
        format_html(path.name, events, times), encoding="utf-8", errors="backslashreplace"
    )
    print(*format_summary(times), f"Drawn in {page}.", sep="\n")
    return 0
