"""The map from statements to the tests that run through them, and how it is made."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import touched
from running import Runner, each
from touched import Site
from trees import ROOT

PACKAGES = ("training", "distributed/communication", "distributed/shm", "unedited")


def sources(package: str) -> list[str]:
    """A package's files, as paths in the tree."""
    folder = ROOT / "src" / "instep" / package
    return [str(path.relative_to(ROOT)) for path in sorted(folder.rglob("*.py"))]


def make(folder: Path, runners: list[Runner], files: Iterable[str] | None = None) -> dict[str, Any]:
    """Run the suite in instrumented copies: what each test passes, its time and its outcome."""
    sites: list[Site] = []
    texts = {}
    for package in PACKAGES:
        for path in sources(package):
            texts[path] = touched.instrument(path, (ROOT / path).read_bytes(), sites)
    mappings = {}
    for runner in runners:
        mapping = runner.tree.folder / "touched.bin"
        mapping.write_bytes(bytes(len(sites)))
        mappings[id(runner)] = str(mapping)
        for path, text in texts.items():
            runner.tree.write(path, text)
        module = touched.MODULE.format(path=str(mapping), size=len(sites))
        runner.tree.write("src/instep/_touched.py", module.encode())
    tests: list[dict[str, Any]] = []
    began = time.monotonic()

    def one_file(runner: Runner, file: str) -> None:
        _, lines = runner.run([file], 900, touched=mappings[id(runner)])
        tests.extend(lines)
        wrong = [line["test"] for line in lines if line["outcome"] in ("failed", "timed out")]
        seconds = time.monotonic() - began
        print(
            f"{seconds:6.0f} s  {file}: {len(lines)} tests",
            *wrong,
            sep="\n    failed: ",
            flush=True,
        )
        shown = runner.tree.folder / "pytest.log"
        if wrong:
            (folder / f"failed-{Path(file).stem}.log").write_bytes(shown.read_bytes())

    if not files:
        listed = sorted((ROOT / "tests").glob("test_*.py"), key=lambda p: -p.stat().st_size)
        files = [str(path.relative_to(ROOT)) for path in listed]
    each(runners, files, one_file)
    return {"sites": [asdict(site) for site in sites], "tests": tests}


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What `make` returned, and what it returns later for some files of tests."""
    places: dict[tuple[str, ...], int] = {}
    tests: dict[str, dict[str, Any]] = {}
    for made in (old, new):
        keys = [tuple(site.values()) for site in made["sites"]]
        here = [places.setdefault(key, len(places)) for key in keys]
        for line in made["tests"]:
            tests[line["test"]] = line | {"sites": [here[at] for at in line.get("sites", ())]}
    sites = [asdict(Site(*key)) for key in places]
    return {"sites": sites, "tests": list(tests.values())}


class Map:
    """Which tests run through a statement; made from what `make` returns."""

    def __init__(self, made: dict[str, Any]) -> None:
        self.seconds: dict[str, float] = {}
        self._by: dict[tuple[str, ...], set[str]] = defaultdict(set)
        sites = [Site(**site) for site in made["sites"]]
        for line in made["tests"]:
            if line["outcome"] != "passed":
                continue
            self.seconds[line["test"]] = line["seconds"]
            for at in line["sites"]:
                site = sites[at]
                for key in (
                    (site.path, site.function, site.text),
                    (site.path, site.function),
                    (site.path,),
                ):
                    self._by[key].add(line["test"])
        self._known = {(site.path, site.function, site.text) for site in sites}

    def through(self, path: str, function: str, text: str) -> tuple[set[str], str]:
        """The tests, and how closely: through the `statement`, the `function` or the `file`.

        What runs on import is passed by all; it counts for those that run the file's functions.
        """
        if (path, function, text) in self._known:
            return self._by.get((path, function, text), set()), "statement"
        if function and (path, function) in self._by:
            return self._by[path, function], "function"
        return self._by.get((path,), set()), "file"

    @classmethod
    def read(cls, path: Path) -> Map:
        """The map that an earlier run has left."""
        return cls(json.loads(path.read_text()))
