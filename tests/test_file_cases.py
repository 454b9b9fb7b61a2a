"""The scripts of file_scripts.txt, each in one process that plays a rank, or on a pool's ranks.

`test_children.py` launches some of them; here all run that need no process of their own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import file_cases
from instep.distributed.rendezvous import bootstrap
from instep.process.patching import PatchHandle
from instep.unedited import patch_table
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.layers.generations import Generations, before_layer
from instep.unedited.files.layers.layer import Layer
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.rank0_files import Rank0Files
from instep.unedited.processes import children
from instep.unedited.processes.command_files import GenerationChange
from instep.unedited.processes.patches import PROCESS_PATCHES
from instep.unedited.rank0_relay import Relay
from pool import run
from test_overlay import seen_through

RUNNABLE = {s.name: s for s in file_cases.scripts() if file_cases.can_run(s) and not s.alone}
PROCESSES = re.compile(
    r"subprocess|os\.(system|popen|spawn|posix_spawn|fork)|multiprocessing|pty|DataLoader"
)
COMMANDS = re.compile(r"subprocess|os\.(system|popen|spawn|posix_spawn)|pty\.")
ELSEWHERE = (
    "loaders that begin before a command and read after it",  # has workers of its own
    "Popen that says when it is ready",  # the command may end before rank 1 has looked
)
"""Nor those with rmtree: a folder may go on rank 0 between rank 1's two looks when it lists it."""
OF_FILES = [
    name
    for name, script in RUNNABLE.items()
    if not PROCESSES.search(script.text) and "safetensors" not in script.text
]
"""`seen_through` installs no patches of libraries; the launched cases have them."""
OF_COMMANDS = [
    name
    for name, script in RUNNABLE.items()
    if COMMANDS.search(script.text) and name not in ELSEWHERE and "rmtree" not in script.text
]


def stocked(folder: Path) -> Path:
    """What the scripts find, as `file_cases.run` puts it there."""
    (folder / "data").mkdir(parents=True)
    (folder / "old.txt").write_text("old\n")
    for name in ("1", "2"):
        (folder / "data" / f"{name}.txt").write_text(name)
    return folder


def tree() -> dict[str, Any]:
    """What is in the present folder, as this rank sees it."""
    scope: dict[str, Any] = {"__name__": "driver"}
    exec(file_cases.DRIVER, scope)
    found: dict[str, Any] = scope["_tree"](".")
    return found


def seen(name: str, folder: str) -> list[Any]:
    """What this process sees when it runs a script in a folder."""
    values: list[str] = []
    scope = {
        "__name__": "case",
        "json": json,
        "os": os,
        "shutil": shutil,
        "time": time,
        "subprocess": subprocess,
        "sys": sys,
        "see": lambda *v: values.extend(map(repr, v)),
    }
    before = os.getcwd()
    os.chdir(folder)
    try:
        try:
            exec(compile(RUNNABLE[name].text, name, "exec"), scope)
        except Exception as error:
            values.append(f"{type(error).__name__}: {error}")
        return [values, tree()]
    finally:
        os.chdir(before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OF_FILES)
def test_a_script_sees_the_files_of_one_process_on_every_rank(tmp_path: Path, name: str) -> None:
    shared = stocked(tmp_path / "shared")
    alone = seen(name, str(stocked(tmp_path / "alone")))
    before = Layer(str(tmp_path / "before"))
    with seen_through(Rank0Files(before)):
        assert as_alone(seen(name, str(shared))) == as_alone(alone)
    left = {path: path.lstat() for path in sorted(shared.rglob("*"))}
    with seen_through(OverlayFiles(Layer(str(tmp_path / "rank1")), before)):
        assert as_alone(seen(name, str(shared))) == as_alone(alone)
    changed = {path: path.lstat() for path in sorted(shared.rglob("*"))}
    assert [(p, s.st_mtime_ns) for p, s in changed.items() if not p.is_dir()] == [
        (p, s.st_mtime_ns) for p, s in left.items() if not p.is_dir()
    ]
    assert changed.keys() == left.keys()


def as_alone(view: list[Any]) -> Any:
    """Without what differs between two folders: their paths, and names that tempfile draws."""
    return json.loads(re.sub(r"/(alone|shared)|tmp[a-z0-9_]{8}", "", json.dumps(view)))


@contextmanager
def unedited(layers: str) -> Iterator[None]:
    """As a rank of an unedited script, with its files and commands; the layers lie in a folder."""
    world = bootstrap.current()
    relay = Relay(dist.PrefixStore(layers, bootstrap.store()), world.rank, world.size)
    files: Rank0Files | OverlayFiles
    if world.rank == 0:
        files, generations = Rank0Files(before_layer(layers, 0)), None
    else:
        generations = Generations(f"{layers}/rank{world.rank}", layers)
        files = OverlayFiles(generations.rank_layer, generations.before)
    with seen_through(files):
        change = GenerationChange(files, layers, generations)
        children.set_sharing(children.SharedCommands(relay, change, patch_table.install_files))
        patched = PatchHandle(PROCESS_PATCHES)
        try:
            yield
        finally:
            patched.remove()
            children.set_sharing(None)


def on_this_rank(name: str, folder: str, layers: str) -> list[Any]:
    """For a pool: what a rank sees of a script."""
    with unedited(layers):
        view = seen(name, folder)
    with bypass_overlay():
        return view


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (place % 4 > 0))
        for place, name in enumerate(OF_COMMANDS)
    ],
)
def test_a_script_sees_its_commands_run_once_on_every_rank(tmp_path: Path, name: str) -> None:
    shared, layers = stocked(tmp_path / "shared"), tmp_path / "layers"
    alone = seen(name, str(stocked(tmp_path / "alone")))
    for rank in range(2):
        (layers / f"rank{rank}").mkdir(parents=True)
    for view in run(2, on_this_rank, name, str(shared), str(layers)):
        assert as_alone(view) == as_alone(alone)
    before = os.getcwd()
    os.chdir(shared)
    try:
        assert tree() == alone[1]
    finally:
        os.chdir(before)


def as_a_library(folder: str, layers: str) -> int:
    """For a pool: what a command of installed code returns."""
    installed = os.path.join(sysconfig.get_path("purelib"), "some_library", "cache.py")
    scope: dict[str, Any] = {"os": os}
    with unedited(layers):
        exec(
            compile(f"code = os.system('echo x >> {folder}/log; exit 3')", installed, "exec"), scope
        )
    return os.waitstatus_to_exitcode(scope["code"])


def test_a_command_that_a_library_starts_runs_on_every_rank(tmp_path: Path) -> None:
    """It knows of several processes, or fills a cache."""
    for rank in range(2):
        (tmp_path / "layers" / f"rank{rank}").mkdir(parents=True)
    assert run(2, as_a_library, str(tmp_path), str(tmp_path / "layers")) == [3, 3]
    assert (tmp_path / "log").read_text() == "x\nx\n"
