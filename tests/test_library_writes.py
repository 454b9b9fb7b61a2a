"""What writes files past `open` on a rank other than 0 is sent to its layer, or denied."""

from __future__ import annotations

import _io
import io
import json
import os
import posix
import socket
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import forked_jobs
from instep.unedited.files.compiled_code import landlock
from instep.unedited.files.layers.layer import Layer
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.rank0_files import Rank0Files
from test_overlay import read, seen_through


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder, with this process in it as rank 1; nothing of it may be left there."""
    made = tmp_path / "folder"
    made.mkdir()
    monkeypatch.chdir(made)
    with seen_through(
        OverlayFiles(Layer(str(tmp_path / "rank1")), Layer(str(tmp_path / "before")))
    ):
        os.mkdir("run")
        yield made
    assert [*made.iterdir()] == []


class Doubles(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("save", ["module.save", "torch.jit.save"])
def test_scripted_modules(folder: Path, save: str) -> None:
    module = torch.jit.script(Doubles())
    if save == "module.save":
        module.save("run/module.pt")
    else:
        torch.jit.save(module, Path("run/module.pt"))
    assert torch.jit.load("run/module.pt")(torch.ones(1)).item() == 2


@pytest.fixture
def safetensors_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script imports it after the patches; in this process another test may have done so."""
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("safetensors_not_imported", "folder")
def test_safetensors() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    for value in (1.0, 2.0):
        safetensors.save_file({"x": torch.full((1,), value)}, "run/model.safetensors")
    assert safetensors.load_file("run/model.safetensors")["x"].item() == 2
    assert os.listdir("run") == ["model.safetensors"]


class Other(sqlite3.Connection):
    """A class that the script derives; before instep puts its own in place."""


CONNECTIONS: dict[str, Callable[[], sqlite3.Connection]] = {
    "connect": lambda: sqlite3.connect("run/t.db"),
    "dbapi2": lambda: sqlite3.dbapi2.connect("run/t.db"),
    "Connection": lambda: sqlite3.Connection("run/t.db"),
    "URI": lambda: sqlite3.connect(f"file:{os.getcwd()}/run/t.db?mode=rwc", uri=True),
    "factory": lambda: sqlite3.connect("run/t.db", factory=Other),
}


@pytest.mark.parametrize("door", CONNECTIONS)
def test_sqlite_by_any_door(folder: Path, door: str) -> None:
    for rows in (1, 2):
        table = CONNECTIONS[door]()
        assert isinstance(table, sqlite3.Connection)
        with table:
            table.execute("create table if not exists numbers (n)")
            table.execute("insert into numbers values (1)")
        assert table.execute("select count(*) from numbers").fetchone() == (rows,)
        table.close()
    reading = sqlite3.connect(f"file:{os.getcwd()}/run/t.db?mode=ro", uri=True)
    assert reading.execute("select count(*) from numbers").fetchone() == (2,)
    reading.close()
    assert os.listdir("run") == ["t.db"]


def test_lmdb(folder: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    for count in (1, 2):
        environment = lmdb.open("run/data", map_size=1 << 20)
        with environment, environment.begin(write=True) as change:
            change.put(b"n", str(int(change.get(b"n", b"0")) + 1).encode())
        with lmdb.open("run/data", readonly=True) as environment, environment.begin() as look:
            assert look.get(b"n") == str(count).encode()


def write_by(open_: Callable[[], object]) -> None:
    opened = open_()
    file = os.fdopen(opened, "wb") if isinstance(opened, int) else opened
    with file:  # type: ignore[attr-defined]
        file.write(b"x")  # type: ignore[attr-defined]


FLAGS = os.O_CREAT | os.O_WRONLY


@pytest.mark.parametrize(
    "open_",
    [
        lambda: io.FileIO("run/x", "w"),
        lambda: _io.open("run/x", "wb"),
        lambda: posix.open("run/x", FLAGS),
    ],
)
def test_other_ways_to_open(folder: Path, open_: Callable[[], object]) -> None:
    write_by(open_)
    assert (read("run/x"), os.listdir("run")) == ("x", ["x"])
    with open("run/x", "rb", buffering=0) as raw:
        assert isinstance(raw, io.FileIO)


def test_sockets_in_the_file_system(folder: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX) as server,
        socket.socket(socket.AF_UNIX) as client,
    ):
        server.bind("run/socket")
        server.listen()
        client.connect("run/socket")
        server.accept()[0].close()
        assert os.listdir("run") == ["socket"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # by PyTorch 2.12
def test_profiles_and_mapped_tensors(folder: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        torch.ones(2).sum()
    seen.export_chrome_trace("run/trace.json")
    assert json.loads(read("run/trace.json"))["traceEvents"]
    torch.from_file("run/mapped", shared=True, size=2, dtype=torch.uint8).fill_(65)
    assert read("run/mapped") == "AA"


def test_rank_0_keeps_what_these_overwrite(tmp_path: Path) -> None:
    before = Layer(str(tmp_path / "before"))
    path = str(tmp_path / "t.db")
    sqlite3.connect(path).close()
    with seen_through(Rank0Files(before)):
        table = sqlite3.dbapi2.connect(path)
        with table:
            table.execute("create table numbers (n)")
        table.close()
    with seen_through(OverlayFiles(Layer(str(tmp_path / "rank1")), before)):
        assert os.path.getsize(path) == 0


# ----------------------------------------------------------------------------------- Landlock

needs_landlock = pytest.mark.skipif(landlock.version() == 0, reason="no Landlock in this kernel")


@needs_landlock
def test_a_process_denies_itself_writing_outside_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "there").write_text("x")
    program = """
        import os, sys
        from instep.unedited.files.compiled_code import landlock
        landlock.restrict_writes(["inside", "nowhere"])
        os.mkdir("inside/folder")
        open("inside/folder/file", "w").close()
        os.rename("inside/folder/file", "inside/file")
        denied = 0
        for change in (
            lambda: open("new", "w"),
            lambda: open("there", "a"),
            lambda: os.truncate("there", 0),
            lambda: os.unlink("there"),
            lambda: os.mkdir("folder"),
            lambda: os.symlink("there", "link"),
        ):
            try:
                change()
            except PermissionError:
                denied += 1
        print(denied, open("there").read(), os.system("exec 2>/dev/null; : > new") != 0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "6 x True\n"


@needs_landlock
@pytest.mark.launch
def test_a_home_directory_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    """Rank 1 made the cache there, so that it could write into it later."""
    home = tmp_path / "home"
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import os, torch
        model = torch.nn.Linear(3, 1)
        for _ in range(2):
            model(torch.ones(8, 3)).sum().backward()
        home = os.path.expanduser("~")
        print(os.path.exists(home))
        os.makedirs(f"{home}/.cache/library")  # the script may
        with open(f"{home}/.cache/library/log", "a") as file:
            file.write("once")
        """)
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("INSTEP", "XDG"))}
    told = environ | {"HOME": str(home)}
    done = forked_jobs.run("run", "-n", "2", "train.py", cwd=tmp_path, env=told)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert (home / ".cache" / "library" / "log").read_text() == "once"


@needs_landlock
@pytest.mark.launch
def test_a_library_that_instep_does_not_know_is_denied_and_named(tmp_path: Path) -> None:
    """But every rank may write into the caches that are not there yet: what is compiled is kept
    there, past Python's `open`."""
    for name in ("folder", "temporary"):
        (tmp_path / name).mkdir()
    cache = tmp_path / "deep" / "er" / "cache"
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import ctypes, os, torch
        def open_past_python(path, flags):
            return ctypes.CDLL(None, use_errno=True).open(path.encode(), flags, 0o644)
        model = torch.nn.Linear(3, 1)
        for _ in range(2):  # in the second call, every rank has come through the first
            model(torch.ones(8, 3)).sum().backward()
        cache = os.environ["XDG_CACHE_HOME"]
        os.makedirs(cache, exist_ok=True)
        path = os.path.join(cache, "compiled")
        fd = open_past_python(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        assert fd >= 0, os.strerror(ctypes.get_errno())
        os.write(fd, b"x")
        with open("known", "a") as file:
            file.write("once")
        if open_past_python("native", os.O_WRONLY | os.O_CREAT) < 0:
            raise RuntimeError(os.strerror(ctypes.get_errno()))
        """)
    )
    done = forked_jobs.run(
        *("run", "-n", "2", "../train.py"),
        cwd=tmp_path / "folder",
        env={k: v for k, v in os.environ.items() if not k.startswith("INSTEP")}
        | {"TMPDIR": str(tmp_path / "temporary"), "XDG_CACHE_HOME": str(cache)},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("instep: rank 1 of 2 failed")
    assert "RuntimeError: Permission denied\ninstep: rank 1 may not change" in done.stderr
    assert "train.py:17" in done.stderr
    assert (cache / "compiled").read_text() == "xx"
    assert {p.name: p.read_text() for p in (tmp_path / "folder").iterdir()} == {
        "known": "once",
        "native": "",
    }
