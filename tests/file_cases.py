"""Scripts that use files and commands, under plain Python and unedited on several ranks.

`python tests/file_cases.py [--json FILE] [-n RANKS] [--only WORDS]` runs those of file_scripts.txt
and prints a table: whether what they leave, print and see on every rank is what one process does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 100
_TOGETHER = 12
"""How many scripts run in one process, one after the other."""

DRIVER = r"""
import json, os, shutil, subprocess, sys, time

def _tree(folder):
    found = {}
    for at, folders, names in os.walk(folder):
        for name in sorted(folders + names):
            path = os.path.join(at, name)
            if os.path.islink(path):
                found[path] = ["link", os.readlink(path)]
            elif os.path.isdir(path):
                found[path] = [oct(os.stat(path).st_mode)]
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    found[path] = [oct(os.stat(path).st_mode), file.read().hex()]
            else:
                found[path] = ["no file"]
    return found

def _tell(views):
    # what this rank sees goes to the test, past the overlay
    session = sys.modules.get("instep.unedited.session")
    current = session and session.current()
    rank = current.world.rank if current else 0
    if not current:
        _dump(views, f"{sys.argv[2]}/{rank}.json")
        return
    from instep.unedited.files.bypass import bypass_overlay
    with bypass_overlay():
        _dump(views, f"{sys.argv[2]}/{rank}.json")

def _dump(views, path):
    with open(f"{path}.draft", "w") as file:
        json.dump(views, file)
    os.replace(f"{path}.draft", path)  # a rank may be stopped at any time

def see(*values):
    _seen.extend(map(repr, values))

if __name__ == "__main__":
    _views, _start = {}, os.getcwd()
    for _folder, _name, _text in json.load(open(sys.argv[1])):
        _seen = []
        os.chdir(f"{_start}/{_folder}")
        try:
            exec(compile(_text, _name, "exec"), globals())
        except Exception as error:
            _seen.append(f"{type(error).__name__}: {error}")
            if "--alone" in sys.argv:
                raise
        finally:
            os.chdir(_start)
            print(_name, _seen, flush=True)
            _views[_name] = [_seen, _tree(_folder)]
            _tell(_views)
"""


@dataclass(frozen=True)
class Script:
    """One of them."""

    name: str
    text: str
    needs: str | None
    alone: bool
    fast: bool

    @property
    def folder(self) -> str:
        """Where it runs."""
        return self.name.replace(" ", "-").replace(",", "")


def scripts() -> list[Script]:
    """Those that can be run here."""
    found = []
    for part in Path(__file__).with_suffix("").with_name("file_scripts.txt").read_text().split(
        "\n### "
    )[1:]:  # fmt: skip
        head, _, text = part.partition("\n")
        name, *remarks = head.split("  # ")
        needs = next((r.removeprefix("needs ") for r in remarks if r.startswith("needs ")), None)
        found.append(Script(name, text, needs, "alone" in remarks, "fast" in remarks))
    return found


def can_run(script: Script) -> bool:
    """Whether what it needs is there."""
    if script.needs == "a user without all rights":
        return os.geteuid() != 0
    return script.needs is None or importlib.util.find_spec(script.needs) is not None


@dataclass(frozen=True)
class Outcome:
    """What came of one launch."""

    code: int | str
    output: dict[str, str]
    """What each script printed."""
    views: list[dict[str, Any]]
    """What each rank saw of each script: the values, and the files that it left."""
    files: dict[str, dict[str, Any]]
    """What each script left."""
    errors: str


def run(chosen: list[Script], ranks: int) -> Outcome:
    """Run them one after the other in one launch; 0 ranks: under plain Python."""
    with tempfile.TemporaryDirectory(dir="/tmp") as above:  # a socket's path may have 107 letters
        top = Path(above)
        for name in ("w", "tmp", "tmp/views"):  # a rank other than 0 may write into TMPDIR only
            (top / name).mkdir()
        (top / "driver.py").write_text(DRIVER)
        (top / "cases.json").write_text(json.dumps([(s.folder, s.name, s.text) for s in chosen]))
        for script in chosen:
            data = top / "w" / script.folder / "data"
            data.mkdir(parents=True)
            (data.parent / "old.txt").write_text("old\n")
            for name in ("1", "2"):
                (data / f"{name}.txt").write_text(name)
        return _launched(top, chosen, ranks)


def _launched(top: Path, chosen: list[Script], ranks: int) -> Outcome:
    run = [sys.executable, *(["-m", "instep", "run", "-n", str(ranks)] if ranks else [])]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("INSTEP", "PYTHONHASH"))}
    alone = ["--alone"] if any(script.alone for script in chosen) else []
    try:
        done = subprocess.run(
            [*run, str(top / "driver.py"), str(top / "cases.json"), str(top / "tmp/views"), *alone],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False,
            cwd=top / "w", env=clean
            | {"TMPDIR": str(top / "tmp"), "PYTHONHASHSEED": "0", "INSTEP_DIVIDE": "always"},
        )  # fmt: skip
        code, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        code, output, errors = f"none in {SECONDS} s", _text(error.stdout), _text(error.stderr)
    lines = output.splitlines()
    return Outcome(
        code,
        {s.name: "".join(line for line in lines if line.startswith(s.name)) for s in chosen},
        [json.loads(path.read_text()) for path in sorted((top / "tmp/views").glob("*.json"))],
        {script.name: _tree(top / "w", script.folder) for script in chosen},
        errors,
    )


def _text(output: Any) -> str:
    return output.decode() if isinstance(output, bytes) else output or ""


def _tree(top: Path, folder: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "driver"}
    exec(DRIVER, scope)
    before = os.getcwd()
    os.chdir(top)
    try:
        found: dict[str, Any] = scope["_tree"](folder)
        return found
    finally:
        os.chdir(before)


def differences(script: Script, plain: Outcome, several: Outcome, ranks: int) -> list[str]:
    """What was not as under plain Python."""
    name = script.name
    found = []
    if (plain.code, plain.output[name]) != (several.code, several.output[name]):
        found.append(
            f"{plain.code} {plain.output[name]}  !=  {several.code} {several.output[name]}"
        )
    if plain.files[name] != several.files[name]:
        found.append(f"left {_unlike(plain.files[name], several.files[name])}")
    if plain.code == 0 and len(several.views) != ranks:  # a failing job stops its ranks
        found.append(f"{len(several.views)} ranks came to its end")
    expected = plain.views[0].get(name) if plain.views else None
    for rank, view in enumerate(several.views):
        seen = view.get(name)
        if seen != expected:
            both = seen is not None and expected is not None
            values = both and seen[0] != expected[0] and (expected[0], seen[0])
            said = values or (_unlike(expected[1], seen[1]) if both else seen)
            found.append(f"rank {rank} saw {said}")
    if found and several.errors:
        found.append(several.errors[-1500:])
    return found


def _unlike(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    return {
        path: (one.get(path), two.get(path))
        for path in one | two
        if one.get(path) != two.get(path)
    }  # fmt: skip


def table(chosen: Iterable[Script], ranks: int) -> dict[str, list[str]]:
    """For each script what differs; those that fail together are tried alone once more."""
    found: dict[str, list[str]] = {}
    chosen = list(chosen)
    shared = [script for script in chosen if not script.alone]
    groups = [shared[at : at + _TOGETHER] for at in range(0, len(shared), _TOGETHER)]
    for group in [*groups, *([script] for script in chosen if script.alone)]:
        found |= _compared(group, ranks)
        if len(group) > 1:
            for script in group:
                if found[script.name]:
                    found |= _compared([script], ranks)
    return {script.name: found[script.name] for script in chosen}


def _compared(group: list[Script], ranks: int) -> dict[str, list[str]]:
    plain, several = run(group, 0), run(group, ranks)
    return {script.name: differences(script, plain, several, ranks) for script in group}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("-n", type=int, default=2)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    chosen = [script for script in scripts() if options.only in script.name]
    found = table(filter(can_run, chosen), options.n)
    rows = {s.name: found.get(s.name, [f"not run: there is no {s.needs}"]) for s in chosen}
    for name, unlike in rows.items():
        print(f"{name:55} {'same' if not unlike else unlike[0][:300]}")
        for more in unlike[1:]:
            print(f"    {more[:1500]}")
    same = sum(not unlike for unlike in rows.values())
    print(f"{same} of {len(found)} the same under plain Python and on {options.n} ranks")
    if options.json:
        options.json.write_text(json.dumps({"ranks": options.n, "cases": rows}, indent=1))
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
