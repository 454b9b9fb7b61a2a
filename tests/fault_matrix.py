"""Ranks get out of step in a real job: who is named, with which line, and how soon.

    python tests/fault_matrix.py --json matrix.json

A small training runs by explicit calls, unedited, and with plain DDP, over shared memory and over
Gloo; the same faults on plain DDP under torchrun stand beside them. A fault is named when a clause
of the output has the rank that caused it and a line of the script.

Rows that FILE has already are kept: a matrix that was interrupted is continued, and may be run in
pieces. The cable between two hosts is cut in network namespaces, which take root.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import networks
from fault_jobs import BACKENDS, DOORS, FAULTS, LAUNCHERS, Row, run
from machine import machine

Key = tuple[str, str, str]
"""Fault, door, launcher."""


def rows_of(faults: Sequence[str], doors: Sequence[str], launchers: Sequence[str]) -> list[Key]:
    """The rows of these faults; under torchrun there is plain DDP only."""
    return [
        (fault, door, launcher)
        for fault in faults
        for door in doors
        for launcher in launchers
        if door in FAULTS[fault].doors and (launcher != "torchrun" or door == "ddp")
    ]


def read_rows(path: Path) -> dict[Key, Row]:
    """The rows of a file that may not exist yet."""
    if not path.exists():
        return {}
    rows = [Row(**row) for row in json.loads(path.read_text())["rows"]]
    return {row.key: row for row in rows}


def write_rows(path: Path, rows: dict[Key, Row]) -> None:
    """All rows, and shares of them; the file is never half written."""
    ordered = [rows[key] for key in rows_of([*FAULTS], [*DOORS], LAUNCHERS) if key in rows]
    told = {
        "machine": machine(),
        "summary": {launcher: summary(ordered, launcher) for launcher in LAUNCHERS},
        "rows": [asdict(row) for row in ordered],
    }
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(told, indent=2) + "\n")
    os.replace(draft, path)


def summary(rows: Sequence[Row], launcher: str) -> dict[str, float | int | None]:
    """Figures about one launcher."""
    of = [row for row in rows if row.launcher == launcher]
    seconds = sorted(row.named for row in of if row.named is not None)
    return {
        "rows": len(of),
        "named": len(seconds),
        "named_in_time": sum(row.in_time for row in of),
        "median_seconds": seconds[len(seconds) // 2] if seconds else None,
        "longest_seconds": seconds[-1] if seconds else None,
        "false_alarms": sum(row.is_false_alarm for row in of),
        "seconds_in_all": round(sum(row.took for row in of)),
    }


def table(rows: dict[Key, Row]) -> str:
    """The seconds until each fault was named, in Markdown; one column for each kind of job."""
    columns = [(door, launcher) for door in DOORS for launcher in BACKENDS] + [("ddp", "torchrun")]
    heads = [f"{door}, {launcher}" for door, launcher in columns]
    lines = [
        f"| fault | {' | '.join(heads)} |",
        "|---" + "|---:" * len(columns) + "|",
    ]
    for fault in FAULTS:
        cells = [_cell(rows.get((fault, *column))) for column in columns]
        if any(cells):
            lines.append(f"| {fault} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.named is None:
        return "never" if row.ended is not None else f"not in {row.limit:.0f} s"
    return f"{row.named:.1f}{'' if row.in_time else ' (late)'}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="rows are kept there, and read from there")
    parser.add_argument("--again", action="store_true", help="also rows that FILE has already")
    parser.add_argument("--missed", action="store_true", help="also those not named in time")
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--doors", nargs="+", default=list(DOORS), choices=DOORS)
    parser.add_argument("--launchers", nargs="+", default=list(LAUNCHERS), choices=LAUNCHERS)
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    path = Path(asked.json) if asked.json else None
    rows = read_rows(path) if path is not None else {}
    why = networks.missing() if any(FAULTS[name].is_cut for name in asked.faults) else None
    for key in rows_of(asked.faults, asked.doors, asked.launchers):
        if key in rows and not (asked.again or (asked.missed and not rows[key].in_time)):
            continue
        if FAULTS[key[0]].is_cut and why is not None:
            print(f"{', '.join(key)}: not run, {why}", flush=True)
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            rows[key] = row = run(*key, Path(folder))
        print(f"{', '.join(key)}: {row}", flush=True)
        if row.launcher != "torchrun" and (row.is_false_alarm or not row.in_time):
            print(row.output, flush=True)
        if path is not None:
            write_rows(path, rows)
    chosen = [rows[key] for key in rows_of(asked.faults, asked.doors, asked.launchers)
              if key in rows]  # fmt: skip
    print(f"\n{table(rows)}\n")
    for launcher in asked.launchers:
        told = summary(chosen, launcher)
        print(
            f"{launcher}: {told['named_in_time']} of {told['rows']} faults named in time, "
            f"{told['seconds_in_all']} s"
        )
    return int(any(not row.in_time for row in chosen if row.launcher != "torchrun"))


if __name__ == "__main__":
    sys.exit(main())
