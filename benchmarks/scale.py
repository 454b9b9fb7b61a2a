"""What meeting, watching and agreeing cost in jobs of many ranks, with simulated members.

    python benchmarks/scale.py --json scale.json [--members 512 2048] [--part hub store]

The members have no model and no memory of a rank: they are sockets, threads and small processes
that speak as ranks, watchers and supervisors do, to the code of instep that such a job would have
on the other side. `docs/design/scale.md` has the formulas. Figures that the file has of other sizes
stay.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import scale_members
import scale_watch

HUB = "hub"
LIMIT = 40.0
"""Seconds for one exchange."""


def measure(part: str, size: int) -> dict[str, Any]:
    """One part, in processes of its own."""
    if part == HUB:
        return scale_watch.measure(size, LIMIT)
    command = [sys.executable, scale_members.__file__, part, str(size), str(LIMIT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * LIMIT, check=False)
    if done.returncode:
        return {"failed": done.stderr.splitlines()[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--members", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--part", nargs="+", default=[HUB, *scale_members.PARTS])
    args = parser.parse_args()
    file = Path(args.json) if args.json else None
    result: dict[str, Any] = {"sizes": {}}
    if file is not None and file.exists():
        result = json.loads(file.read_text())
    for size in args.members:
        for part in args.part:
            found = measure(part, size)
            print(size, part, found, flush=True)
            result["sizes"].setdefault(str(size), {})[part] = found
            from machine import machine  # not before: it imports torch

            result["machine"] = machine()
            if file is not None:
                file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
