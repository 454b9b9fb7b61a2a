"""Other projects' own tests, on instep and beside it on the original.

    python scripts/suites                     what is inside of PyTorch's wheel, at 2, 3 and 4 ranks
    python scripts/suites torch --np 3
    SUITES=FOLDER python scripts/suites       and those whose sources are in FOLDER/pytorch, ...

Outcomes go into benchmarks/results/suites.json, and the tables of docs/suites.md and
docs/design/suites.md are made from it. Whole logs are in build/suites/outcomes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pages import RESULTS, read_results, write_pages
from runs import count_groups, read_outcomes, run_tests
from suites import BUILD, OURS, ROOT, SUITES, Suite, commands, environment


def name_its_operators(file: Path) -> None:
    """A torchvision that is built for CUDA cannot load its operators beside torch for CPUs, and
    describes two of them without looking whether they are there: those get a definition."""
    text = file.read_text()
    for name in ("nms", "qnms"):
        mark = f'@torch.library.register_fake("torchvision::{name}")'
        signature = "(Tensor a, Tensor b, float c) -> Tensor"
        define = f'torch.library.define("torchvision::{name}", "{signature}")'
        guard = f"if not torchvision.extension._has_ops():\n    {define}\n\n\n"
        text = text.replace(mark, guard + mark)
    file.write_text(text)


def install_needs(sources: Path | None) -> None:
    """What the tests and scripts import, into folders of their own."""
    if not all((BUILD / "site" / name).exists() for name in ("expecttest", "mock")):
        words = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", BUILD / "site"]
        subprocess.run([sys.executable, *words, "expecttest==0.3.0", "mock==5.2.0"], check=True)
    if sources and (Path(sources) / "article").exists() and not (BUILD / "vision").exists():
        words = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", BUILD / "vision"]
        subprocess.run([sys.executable, *words, "torchvision==0.28.0"], check=True)
        name_its_operators(BUILD / "vision" / "torchvision" / "_meta_registrations.py")
    (BUILD / "outcomes").mkdir(parents=True, exist_ok=True)


def run_side(suite: Suite, size: int, side: str, sources: Path) -> dict[str, Any]:
    """Run a suite at one number of ranks on one side; its outcomes."""
    variables = environment(suite, size, side, sources)
    outcomes = {}
    for command, files in commands(suite, size, side, sources):
        for old in (*files, files[0].with_suffix(".log")):
            old.unlink(missing_ok=True)
        run_tests(command, variables, files)
        outcomes.update(read_outcomes(files))
    return {
        "version": version_of(suite, sources),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": git(ROOT, "rev-parse", "--short", "HEAD"),
        "groups": count_groups(outcomes),
        "tests": {
            test: each["outcome"] + (f": {each['reason']}" if each["outcome"] == "fail" else "")
            for test, each in sorted(outcomes.items())
        },
    }


def version_of(suite: Suite, sources: Path) -> str:
    """Which version's tests these are."""
    import torch

    if suite.module:
        return f"PyTorch {torch.__version__}"
    file = sources / suite.folder / "version.txt"
    for package in (file.parent / suite.folder, file.parent / "python" / suite.folder):
        if (package / "__init__.py").exists() and not file.exists():
            found = re.search(r"__version__ = '(.*)'", (package / "__init__.py").read_text())
            if found:
                return f"{suite.folder} {found[1]}"
    version = file.read_text().strip() if file.exists() else git(file.parent, "describe", "--tags")
    return f"{suite.folder} {version}"


def git(folder: Path, *words: str) -> str:
    """What git says about a folder, or "?"."""
    done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "?"


def main() -> int:
    """Run what the command line names; 1 if a test fails on ours that passes on the original."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=" ".join(s.name for s in SUITES))
    parser.add_argument("--np", help="numbers of ranks, as 2,3")
    parser.add_argument("--sources", type=Path, default=os.environ.get("SUITES"))
    parser.add_argument("--pages", action="store_true", help="write the pages only")
    asked = parser.parse_args()
    install_needs(asked.sources and Path(asked.sources))
    worse = 0
    for suite in SUITES if not asked.pages else ():
        sources = Path(asked.sources or "/nowhere").absolute()
        if (asked.suites and suite.name not in asked.suites) or not suite.modules(sources):
            continue
        for size in map(int, asked.np.split(",")) if asked.np else suite.sizes:
            names = (OURS, suite.original) if suite.original else (OURS,)
            sides = {side: run_side(suite, size, side, sources) for side in names}
            results = read_results()
            results.setdefault(suite.name, {})[str(size)] = sides
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            ours, original = sides[OURS]["tests"], sides.get(suite.original, {}).get("tests", {})
            new = [t for t in ours if ours[t].startswith("fail") and original.get(t) == "pass"]
            print(f"{suite.name}, {size} ranks: {len(ours)} tests, worse than the original: {new}")
            worse += len(new)
    write_pages()
    return worse > 0


if __name__ == "__main__":
    sys.exit(main())
