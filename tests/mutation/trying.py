"""One mutant against the tests that run through it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mapping import Map
from operators import Mutant
from running import Runner

FIRST = 12.0
"""Seconds of tests before all others are even looked at: most mutants die here."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: `killed`, `timed out`, `survived`, or `not reached` by any test."""

    mutant: Mutant
    before: str
    after: str
    fate: str
    by: str
    tests: int
    through: int
    closeness: str
    seconds: float

    @property
    def died(self) -> bool:
        """Whether a test has noticed it."""
        return self.fate in ("killed", "timed out")

    @classmethod
    def read(cls, path: Path) -> list[Verdict]:
        """Those of a table."""
        table = json.loads(path.read_text())
        return [cls(**line | {"mutant": Mutant(**line["mutant"])}) for line in table]

    def as_json(self) -> dict[str, Any]:
        """For the table."""
        return asdict(self)


def attempt(runner: Runner, mutant: Mutant, known: Map, budget: float) -> Verdict:
    """Run the tests through the mutant, the quickest first, until one fails.

    `budget` is how many seconds the tests may take in an ordinary run.
    """
    began = time.monotonic()
    source = runner.tree.read(mutant.path)
    changed = mutant.applied(source)
    assert changed is not None
    names, closeness = known.through(mutant.path, mutant.function, mutant.statement)
    first, rest = _plan(known, names, budget)
    fate, by, ran = ("survived" if names else "not reached"), "", 0
    runner.tree.write(mutant.path, changed)
    try:
        for tests in filter(None, (first, rest)):
            arguments, limit, limits = _arguments(known, tests)
            status, lines = runner.run(arguments, limit, tests=limits)
            ran += len(lines)
            failed = [line for line in lines if line["outcome"] in ("failed", "timed out")]
            if failed:
                by = failed[0]["test"]
                fate = "timed out" if failed[0]["outcome"] == "timed out" else "killed"
            elif status is None:
                fate, by = "timed out", tests[min(len(lines), len(tests) - 1)]
            elif status not in (0, 5):  # 5: nothing was collected
                fate, by = "killed", "pytest itself"
            if by:
                break
    finally:
        runner.tree.write(mutant.path, source)
    line = source.decode().splitlines()[mutant.line - 1].strip()
    after = changed.decode().splitlines()[mutant.line - 1].strip()
    seconds = time.monotonic() - began
    return Verdict(mutant, line, after, fate, by, ran, len(names), closeness, seconds)


def _plan(known: Map, names: set[str], budget: float) -> tuple[list[str], list[str]]:
    first: list[str] = []
    rest: list[str] = []
    total = 0.0
    for name in sorted(names, key=lambda name: ("slurm" in name, known.seconds[name])):
        total += known.seconds[name]
        if total <= FIRST or not first:
            first.append(name)
        elif total <= budget:
            rest.append(name)
    return first, rest


def _arguments(known: Map, tests: list[str]) -> tuple[list[str], float, dict[str, float]]:
    limits = {name: 6 * known.seconds[name] + 20 for name in tests}
    files = dict.fromkeys(name.partition("::")[0] for name in tests)
    return ["-x", *files], 3 * sum(known.seconds[name] for name in tests) + 90, limits
