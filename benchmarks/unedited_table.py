"""Public packages and scripts, unedited: are they the same on several ranks, and how fast?

    make unedited

A case is a script of benchmarks/unedited_cases. It runs under plain python, under plain python
with its parameters moved by 1e-7 in each step (its own noise), and under `instep run` with 2 and 3
ranks, where all that can be divided is (INSTEP_DIVIDE=always); then under plain python and with 2
ranks as users run it, which are compared, and once more so with more steps, which are timed. Each
process has one thread. A case's docstring names the package or repository, and what is run.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib import metadata
from itertools import pairwise, zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any

import forked_ranks
from longer_cases import write_longer
from unedited_docs import write

ROOT = Path(__file__).parents[1]
CASES = Path(__file__).parent / "unedited_cases"
EXAMPLES = ROOT / "examples" / "unedited"
EXAMPLES_JSON = Path(__file__).parent / "results" / "unedited_examples.json"
MOVE = 1e-7
NOISE = 10
"""A run is the same if it is not further away than so many times the case's own noise."""
DOUBLE = 1e-7
"""A case is also the same if it is not further away with floats of 64 bits."""
ROUNDS = 3
"""Longer runs of both ways, in turns, of whose ratios the median counts."""
BOTH = "parameters, printed"
TIMES = ("steps", "step_ms", "ratio", "ratio_at_once", "ratio_of_all")
CALLS = ("sharded", "whole", "samples")
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?|-?\d+e[-+]?\d+|-?\d+|\bnan\b|\binf\b")
TIMED = re.compile(r"\d{9,}(?:\.\d+)*|\.\d+\.\d+(?=$|/)")
"""Parts of a file's name that come from the clock or the process."""

FOLDER = re.compile(r"[\w./-]*/(?=[\w-]+\.py\b)")
"""The folder of a file in a traceback, which says something of this machine only."""
TIMING = re.compile(r"'\w*(?:runtime|per_second)': '?[\d.e+-]+'?,? ?")
"""Printed speeds."""


@dataclass
class Run:
    """What one run of a case has left."""

    code: int
    printed: str
    errors: str
    files: list[str]
    seconds: float
    parameters: list[list[Any]] = field(default_factory=list)
    others: list[list[list[Any]]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    work: list[int] = field(default_factory=list)
    """Parameters times rows with gradients: of divided calls, and of whole ones."""


@dataclass
class Result:
    """A row of the table."""

    case: str
    title: str
    version: str
    verdict: str = "same"
    calls: str = ""
    """divided, partly or whole."""
    divided: dict[str, float] = field(default_factory=dict)
    """For each number of ranks, the share of the work with gradients that is divided."""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    differences: dict[str, dict[str, float]] = field(default_factory=dict)
    steps: int = 0
    """Of the longer run, from which the times are."""
    step_ms: float = 0
    ratio: float = 0
    """Time of a step over that of plain python, in the last quarter of the run; 0: no steps."""
    ratio_at_once: float = 0
    """The same of two runs of plain python at once, each on a core: what the machine takes."""
    ratio_of_all: float = 0
    """The same of all steps from the first one on, with all comparisons."""
    lines: list[str] = field(default_factory=list)
    problem: str = ""
    double: float | None = None
    """Where the difference is larger than the noise: the largest with floats of 64 bits."""


def run(
    case: Path,
    ranks: int,
    move: float = 0,
    limit: float = 300,
    double: bool = False,
    divide: str = "always",
) -> Run:
    with tempfile.TemporaryDirectory() as scratch:
        seen, work = Path(scratch, "seen"), Path(scratch, "work")
        seen.mkdir()
        work.mkdir()
        observer = [str(CASES / "observer"), os.environ.get("PYTHONPATH", "")]
        variables = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, observer)),
            "OBSERVER_FOLDER": str(seen),
            "OBSERVER_MOVE": str(move),
            "OBSERVER_DOUBLE": "1" if double else "",
            "OBSERVER_ROWS": "1" if divide == "always" else "",
            "INSTEP_DIVIDE": divide,
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        began = perf_counter()
        start = start_forked if forked_ranks.preloaded else start_processes
        code, out, err = start(case, ranks, work, variables, limit)
        files = sorted(
            TIMED.sub("#", str(path.relative_to(work)))
            for path in work.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        )
        result = Run(code, out, err, files, perf_counter() - began)
        pickles = sorted(seen.glob("rank*.pickle"), key=lambda path: int(path.stem[4:]))
        for k, path in enumerate(pickles):
            found = pickle.loads(path.read_bytes())
            if k == 0:
                result.parameters, result.times = found["parameters"], found["times"]
                result.calls, result.work = found["calls"], found["work"]
            else:
                result.others.append(found["parameters"])
        return result


def start_processes(
    case: Path, ranks: int, work: Path, variables: dict[str, str], limit: float
) -> tuple[int, str, str]:
    """The exit code, and what was printed to both streams."""
    launcher = ["-m", "instep", "run", "-n", str(ranks)] if ranks else []
    try:
        done = subprocess.run(
            [sys.executable, *launcher, str(case)],
            cwd=work,
            env=variables,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"no end after {limit:.0f} s"
    return done.returncode, done.stdout, done.stderr


def start_forked(
    case: Path, ranks: int, work: Path, variables: dict[str, str], limit: float
) -> tuple[int, str, str]:
    observer = CASES / "observer" / "sitecustomize.py"
    return forked_ranks.start(case, observer, ranks, work, variables, limit)


def run_kept(case: Path, move: float, limit: float, folder: str | None) -> Run:
    """The run of plain python that `folder` keeps, or a new one, which it keeps from then on."""
    if not folder:
        return run(case, 0, move, limit)
    kept = Path(folder, f"{sha256(case.read_bytes()).hexdigest()[:16]}-{move}-each")
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(pickle.dumps(run(case, 0, move, limit)))
    found: Run = pickle.loads(kept.read_bytes())
    return found


def distance(one: list[list[Any]], other: list[list[Any]]) -> float:
    """The largest difference between two runs' parameters, where these are as large as 1 or so."""
    if [[p.shape for p in group] for group in one] != [[p.shape for p in group] for group in other]:
        return float("inf")
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return max((float(abs(a - b).max(initial=0)) for a, b in pairs), default=0.0)


def difference_printed(one: str, other: str) -> float:
    """The largest relative difference of two printed numbers; infinite if the text differs."""
    one, other = TIMING.sub("", one), TIMING.sub("", other)
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return float("inf")
    worst = 0.0
    for a, b in zip_longest(NUMBER.findall(one), NUMBER.findall(other)):
        if a != b:
            x, y = float(a), float(b)
            worst = max(worst, abs(x - y) / max(abs(x), abs(y), 1e-3))
    return worst


def compare(
    case: Path, sizes: list[int], limit: float, folder: str | None = None, *, timed: bool = True
) -> Result:
    title, version = described(case)
    result = Result(case.stem, title, version)
    plain = run_kept(case, 0, limit, folder)
    if plain.code or not plain.parameters:
        result.verdict, result.problem = "no plain run", end_of(plain.errors)
        return result
    moved = run_kept(case, MOVE, limit, folder)
    result.noise = {
        "parameters": distance(plain.parameters, moved.parameters),
        "printed": difference_printed(plain.printed, moved.printed),
    }
    for size in sizes:
        many = run(case, size, limit=limit)
        add(result, plain, many, str(size))
        if many.work:
            result.divided[str(size)] = many.work[0] / (sum(many.work) or 1)
    result.calls = describe_calls(result) if result.verdict != "error" else ""
    compare_as_users_run(result, case, sizes, limit, timed=timed)
    return result


def compare_as_users_run(
    result: Result, case: Path, sizes: list[int], limit: float, *, timed: bool
) -> None:
    """Compare and time it with 2 ranks of which each divides what pays."""
    plain, many = run(case, 0, limit=limit), run(case, 2, limit=limit, divide="auto")
    add(result, plain, many, "2, auto")
    if timed and result.verdict != "error" and len(plain.times) > 2:
        time_longer(result, case, limit, plain)
    if result.verdict in ("different: parameters", "different: printed", "different: " + BOTH):
        result.double = distance_in_double(case, sizes, limit)
        if result.double < DOUBLE:
            result.verdict = "same"


def distance_in_double(case: Path, sizes: list[int], limit: float) -> float:
    """The largest difference with floats of 64 bits; infinite if the case cannot run so."""
    plain = run(case, 0, limit=limit, double=True)
    many = [run(case, size, limit=limit, double=True) for size in sizes]
    if any(one.code or not one.parameters for one in (plain, *many)):
        return float("inf")
    ranks = [p for one in many for p in (one.parameters, *one.others)]
    return max(
        *(distance(plain.parameters, p) for p in ranks),
        *(difference_printed(plain.printed, one.printed) for one in many),
    )


def add(result: Result, plain: Run, many: Run, size: str) -> None:
    result.lines += [
        line
        for line in many.errors.splitlines()
        if line.startswith("instep:") and line not in result.lines
    ]
    if many.code or not many.parameters:
        result.verdict, result.problem = "error", end_of(many.errors)
        return
    found = {
        "parameters": distance(plain.parameters, many.parameters),
        "printed": difference_printed(plain.printed, many.printed),
        "other ranks": max((distance(many.parameters, p) for p in many.others), default=0.0),
    }
    result.differences[size] = found
    result.counts[size] = {name: many.calls.get(name, 0) for name in CALLS}
    limits = {
        "parameters": max(NOISE * result.noise["parameters"], 2e-6),
        "printed": max(NOISE * result.noise["printed"], 1e-4),
        "other ranks": max(NOISE * result.noise["parameters"], 2e-6),
    }
    wrong = [name for name, limit in limits.items() if not found[name] <= limit]
    if plain.files != many.files:
        wrong.append("files")
        only = set(plain.files) ^ set(many.files)
        result.problem += f"files of one of the two: {sorted(only)[:6]} "
    if len(plain.times) != len(many.times):
        wrong.append("steps")
        result.problem += f"{len(many.times) - 1} steps instead of {len(plain.times) - 1} "
    if found["printed"] == float("inf"):
        result.problem += first_other_line(plain.printed, many.printed)
    if wrong and result.verdict != "error":
        result.verdict = "different: " + ", ".join(wrong)


def time_longer(result: Result, case: Path, limit: float, own: Run | None = None) -> None:
    """Time longer runs; `own`: the case's own one under plain python."""
    times = (own or run(case, 0, limit=limit)).times
    if len(times) < 3:
        return
    rounds = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as threads:
        longer = write_longer(case, len(times) - 1, times[-1] - times[0], Path(folder))
        for _ in range(ROUNDS):
            plain, many = run(longer, 0, limit=limit), run(longer, 2, limit=limit, divide="auto")
            if many.code or len(plain.times) != len(many.times):
                result.verdict, result.problem = "error", f"longer run: {end_of(many.errors)}"
                return
            rounds.append((plain.times, many.times))
        two = list(threads.map(lambda _: run(longer, 0, limit=limit), range(2)))
    result.steps = len(plain.times) - 1
    result.counts["longer"] = {name: many.calls.get(name, 0) for name in CALLS}
    plain_step = statistics.median(step_time(plain) for plain, _ in rounds)
    result.step_ms = 1e3 * plain_step
    result.ratio = statistics.median(step_time(many) / step_time(plain) for plain, many in rounds)
    result.ratio_at_once = max(step_time(each.times) for each in two) / plain_step
    result.ratio_of_all = statistics.median(
        (many[-1] - many[1]) / (plain[-1] - plain[1]) for plain, many in rounds
    )


def end_of(errors: str) -> str:
    """The last lines of what was printed to stderr."""
    return FOLDER.sub("", errors)[-1500:]


def describe_calls(result: Result) -> str:
    """How much of the work with gradients is divided, at the number of ranks where it is least."""
    share = min(result.divided.values())
    return "divided" if share >= 0.8 else "partly" if share > 0 else "whole"


def first_other_line(one: str, other: str) -> str:
    for a, b in zip_longest(one.splitlines(), other.splitlines()):
        if a is None or b is None or NUMBER.sub("#", a) != NUMBER.sub("#", b):
            return f"printed {b!r} instead of {a!r} "
    return ""


def step_time(times: list[float]) -> float:
    """The median time between two steps in the last quarter of the run: comparisons are over."""
    gaps = [b - a for a, b in pairwise(times)]
    return statistics.median(gaps[3 * len(gaps) // 4 :]) if gaps else 0.0


def described(case: Path) -> tuple[str, str]:
    """The case's first line, and the version of the package that it begins with."""
    title = case.read_text().split('"""')[1].splitlines()[0].rstrip(".")
    package = title.partition(":")[0].split()[0]
    try:
        return title, metadata.version(package)
    except metadata.PackageNotFoundError:
        return title, ""


def time_examples(names: list[str], limit: float) -> None:
    """Time longer runs of the scripts of examples/unedited, all or those of these names."""
    rows = load(EXAMPLES_JSON)
    for script in sorted(EXAMPLES.glob("*.py")):
        if names and script.stem not in names:
            continue
        result = Result(script.stem, "", "")
        time_longer(result, script, limit)
        if result.problem:
            raise SystemExit(f"{script.stem}: {result.problem}")
        rows[script.stem] = {name: getattr(result, name) for name in TIMES}
        print(script.stem, rows[script.stem], flush=True)
        EXAMPLES_JSON.write_text(dumped(rows))


def load(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def dumped(rows: dict[str, Any]) -> str:
    return json.dumps(rows, indent=1, sort_keys=True) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names without .py; default: all")
    parser.add_argument("--json", metavar="FILE", help="add the results to those in FILE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--limit", type=float, default=300, help="seconds for one run")
    parser.add_argument("--keep", metavar="FOLDER", help="for the runs of plain python")
    parser.add_argument(
        "--preload", nargs="+", metavar="MODULE", help="fork all processes from one with these"
    )
    parser.add_argument(
        "--times", action="store_true", help="only the longer runs, for cases in FILE"
    )
    parser.add_argument(
        "--no-times", action="store_true", help="no longer runs; times in FILE are kept"
    )
    parser.add_argument(
        "--examples", action="store_true", help="time the scripts of examples/unedited instead"
    )
    parser.add_argument("--docs", action="store_true", help="write the tables of docs/unedited*.md")
    parser.add_argument("--no-runs", action="store_true", help="use the results in FILE")
    args = parser.parse_args()
    if args.preload:
        forked_ranks.preload(args.preload)
    known = sorted(path for path in CASES.glob("*.py"))
    chosen = [path for path in known if not args.cases or path.stem in args.cases]
    rows = load(Path(args.json)) if args.json else {}
    if args.examples:
        time_examples(args.cases, args.limit)
    elif not args.no_runs:
        for case in chosen:
            if args.times:
                result = Result(**rows[case.stem])
                time_longer(result, case, args.limit)
            else:
                timed = not args.no_times
                result = compare(case, args.ranks, args.limit, args.keep, timed=timed)
                if args.no_times and case.stem in rows:
                    for name in TIMES:
                        setattr(result, name, rows[case.stem].get(name, 0))
            rows[case.stem] = asdict(result)
            print(f"{case.stem}: {result.verdict}; {result.calls} {list(result.counts.values())}")
            print("   ", result.noise, result.differences, f"{result.step_ms:.1f} ms", flush=True)
            times = (result.ratio, result.ratio_at_once, result.ratio_of_all)
            print("   ", *(f"{each:.2f}" for each in times), *result.lines[:4])
            if result.problem:
                print("   ", result.problem, flush=True)
            if args.json:
                Path(args.json).write_text(dumped(rows))
    if args.docs:
        write(rows, load(EXAMPLES_JSON), ROOT / "docs")


if __name__ == "__main__":
    main()
