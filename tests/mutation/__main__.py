"""Do the tests notice when the core is wrong? `python tests/mutation [--count 300] [--json FILE]`.

Changes one thing at a time in copies of the working tree, and runs the tests that pass through it.
Which those are is found out by one run of the suite in instrumented copies, and kept in --folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import drawing
import mapping
import trying
from mapping import PACKAGES, Map
from running import Runner, each
from trees import ROOT
from trying import Verdict

FATES = ("killed", "timed out", "survived", "not reached")


def main() -> None:
    """Make the map if there is none, draw, try, and print the table."""
    options = _options()
    options.folder.mkdir(parents=True, exist_ok=True)
    kept = options.folder / "map.json"
    copies = options.copies
    if options.map is not None or not kept.exists():
        runners = [Runner(Path(f"{copies}{at}")) for at in range(options.parallel)]
        try:
            made = mapping.make(options.folder, runners, options.map)
            if options.map:
                made = mapping.merged(json.loads(kept.read_text()), made)
            kept.write_text(json.dumps(made))
        finally:
            for runner in runners:
                runner.close()
    if options.count:
        verdicts = _try(options, Map.read(kept))
        _print(verdicts, options.packages)
        if options.json:
            _write(options.json, verdicts)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="mutants to draw (0: the map only)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", nargs="+", default=PACKAGES, choices=PACKAGES)
    parser.add_argument("--budget", type=float, default=40, help="seconds of tests per mutant")
    parser.add_argument("--parallel", type=int, default=2, help="copies at work at once")
    parser.add_argument("--map", nargs="*", help="make the map anew, or for these files of tests")
    parser.add_argument("--again", type=Path, help="a table of the same core: try what survived")
    parser.add_argument("--json", type=Path, help="where the table goes")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--copies", default="/tmp/mutants", help="how the copies' folders begin")
    return parser.parse_args()


def _try(options: argparse.Namespace, known: Map) -> list[Verdict]:
    began = time.monotonic()
    runners = [Runner(Path(f"{options.copies}{at}")) for at in range(options.parallel)]
    verdicts: list[Verdict] = []
    files = {package: mapping.sources(package) for package in options.packages}

    def one(runner: Runner, mutant: drawing.Mutant) -> None:
        verdict = trying.attempt(runner, mutant, known, options.budget)
        verdicts.append(verdict)
        if options.json:  # so far, for whoever stops this before its end
            _write(options.json, verdicts)
        at = f"{time.monotonic() - began:5.0f} s {len(verdicts):4d}"
        print(f"{at} {verdict.fate:11} {mutant.path}:{mutant.line} {mutant.change}", flush=True)

    try:
        if options.again:
            earlier = Verdict.read(options.again)
            verdicts += [verdict for verdict in earlier if verdict.died]
            drawn = [verdict.mutant for verdict in earlier if not verdict.died]
        else:
            drawn = drawing.draw(runners[0].tree.folder, files, options.count, options.seed)
        each(runners, drawn, one)
    finally:
        for runner in runners:
            runner.close()
    return sorted(verdicts, key=lambda v: (v.mutant.path, v.mutant.line, v.mutant.start))


def _write(path: Path, verdicts: list[Verdict]) -> None:
    path.write_text(json.dumps([verdict.as_json() for verdict in verdicts], indent=1) + "\n")


def _print(verdicts: list[Verdict], packages: list[str]) -> None:
    for verdict in verdicts:
        if not verdict.died:
            m = verdict.mutant
            print(f"\n{verdict.fate}: {m.path}:{m.line} in {m.function}: {m.change}")
            print(f"    - {verdict.before}\n    + {verdict.after}")
            print(f"    {verdict.tests} of {verdict.through} tests through the {verdict.closeness}")
    print(f"\n{'':28}" + "".join(f"{fate:>13}" for fate in FATES) + f"{'died':>9}")
    for package in (*packages, ""):
        fates = Counter(
            verdict.fate for verdict in verdicts if f"/instep/{package}" in verdict.mutant.path
        )
        counts = "".join(f"{fates[fate]:13}" for fate in FATES)
        died = (fates["killed"] + fates["timed out"]) / max(1, fates.total())
        print(f"{package or 'all':28}{counts}{died:9.1%}")


if __name__ == "__main__":
    main()
