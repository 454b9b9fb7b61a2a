"""The patches of functions that take paths: each one, whichever way it is called, on every rank."""

from __future__ import annotations

import io
import os
import posix
import shutil
import socket
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import library_stand_ins
from instep.unedited.files import os_functions
from instep.unedited.files.layers.layer import Layer
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.rank0_files import Rank0Files
from launching import free_port
from library_stand_ins import plain_write
from ranks_in_turn import all_patches, another_rank, check_on_every_rank
from test_overlay import read, tree, write


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    library_stand_ins.install(monkeypatch)


def unnamed_file(folder: str) -> tuple[int, int]:
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        return os.write(fd, b"text"), os.fstat(fd).st_nlink
    finally:
        os.close(fd)


def by_name() -> Iterator[Callable[[], object]]:
    """Every function of the files, with the arguments that it has by their names."""
    yield lambda: os.mkdir(path="d", mode=0o711)
    yield lambda: os.mkdir(path="d", mode=0o711)
    yield lambda: os.rmdir(path="d")
    yield lambda: os.close(os.open(path="f", flags=os.O_CREAT | os.O_WRONLY, mode=0o640))
    yield lambda: open(file="f", mode="w", encoding="utf-8").close()
    yield lambda: open("f", "rb", 0, None, None, None, True).close()
    yield lambda: open("f", "w", -1, "utf-8", None, None, True, None).close()
    yield lambda: open("f", "a", -1, None, None, None, True, own_opener).close()
    yield lambda: open(
        "g", mode="xb", buffering=0, opener=lambda p, f: os.open(p, f, 0o600)
    ).close()
    yield lambda: os.truncate(path="f", length=7)
    yield lambda: (os.stat(path="f").st_size, os.stat("f", follow_symlinks=False).st_size)
    yield lambda: os.lstat(path="f").st_size
    yield lambda: os.statvfs(path="f").f_namemax
    yield lambda: os.pathconf(path="f", name="PC_NAME_MAX")
    yield lambda: os.access(path="f", mode=os.R_OK, follow_symlinks=True)
    yield lambda: os.access(path="nowhere", mode=os.R_OK)
    yield lambda: os.access(path="f/below", mode=os.R_OK)
    yield lambda: os.symlink(src="f", dst="l", target_is_directory=False)
    yield lambda: os.readlink(path="l")
    yield lambda: os.symlink(src="nowhere", dst="broken")
    yield lambda: os.stat(path="broken", follow_symlinks=True)
    yield lambda: stat.S_ISLNK(os.stat(path="broken", follow_symlinks=False).st_mode)
    yield lambda: os.mkdir("broken")
    yield lambda: os.unlink(path="broken")
    yield lambda: os.link(src="f", dst="h", follow_symlinks=True)
    yield lambda: os.link(src="nowhere", dst="h2")
    yield lambda: os.link(src="f", dst="h")
    yield lambda: os.rename(src="h", dst="h2")
    yield lambda: os.replace(src="h2", dst="h")
    yield lambda: os.remove(path="h")
    yield lambda: os.mkfifo(path="p", mode=0o600)
    yield lambda: os.mknod(path="n", mode=0o600 | stat.S_IFREG)
    yield lambda: os.chmod(path="n", mode=0o604)
    yield lambda: os.chmod("n", 0o640, follow_symlinks=True)
    yield lambda: os.chown(path="n", uid=-1, gid=-1)
    yield lambda: os.lchown(path="n", uid=-1, gid=-1)
    yield lambda: os.utime(path="n", times=(1e9, 1e9))
    yield lambda: os.utime(path="n", ns=(2 * 10**18, 2 * 10**18))
    yield lambda: os.stat("n").st_mtime
    yield lambda: oct(os.stat("n").st_mode)
    yield lambda: os.listdir(path="p")
    yield lambda: sorted(os.listdir())
    yield lambda: sorted(os.listdir(None))
    yield lambda: sorted(os.listdir(b"."))
    yield lambda: sorted(entry.name for entry in os.scandir(path="."))
    yield lambda: sorted(entry.path for entry in os.scandir(None))
    yield lambda: sorted((e.name, e.path, os.fspath(e), e.is_file()) for e in os.scandir(b"."))
    yield lambda: [e.inode() == os.lstat(e.path).st_ino for e in os.scandir(".")]
    yield lambda: sorted((e.name, e.is_file(), e.is_dir(), e.is_symlink()) for e in os.scandir("."))
    yield lambda: sorted((e.name, e.is_file(follow_symlinks=False)) for e in os.scandir("."))
    yield lambda: sorted((e.name, e.is_dir(follow_symlinks=False)) for e in os.scandir("."))
    yield lambda: [os.fspath(e) for e in sorted(os.scandir("."), key=lambda e: e.name)]
    yield lambda: first_of(os.scandir("."))
    yield lambda: os.makedirs(name="deep/er", exist_ok=True)
    yield lambda: os.chdir(path="deep")
    yield lambda: os.path.basename(os.getcwdb())
    yield lambda: os.path.basename(os.getcwd())
    yield lambda: os.chdir("..")
    yield lambda: os.chdir("nowhere")
    yield lambda: os.chdir("f")
    yield lambda: os.rmdir("f")
    yield lambda: os.unlink("deep")
    yield lambda: os.rmdir("deep")
    yield lambda: os.rename("deep", "deep/er/in")
    yield lambda: os.rename("f", "deep")
    yield lambda: os.rename("deep", "f")
    yield lambda: write("deep", "w", "x")
    yield lambda: write("f/below", "w", "x")
    yield lambda: write("nowhere/below", "w", "x")
    yield lambda: os.truncate("nowhere", 0)
    yield lambda: name_types(lambda: os.mkdir(Path("f")))
    yield lambda: name_types(lambda: os.truncate(Path("nowhere"), 0))
    yield lambda: name_types(lambda: os.chmod(Path("nowhere"), 0o600))
    yield lambda: name_types(lambda: os.rename(Path("nowhere"), Path("there")))
    yield lambda: name_types(lambda: os.listdir(Path("nowhere")))
    yield lambda: shutil.rmtree(path="deep", ignore_errors=False)
    yield lambda: shutil.rmtree("deep")
    yield lambda: os.setxattr(path="f", attribute="user.a", value=b"1")
    yield lambda: os.getxattr(path="f", attribute="user.a")
    yield lambda: os.listxattr(path="f")
    yield lambda: os.removexattr(path="f", attribute="user.a")
    yield lambda: unnamed_file(".")
    yield lambda: unnamed_file("nowhere")
    yield lambda: unnamed_file("f")
    yield from by_descriptor()
    yield tree


def name_types(fails: Callable[[], object]) -> tuple[type, type]:
    with pytest.raises((FileExistsError, FileNotFoundError)) as error:
        fails()
    return type(error.value.filename), type(error.value.filename2)


def first_of(entries: Any) -> bool:
    with entries:
        return next(entries) in [*os.scandir(".")] or True


def by_descriptor() -> Iterator[Callable[[], object]]:
    """Those that take a folder's descriptor."""

    def within(use: Callable[[int], object]) -> Callable[[], object]:
        def do() -> object:
            os.makedirs("folder", exist_ok=True)
            fd = os.open("folder", os.O_RDONLY)
            try:
                return use(fd)
            finally:
                os.close(fd)

        return do

    def in_a_file(use: Callable[[int], object]) -> Callable[[], object]:
        def do() -> object:
            with open("f") as file:
                return use(file.fileno())

        return do

    flags = os.O_CREAT | os.O_WRONLY
    yield within(lambda fd: os.close(os.open("a", flags, 0o600, dir_fd=fd)))
    yield within(lambda fd: os.close(os.open(path="b", flags=flags, dir_fd=fd)))
    yield within(lambda fd: os.close(os.open(os.path.abspath("here"), flags, dir_fd=fd)))
    yield within(lambda fd: os.stat("a", dir_fd=fd).st_size)
    yield within(lambda fd: os.stat(path="nowhere", dir_fd=fd))
    yield within(lambda fd: os.access("a", os.R_OK, dir_fd=fd))
    yield within(lambda fd: os.access("nowhere", os.R_OK, dir_fd=fd))
    yield within(lambda fd: os.mkdir("s", dir_fd=fd))
    yield within(lambda fd: os.mkdir("s", mode=0o700, dir_fd=fd))
    yield within(lambda fd: os.mkfifo("fifo", dir_fd=fd))
    yield within(lambda fd: os.symlink("a", "link", dir_fd=fd))
    yield within(lambda fd: os.readlink("link", dir_fd=fd))
    yield within(lambda fd: os.link("a", "c", src_dir_fd=fd, dst_dir_fd=fd))
    yield within(lambda fd: os.link("f", "fromhere", dst_dir_fd=fd))
    yield within(lambda fd: os.rename("c", "tohere", src_dir_fd=fd))
    yield within(lambda fd: os.replace("f", "c", dst_dir_fd=fd))
    yield within(lambda fd: os.rename("c", "f", src_dir_fd=fd, dst_dir_fd=None))
    yield within(lambda fd: os.rename("c", "c2", src_dir_fd=fd))
    yield within(lambda fd: os.chmod("a", 0o604, dir_fd=fd))
    yield within(lambda fd: os.utime("a", (1e9, 1e9), dir_fd=fd))
    yield within(lambda fd: os.chown("a", -1, -1, dir_fd=fd))
    yield within(lambda fd: oct(os.stat("a", dir_fd=fd).st_mode))
    yield within(lambda fd: os.unlink("a", dir_fd=fd))
    yield within(lambda fd: os.unlink("a", dir_fd=fd))
    yield within(lambda fd: os.rmdir("s", dir_fd=fd))
    yield within(lambda fd: (os.makedirs("folder/t/u"), shutil.rmtree("t", dir_fd=fd)))
    yield within(lambda fd: shutil.rmtree("t", dir_fd=fd))
    yield within(lambda fd: sorted(os.listdir(fd)))
    yield within(lambda fd: sorted(entry.path for entry in os.scandir(fd)))
    yield within(lambda fd: stat.S_ISDIR(os.stat(fd).st_mode))
    yield in_a_file(lambda fd: os.stat("a", dir_fd=fd))
    yield in_a_file(lambda fd: os.mkdir("a", dir_fd=fd))
    yield in_a_file(lambda fd: os.stat(fd).st_size)
    yield in_a_file(lambda fd: os.truncate(fd, 3))
    yield lambda: os.stat("f", dir_fd=1 << 20)


def test_functions_of_the_files_take_their_arguments_in_every_way(tmp_path: Path) -> None:
    check_on_every_rank(tmp_path, by_name)


# --------------------------------------------------------------------- libraries that open by name


def installed() -> Iterator[Callable[[], object]]:
    """Python's own modules, numpy and torch."""
    yield lambda: np.save("a", np.arange(2))
    yield lambda: np.save(file="a.npy", arr=np.arange(3))
    yield lambda: np.save(arr=np.arange(3), file=Path("b"))
    yield lambda: np.load("a.npy").tolist() + np.load("b.npy").tolist()
    yield lambda: np.savez("z", x=np.arange(2))
    yield lambda: np.savez(file="z2.npz", x=np.arange(3))
    yield lambda: np.savez_compressed("c", np.arange(4))
    yield lambda: np.savez_compressed(file="c2", y=np.arange(4))
    yield lambda: [np.load(f"{name}.npz")[key].tolist() for name, key in
                   (("z", "x"), ("z2", "x"), ("c", "arr_0"), ("c2", "y"))]  # fmt: skip
    yield lambda: into("o.npy", lambda file: np.save(file, np.arange(5)))
    yield lambda: np.load("o.npy").tolist()
    yield lambda: np.loadtxt("nowhere")
    yield lambda: (np.savetxt("t.txt", np.eye(2)), np.loadtxt("t.txt").tolist())[1]
    yield lambda: torch.save([1], "m.pt")
    yield lambda: torch.save(obj=[2], f="m2.pt")
    yield lambda: torch.save({"x": torch.arange(3)}, f=Path("m3.pt"))
    yield lambda: into("m4.pt", lambda file: torch.save([4], file))
    yield lambda: [torch.load(f"m{n}.pt") for n in ("", "2", "4")]
    yield lambda: torch.load(f="m3.pt", mmap=True)["x"].tolist()
    yield lambda: torch.load("m3.pt", mmap=False)["x"].tolist()
    yield lambda: from_open("m2.pt", torch.load)
    yield lambda: torch.load("nowhere", mmap=True)
    yield lambda: write("s.bin", "w", "AAAA")
    yield lambda: torch.from_file("s.bin", size=4, dtype=torch.uint8).add_(1).tolist()
    yield lambda: read("s.bin")
    yield lambda: torch.from_file("s.bin", True, size=4, dtype=torch.uint8).add_(1).tolist()
    yield lambda: torch.from_file("s.bin", shared=True, size=4, dtype=torch.uint8).add_(1).tolist()
    yield lambda: read("s.bin")
    yield from databases()
    yield lambda: io.FileIO(file="raw", mode="w", closefd=True).close()
    yield lambda: closing(io.FileIO("raw", "a"), lambda file: file.write(b"ab"))
    yield lambda: closing(io.FileIO("raw"), lambda file: file.read())
    yield lambda: closing(io.FileIO("r2", "x", opener=own_opener), lambda file: file.write(b"c"))
    yield lambda: oct(os.stat("r2").st_mode)
    yield lambda: issubclass(io.FileIO, io.RawIOBase)
    yield lambda: os.close(posix.open("raw", os.O_WRONLY | os.O_TRUNC))
    yield lambda: os.path.getsize("raw")
    yield from temporaries()
    yield lambda: [(at, sorted(d), sorted(f)) for at, d, f in sorted(os.walk("."))]


def into(path: str, use: Callable[[Any], object]) -> None:
    with open(path, "wb") as file:
        use(file)


def from_open(path: str, use: Callable[[Any], object]) -> object:
    with open(path, "rb") as file:
        return use(file)


def closing(file: Any, use: Callable[[Any], object]) -> object:
    with file:
        return use(file)


def own_opener(path: Any, flags: int) -> int:
    return os.open(path, flags, 0o604)


def databases() -> Iterator[Callable[[], object]]:
    """SQLite, by names and URIs."""

    def count(*args: Any, **kwargs: Any) -> Callable[[], object]:
        def do() -> object:
            try:
                table = sqlite3.connect(*args, **kwargs)
            except sqlite3.Error as error:
                return str(error)
            try:
                table.execute("create table if not exists numbers (n)")
                table.execute("insert into numbers values (1)")
                table.commit()
                return table.execute("select count(*) from numbers").fetchone()
            except sqlite3.Error as error:
                return str(error)
            finally:
                table.close()

        return do

    for _ in range(2):
        yield count("t.db")
        yield count(database="t.db", timeout=1.0)
        yield count(b"t.db")
        yield count(Path("t.db"))
        yield count(":memory:")
        yield count("")
        yield count("file:t.db", uri=True)
        yield count("file:t.db?mode=rw", 5.0, 0, None, True, sqlite3.Connection, 128, True)
        yield count("file:t.db?mode=ro", uri=True)
        yield count("file:?mode=memory", uri=True)
        yield count("file:held?mode=memory&cache=private", uri=True)
        yield count("file::memory:", uri=True)
        yield count("file:un%20quoted?mode=rwc", uri=True)
    for name in ("file:nowhere?mode=ro", "file:no/where?mode=ro", "file:no/where?mode=rwc"):
        yield count(name, uri=True)
    yield count("no/where.db")
    yield lambda: sorted(name for name in os.listdir() if "t.db" in name or " " in name)


def temporaries() -> Iterator[Callable[[], object]]:
    """What tempfile makes, in the usual folder and in one of the script's."""
    yield lambda: os.mkdir("mine")
    yield lambda: os.path.dirname(os.path.relpath(tempfile.mkdtemp(dir="mine")))
    yield lambda: closed_fd(tempfile.mkstemp(dir="mine", suffix=".x"))
    yield lambda: closed_fd(tempfile.mkstemp(".x", "p", "mine"))
    yield lambda: len(os.listdir("mine"))
    yield lambda: sorted(name[-2:] == ".x" for name in os.listdir("mine"))
    yield lambda: shutil.rmtree("mine")
    yield lambda: in_temporary(tempfile.mkdtemp())
    yield lambda: in_temporary(tempfile.mkdtemp(dir=tempfile.gettempdir()))
    yield lambda: closed_and_gone(tempfile.mkstemp())
    yield lambda: renamed_within(tempfile.mkdtemp())
    yield named_temporary


def named_temporary() -> object:
    with tempfile.NamedTemporaryFile(suffix=".y") as named, tempfile.TemporaryFile() as other:
        return named.name[-2:], os.path.exists(named.name), other.write(b"x")


def closed_fd(made: tuple[int, str]) -> str:
    os.close(made[0])
    return os.path.dirname(os.path.relpath(made[1]))


def closed_and_gone(made: tuple[int, str]) -> tuple[int, bool]:
    os.write(made[0], b"abc")
    os.close(made[0])
    size = os.path.getsize(made[1])
    os.unlink(made[1])
    return size, os.path.exists(made[1])


def in_temporary(folder: str) -> object:
    """A folder of this process's own, and what goes in and out of it."""
    write(f"{folder}/x", "w", "1")
    os.mkdir(f"{folder}/deep")
    write(f"{folder}/deep/y", "w", "2")
    shutil.copytree(folder, "copied", dirs_exist_ok=True)
    os.rename(f"{folder}/deep/y", "moved")
    os.rename("moved", f"{folder}/back")
    os.link(f"{folder}/x", f"{folder}/linked")
    os.symlink("x", f"{folder}/link")
    os.chmod(f"{folder}/x", 0o604)
    os.mkdir("made")
    os.rename("made", f"{folder}/made")
    os.rename(f"{folder}/deep", "deep out")
    os.rmdir("deep out")
    seen = sorted(os.listdir(folder)), read(f"{folder}/back"), read(f"{folder}/link")
    mode = oct(os.stat(f"{folder}/x").st_mode)
    shutil.rmtree(folder)
    return *seen, mode, sorted(os.listdir("copied")), os.path.exists(folder)


def renamed_within(folder: str) -> object:
    write(f"{folder}/a", "w", "1")
    os.rename(f"{folder}/a", f"{folder}/b")
    os.replace(f"{folder}/b", f"{folder}/c")
    seen = os.listdir(folder), read(f"{folder}/c")
    os.unlink(f"{folder}/c")
    os.rmdir(folder)
    return seen


@pytest.mark.filterwarnings("ignore")
def test_libraries_take_their_paths_in_every_way(tmp_path: Path) -> None:
    check_on_every_rank(tmp_path, installed)


def standing_in() -> Iterator[Callable[[], object]]:
    """Libraries that open files in compiled code, as their stand-ins do."""
    import cv2  # type: ignore[import-not-found]
    import h5py  # type: ignore[import-not-found]
    import lmdb  # type: ignore[import-not-found]
    import pyarrow.parquet  # type: ignore[import-not-found]
    import safetensors  # type: ignore[import-not-found]
    import soundfile  # type: ignore[import-not-found]
    import tokenizers  # type: ignore[import-not-found]
    import torchvision.io.image as image  # type: ignore[import-not-found]

    def say(value: Any) -> Callable[[], object]:
        return lambda: value() if callable(value) else value

    yield lambda: safetensors.serialize_file(1, "a.st")
    yield lambda: safetensors.serialize_file(2, filename="b.st", metadata=None)
    yield lambda: safetensors.serialize_file(filename="a.st", tensors=3)
    yield lambda: (safetensors.safe_open("a.st", "pt"), safetensors.safe_open(
        framework="pt", filename="b.st"))  # fmt: skip
    yield lambda: (cv2.imwrite("i.png", 1), cv2.imread("i.png"))[1]
    yield lambda: (cv2.imwrite(img=2, filename="i.png"), cv2.imread(filename="i.png"))[1]
    yield lambda: (image.write_file("v", 1), image.read_file("v"))[1]
    yield lambda: (image.write_file(filename="v", data=2), image.read_file(path="v"))[1]
    yield lambda: pyarrow.parquet.write_table(1, "p")
    yield lambda: pyarrow.parquet.read_table("p")
    yield lambda: pyarrow.parquet.write_table(2, where=Path("p"))
    yield lambda: pyarrow.parquet.read_table(source="p")
    yield lambda: tokenizers.Tokenizer("t").save("tok")
    yield lambda: tokenizers.Tokenizer("u").save(path="tok2", pretty=False)
    yield lambda: tokenizers.Tokenizer.from_file("tok").said
    yield lambda: tokenizers.Tokenizer.from_file(path="tok2").said
    for library in (h5py.File, soundfile.SoundFile):
        yield lambda library=library: library(library.__name__, "w").said
        for mode in ("w", "a", "r+", "r", "w", "x"):
            yield lambda library=library, mode=mode: library(f"{library.__name__}{mode}", mode).said
            yield lambda library=library, mode=mode: library(mode, mode=mode).said
            yield lambda mode=mode: os.unlink(mode)
        yield lambda library=library: library(library.__name__, "r", 1, more=2).more
        name = {h5py.File: "name", soundfile.SoundFile: "file"}[library]
        for mode in ({"mode": "a"}, {"mode": "r"}, {}):
            yield lambda library=library, named=mode | {name: "named"}: library(**named).said
        yield lambda library=library: library(library.__name__, "r", 1, more=2).options
    for make in (lmdb.open, lmdb.Environment):
        yield lambda make=make: make("env").said
        yield lambda make=make: vars(make("env", 99, True, max_dbs=3)) | {"path": ""}
        yield lambda make=make: make("env", map_size=5).map_size
        yield lambda make=make: make("file", 5, False).said
        yield lambda make=make: make("file", subdir=False).said
        yield lambda make=make: isinstance(make("env"), make)
        yield lambda make=make: make("env", readonly=True).said
        yield lambda make=make: make("env", readonly=True, lock=False).said
        yield lambda make=make: make("nowhere/env")
        yield lambda make=make: make("env2", create=True, mode=0o711).said
        yield lambda: oct(os.stat("env2").st_mode)
        yield lambda make=make: make("env3", create=False)
        yield lambda: os.path.exists("env3")
        yield lambda: (shutil.rmtree("env2"), os.unlink("file"))
    yield lambda: os.path.isdir("env")
    yield lambda: [(at, sorted(d), sorted(f)) for at, d, f in sorted(os.walk("."))]
    yield lambda: {name: read(name) for name in sorted(os.listdir()) if os.path.isfile(name)}


@pytest.mark.usefixtures("stand_ins")
def test_libraries_that_open_by_themselves_are_told_where(tmp_path: Path) -> None:
    check_on_every_rank(tmp_path, standing_in)


@pytest.mark.parametrize("length", [1, 90, 200])
@pytest.mark.parametrize("text", [str, os.fsencode])
def test_sockets_have_names_of_any_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, text: Callable[[str], Any]
) -> None:
    """A layer's path may be longer than a socket's."""
    folder = tmp_path / ("x" * length)
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = Layer(str(tmp_path / "before"))
    for files in (None, Rank0Files(before), OverlayFiles(Layer(str(tmp_path / "rank1")), before)):
        name = text("socket")
        with all_patches(files), socket.socket(socket.AF_UNIX) as server:
            descriptors = len(os.listdir("/proc/self/fd"))
            server.bind(name)
            assert server.getsockname() == "socket"
            server.listen()
            for reach in ("connect", "connect_ex"):
                with socket.socket(socket.AF_UNIX) as client:
                    assert not getattr(client, reach)(name)
                    assert client.getpeername() == "socket"
                server.accept()[0].close()
            assert len(os.listdir("/proc/self/fd")) == descriptors
            assert os.listdir() == ["socket"]
            with (
                socket.socket(socket.AF_UNIX) as again,
                pytest.raises(OSError, match=r"exists|use"),
            ):
                again.bind(name)
            os.unlink(name)
    assert os.listdir() == []


def test_the_address_of_a_listener_can_be_connected_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = Layer(str(tmp_path / "before"))
    os.mkdir("x" * 60)
    for files in (None, Rank0Files(before), OverlayFiles(Layer(str(tmp_path / "rank1")), before)):
        with all_patches(files), Listener("x" * 60 + "/socket") as listener:
            assert listener.address == "x" * 60 + "/socket"
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(listener.address)


@pytest.fixture
def rank0_and_rank1(tmp_path: Path) -> tuple[Rank0Files, OverlayFiles]:
    before = Layer(str(tmp_path / "before"))
    return Rank0Files(before), OverlayFiles(Layer(str(tmp_path / "rank1" / "now" / "own")), before)


def serve(address: tuple[str, int], name: bytes) -> tuple[socket.socket, threading.Thread]:
    """A server that says its name to the first client."""
    server = socket.create_server(address)

    def answer() -> None:
        client, _ = server.accept()
        with client:
            client.sendall(name)

    thread = threading.Thread(target=answer)
    thread.start()
    return server, thread


def test_each_rank_has_a_server_of_its_own_at_a_port(
    rank0_and_rank1: tuple[Rank0Files, OverlayFiles], tmp_path: Path
) -> None:
    (tmp_path / "rank1").mkdir()
    port = free_port()
    running = []
    for files in rank0_and_rank1:
        with all_patches(files):
            running.append(serve(("127.0.0.1", port), type(files).__name__.encode()))
    for files in rank0_and_rank1:
        with all_patches(files), socket.create_connection(("localhost", port)) as client:
            assert client.recv(100).decode() == type(files).__name__
    for files, (server, thread) in zip(rank0_and_rank1, running, strict=True):
        thread.join()
        with all_patches(files), pytest.raises(OSError, match="in use"):
            serve(("127.0.0.1", port), b"a second one")
        server.close()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_the_port_of_a_server_is_the_one_that_the_script_names(
    rank0_and_rank1: tuple[Rank0Files, OverlayFiles], tmp_path: Path, kind: socket.SocketKind
) -> None:
    (tmp_path / "rank1").mkdir()
    with socket.socket(type=kind) as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
    running = []
    for files in rank0_and_rank1:
        with all_patches(files):
            running.append(socket.socket(type=kind))
            running[-1].bind(address)
            assert running[-1].getsockname() == address
    for files, server in zip(rank0_and_rank1, running, strict=True):
        with all_patches(files), server, socket.socket(type=kind) as client:
            if kind == socket.SOCK_STREAM:
                server.listen()
                client.connect(address)
                assert client.getpeername() == address
            else:
                client.sendto(type(files).__name__.encode(), address)
                said, sender = server.recvfrom(100)
                assert said.decode() == type(files).__name__
                server.sendto(b"answer", 0, sender)
                assert client.recvfrom(100) == (b"answer", address)


def test_sockets_without_a_file_are_left_alone(tmp_path: Path) -> None:
    files = OverlayFiles(Layer(str(tmp_path / "rank1")), Layer(str(tmp_path / "before")))
    nameless = f"\0instep-{os.getpid()}"
    with (
        all_patches(None),
        socket.socket(socket.AF_UNIX) as server,
        socket.socket(socket.AF_UNIX) as client,
        socket.socket() as internet,
    ):
        os_functions.set_files(files)
        server.bind(nameless)
        server.listen()
        client.connect(nameless)
        server.accept()[0].close()
        internet.bind(("127.0.0.1", 0))
        assert internet.getsockname()[0] == "127.0.0.1"
    assert not (tmp_path / "rank1").exists()


@pytest.mark.usefixtures("stand_ins")
def test_who_only_reads_a_database_takes_no_lock_beside_rank_0s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lmdb

    monkeypatch.chdir(tmp_path)
    os.mkdir("env")
    plain_write("env/data.mdb", "there")
    before, own = Layer(str(tmp_path / "before")), str(tmp_path / "rank1")
    with another_rank(own, before):
        assert lmdb.open("env", readonly=True).said == "there"
    assert os.listdir("env") == ["data.mdb"]
    with all_patches(Rank0Files(before)):
        assert lmdb.open("env", readonly=True).said == "there"
    assert sorted(os.listdir("env")) == ["data.mdb", "lock.mdb"]
