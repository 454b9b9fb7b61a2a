"""The files as ranks see them: rank 0 has finished before another rank begins, and both see one
process's files."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest
import torch

from instep.distributed.identity import launchers
from instep.distributed.identity.world import World
from instep.errors import UneditedError
from instep.process.patching import PatchHandle
from instep.unedited.files import layer_directories, os_functions, overlay, rank0_files
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.compiled_code import write_access
from instep.unedited.files.layers.generations import delete_files
from instep.unedited.files.layers.layer import MISSING, Layer
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.patches import FILE_PATCHES
from instep.unedited.files.rank0_files import Rank0Files

NAMES = ("a", "b", "c", "a/a", "a/b", "b/a", "b/c/d", "a/b/c", "c/a")


@contextmanager
def seen_through(files: Rank0Files | OverlayFiles | None) -> Iterator[None]:
    """Run as this rank."""
    patched = PatchHandle(FILE_PATCHES)
    os_functions.set_files(files)
    try:
        yield
    finally:
        os_functions.set_files(None)
        patched.remove()


def write(path: str, mode: str, text: str) -> int:
    with open(path, mode) as file:
        return file.write(text)


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def scanned(path: str | int) -> list[tuple[str, bool, bool]]:
    with os.scandir(path) as entries:
        return sorted((entry.name, entry.is_dir(), entry.is_symlink()) for entry in entries)


def tree(folder: str = ".") -> list[tuple[str, list[str], list[str]]]:
    return sorted((at, sorted(folders), sorted(names)) for at, folders, names in os.walk(folder))


def operations(numbers: random.Random) -> Iterator[Callable[[], object]]:
    """One of everything that changes or looks at files, on names that often meet."""
    one, two = numbers.choice(NAMES), numbers.choice(NAMES)
    text = str(numbers.random())
    yield from (lambda mode=mode: write(one, mode, text) for mode in ("w", "a", "x", "r+", "w"))
    yield lambda: os.mkdir(one)
    yield lambda: os.makedirs(one, exist_ok=True)
    yield lambda: os.rmdir(one)
    yield lambda: os.unlink(one)
    yield lambda: os.rename(one, two)
    yield lambda: os.replace(one, two)
    yield lambda: os.symlink(os.path.relpath(two, os.path.dirname(one) or "."), one)
    yield lambda: os.link(one, two)
    yield lambda: os.truncate(one, 3)
    yield lambda: os.chmod(one, 0o755)
    yield lambda: shutil.rmtree(one, ignore_errors=True)
    yield lambda: shutil.copytree(one, "d", True, dirs_exist_ok=True)
    yield lambda: shutil.copy2(one, two) and None
    yield lambda: shutil.move(one, two) and None
    yield lambda: Path(one).touch()
    yield from (lambda path=path: read(path) for path in (one, two))
    yield from (lambda look=look: look(one) for look in (os.path.exists, os.path.isdir))
    yield from (lambda look=look: look(one) for look in (os.path.islink, os.path.getsize))
    yield lambda: sorted(os.listdir(one))
    yield lambda: scanned(one)
    yield lambda: os.readlink(one)
    yield from within(one, two, text)
    yield lambda: os.path.realpath(one).removeprefix(os.getcwd())
    yield tree


def within(one: str, two: str, text: str) -> Iterator[Callable[[], object]]:
    """What takes a folder's descriptor."""
    yield lambda: beside(one, lambda fd: os.mkdir("a", dir_fd=fd))
    yield lambda: beside(one, lambda fd: os.rename("a", "b", src_dir_fd=fd, dst_dir_fd=fd))
    yield lambda: beside(one, lambda fd: os.replace(src=two, dst="c", dst_dir_fd=fd))
    yield lambda: beside(one, lambda fd: os.unlink("b", dir_fd=fd))
    yield lambda: beside(one, lambda fd: os.rmdir("b", dir_fd=fd))
    yield lambda: beside(one, lambda fd: os.link(two, "c", dst_dir_fd=fd))
    yield lambda: beside(one, lambda fd: os.symlink("b", "c", dir_fd=fd))
    yield lambda: beside(one, lambda fd: write_beside(fd, text))
    yield lambda: beside(one, lambda fd: os.stat("b", dir_fd=fd).st_size)
    yield lambda: beside(one, lambda fd: os.access("b", os.R_OK, dir_fd=fd))
    yield lambda: beside(one, lambda fd: shutil.rmtree("b", dir_fd=fd))
    yield lambda: beside(one, lambda fd: (os.rename(one, two), write_beside(fd, text)))
    yield lambda: beside(one, lambda fd: (shutil.rmtree(one), write_beside(fd, text)))
    yield lambda: beside(one, lambda fd: (sorted(os.listdir(fd)), scanned(fd)))
    yield lambda: sorted((at, sorted(d), sorted(f)) for at, d, f, _ in os.fwalk(one))


def beside(folder: str, use: Callable[[int], object]) -> object:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return use(fd)
    finally:
        os.close(fd)


def write_beside(fd: int, text: str) -> None:
    with open(os.open("b", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=fd), "w") as file:
        file.write(text)


def outcome(operation: Callable[[], object]) -> object:
    try:
        return operation()
    except OSError as error:
        if error.errno is None:  # one of shutil's, whose file name depends on the version
            return type(error).__name__
        return type(error).__name__, error.errno, str(error.filename).removeprefix(os.getcwd())
    except shutil.Error as error:
        return type(error).__name__


def story(seed: int, folder: Path) -> list[object]:
    """What a script sees that does 150 things in `folder`."""
    numbers = random.Random(seed)
    before = os.getcwd()
    os.chdir(folder)
    try:
        seen = [outcome(numbers.choice([*operations(numbers)])) for _ in range(150)]
        return [*seen, tree(), [read(path) for path in NAMES if os.path.isfile(path)]]
    finally:
        os.chdir(before)


def stocked(folder: Path) -> Path:
    """A folder in which there is something already."""
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "a").write_text("first")
    (folder / "c").write_text("second")
    return folder


SEEDS = [*range(10), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(10, 150))]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rank_sees_what_one_process_would(tmp_path: Path, seed: int) -> None:
    alone, shared = stocked(tmp_path / "alone"), stocked(tmp_path / "shared")
    oracle = story(seed, alone)
    before = Layer(str(tmp_path / "before"))
    with seen_through(Rank0Files(before)):
        assert story(seed, shared) == oracle
    left = {path: path.read_bytes() for path in sorted(shared.rglob("*")) if path.is_file()}
    for rank in (1, 2):
        with seen_through(OverlayFiles(Layer(str(tmp_path / f"rank{rank}")), before)):
            assert story(seed, shared) == oracle
    assert {p: p.read_bytes() for p in sorted(shared.rglob("*")) if p.is_file()} == left


@pytest.mark.parametrize("seed", range(5))
def test_every_rank_sees_what_has_changed_in_an_installation(tmp_path: Path, seed: int) -> None:
    alone, shared = stocked(tmp_path / "alone"), stocked(tmp_path / "shared")
    oracle = story(seed, alone)
    installations = tuple(f"{shared.resolve()}/{name}/" for name in ("a/b", "c", "d"))
    before = Layer(str(tmp_path / "before"), installations=installations)
    with seen_through(Rank0Files(before)):
        assert story(seed, shared) == oracle
    for rank in (1, 2):
        own = Layer(str(tmp_path / f"rank{rank}"), installations=installations)
        with seen_through(OverlayFiles(own, before)):
            assert story(seed, shared) == oracle


def test_an_installation_is_read_without_layers_until_it_is_changed(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    module, installations = tmp_path / "site" / "module.py", (f"{tmp_path.resolve()}/site/",)
    module.write_text("first")
    before, own = (Layer(str(tmp_path / n), installations=installations) for n in ("0", "1"))
    overlay_files = OverlayFiles(own, before)

    def is_read_directly() -> bool:
        is_direct, text = overlay_files.use_installed(module, lambda at: Path(at).read_text(), repr)
        return is_direct and text == "first"

    with seen_through(overlay_files):
        assert read(str(module)) == "first"  # the directory's links are known after this
        assert is_read_directly()
        write(str(tmp_path / "other"), "w", "beside it")
        assert is_read_directly()
        write(str(module), "w", "second")
        assert not is_read_directly()
        assert read(str(module)) == "second"
    assert module.read_text() == "first"
    with seen_through(Rank0Files(before)):
        write(str(module), "w", "third")
    with seen_through(OverlayFiles(Layer(str(tmp_path / "2"), None, installations), before)):
        assert read(str(module)) == "first"


@pytest.fixture
def rank1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder, with this process in it as rank 1; nothing of it may be left there."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with seen_through(
        OverlayFiles(Layer(str(tmp_path / "rank1")), Layer(str(tmp_path / "before")))
    ):
        yield folder
    assert [*folder.iterdir()] == []


def test_libraries_that_open_by_themselves_are_sent_along(rank1: Path) -> None:
    torch.save(torch.arange(3), "model.pt")
    assert torch.load("model.pt").tolist() == torch.load("model.pt", mmap=True).tolist()
    with tarfile.open("files.tar.gz", "w:gz") as archive:
        archive.add("model.pt")
    with tarfile.open("files.tar.gz") as archive:
        archive.extractall("there", filter="data")
    assert Path("there/model.pt").read_bytes() == Path("model.pt").read_bytes()
    for _ in range(2):
        with sqlite3.connect("table.db") as table:
            table.execute("create table if not exists numbers (n)")
            table.execute("insert into numbers values (1)")
        table.close()
    with sqlite3.connect("table.db") as table:
        assert table.execute("select count(*) from numbers").fetchone() == (2,)
    table.close()
    assert os.path.getsize("table.db") > 0


class Returns(torch.nn.Module):
    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def forward(self) -> int:
        return self.epoch


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    ("save", "load"),
    [
        (lambda epoch, path: torch.save(epoch, path), lambda path: torch.load(path)),
        (
            lambda epoch, path: torch.jit.save(torch.jit.script(Returns(epoch)), path),
            lambda path: torch.jit.load(path)(),
        ),
    ],
    ids=["torch.save", "torch.jit.save"],
)
def test_old_checkpoints_are_read_from_rank_0(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[[int, str], object],
    load: Callable[[str], int],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(overlay, "CHECKPOINT_BYTES", 1)
    before, own = Layer(str(tmp_path / "layer0")), Layer(str(tmp_path / "layer1"))
    for files in (Rank0Files(before), OverlayFiles(own, before)):
        with seen_through(files):
            for epoch in range(3):
                save(epoch, f"{epoch}.pt")
            assert [load(f"{epoch}.pt") for epoch in range(3)] == [0, 1, 2]
            assert {"0.pt", "1.pt", "2.pt"} < {*os.listdir()}
            os.unlink("0.pt")
            assert not os.path.exists("0.pt")
    kept = [path.name for path in (tmp_path / "layer1" / "files").rglob("*.pt")]
    assert kept == ["2.pt"]


def test_what_was_too_large_to_keep_is_an_error_and_never_other_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank0_files, "KEPT_BYTES", 2)
    before, own = Layer(str(tmp_path / "layer0")), Layer(str(tmp_path / "layer1"))
    write("large", "w", "old")
    write("other", "w", "old!")
    with seen_through(Rank0Files(before)):
        for name in ("large", "other"):
            write(name, "w", "something new")
    with seen_through(OverlayFiles(own, before)):
        assert [os.path.getsize(name) for name in ("large", "other")] == [3, 4]
        with pytest.raises(UneditedError, match="after rank 0 has written over it"):
            read("large")
        with pytest.raises(UneditedError, match="after rank 0 has written over it"):
            write("large", "a", "more")
        write("large", "w", "mine")
        assert read("large") == "mine"
        os.unlink("other")
        assert not os.path.exists("other")


def test_a_folder_on_the_way_keeps_its_mode(tmp_path: Path) -> None:
    before, own = Layer(str(tmp_path / "layer0")), Layer(str(tmp_path / "layer1"))
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    with seen_through(OverlayFiles(own, before)):
        write(f"{folder}/file", "w", "x")
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert os.listdir(folder) == ["file"]


def test_temporary_files_are_real_and_can_be_moved_into_place(rank1: Path) -> None:
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write("whole")
    os.replace(file.name, "result")
    assert (read("result"), os.path.exists(file.name)) == ("whole", False)
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/x", "w", "1")
        assert os.listdir(folder) == ["x"]
    assert not os.path.exists(folder)


def test_those_that_are_gone_are_forgotten_but_for_the_latest(tmp_path: Path) -> None:
    files = OverlayFiles(Layer(str(tmp_path / "rank1")), None)
    with seen_through(files):
        stays = tempfile.mkdtemp()
        for _ in range(5_000):
            fd, removed = tempfile.mkstemp()
            os.close(fd)
            os.unlink(removed)
            assert len(files._temporary) < 3_000
        write(f"{stays}/x", "w", "real")
        write(removed, "w", "real")  # a script may make it anew
    for path in (f"{stays}/x", removed):
        assert Path(path).read_text() == "real"
    shutil.rmtree(stays)
    os.unlink(removed)


def test_one_may_go_into_a_folder_that_only_this_rank_has(rank1: Path) -> None:
    os.makedirs("deep/er")
    os.chdir("deep/er")
    assert os.getcwd() == str(rank1 / "deep" / "er")
    write("here", "w", "x")
    os.chdir("../..")
    assert (os.getcwd(), read("deep/er/here")) == (str(rank1), "x")


def test_one_stays_in_a_folder_that_rank_0_removes_or_renames_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("removed", "renamed"):
        os.mkdir(name)
        (tmp_path / name / "file").write_text("x")
    before = Layer(str(tmp_path / "before"))
    role0, role1 = Rank0Files(before), OverlayFiles(Layer(str(tmp_path / "rank1")), before)
    for name, new in (("removed", None), ("renamed", "new")):
        with seen_through(role1):
            os.chdir(name)
        with seen_through(role0):
            change_folder(tmp_path / name, new)
        with seen_through(role1):
            assert (os.getcwd(), os.listdir()) == (f"{tmp_path}/{name}", ["file"])
            assert (read("file"), os.path.abspath("x")) == ("x", f"{tmp_path}/{name}/x")
            change_folder(tmp_path / name, new)
            if new is None:
                with pytest.raises(FileNotFoundError):
                    os.getcwd()
                with pytest.raises(FileNotFoundError, match="'here'"):
                    write("here", "w", "")
            else:
                assert (os.getcwd(), read("file")) == (f"{tmp_path}/{new}", "x")
            os.chdir(tmp_path)


def change_folder(folder: Path, new: str | None) -> None:
    if new is None:
        shutil.rmtree(folder)
    else:
        os.rename(folder, folder.parent / new)


def test_a_file_keeps_its_name_and_errors_name_the_scripts_path(rank1: Path) -> None:
    with open("named", "w") as file:
        assert file.name == "named"
    with pytest.raises(FileNotFoundError, match="'no/where'"):
        write("no/where", "w", "")
    with pytest.raises(FileNotFoundError, match="'nowhere'"):
        read("nowhere")


def test_what_is_no_file_is_left_alone(rank1: Path) -> None:
    assert write("/dev/null", "w", "x") == 1
    ours, theirs = os.pipe()
    with open(ours) as reading, open(theirs, "w") as writing:
        writing.write("through")
        writing.close()
        assert reading.read() == "through"


def test_links_of_proc_whose_text_is_no_path_are_followed_by_the_kernel(rank1: Path) -> None:
    reader, writer = os.pipe()
    for path in ("/proc/self/ns/pid", f"/proc/self/fd/{reader}", "/proc/self/exe"):
        with bypass_overlay():
            real = os.stat(path)
        assert os.path.samestat(os.stat(path), real)
    os.write(writer, b"text")
    with open(f"/proc/self/fd/{reader}", "rb", buffering=0) as file:
        assert file.read(4) == b"text"
    os.close(reader)
    os.close(writer)


def test_a_file_that_rank_0_moves_while_another_rank_comes_to_it_is_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        for number in range(60):
            write("file", "w", f"{number}")
            before, own = Layer(f"{tmp_path}/before{number}"), Layer(f"{tmp_path}/own{number}")
            both = Barrier(2)

            def rank0(before: Layer = before, both: Barrier = both) -> None:
                files = Rank0Files(before)
                both.wait()
                files.keep("file", follow=False)
                os.rename("file", "moved")

            def rank1(files: OverlayFiles, both: Barrier = both) -> str:
                both.wait()
                return read(files.location_to_write("file", os.O_RDWR))

            moves, seen = pool.submit(rank0), pool.submit(rank1, OverlayFiles(own, before))
            moves.result()
            assert seen.result() == f"{number}"


def test_what_rank_0_removes_or_replaces_is_kept_whatever_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not be copied: nobody writes into it any more."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank0_files, "KEPT_BYTES", 2)
    before, own = Layer(str(tmp_path / "layer0")), Layer(str(tmp_path / "layer1"))
    for name in ("unlinked", "removed", "written over"):
        write(name, "w", f"old {name}")
    torch.save("old", "saved")
    with seen_through(Rank0Files(before)):
        os.unlink("unlinked")
        os.remove("removed")
        torch.save("new", "saved")
        write("written over", "w", "")
    with seen_through(OverlayFiles(own, before)):
        assert (read("unlinked"), read("removed")) == ("old unlinked", "old removed")
        assert torch.load("saved") == "old"
        with pytest.raises(UneditedError, match="after rank 0 has written over it"):
            read("written over")


plain_stat = os.stat


def may(path: str, mode: int, **_: object) -> bool:
    """os.access, for the owner of a file who is not root."""
    try:
        rights = plain_stat(path).st_mode >> 6
    except OSError:
        return False
    return all(rights & bit or not mode & bit for bit in (os.R_OK, os.W_OK, os.X_OK))


DENIED: dict[str, Callable[[], object]] = {
    "write": lambda: write("locked/x", "w", ""),
    "create": lambda: write("locked/x", "x", ""),
    "os.open": lambda: os.open("locked/x", os.O_CREAT | os.O_WRONLY),
    "unlink": lambda: os.unlink("locked/file"),
    "mkdir": lambda: os.mkdir("locked/x"),
    "mkfifo": lambda: os.mkfifo("locked/x"),
    "rmdir": lambda: os.rmdir("locked/folder"),
    "rename from": lambda: os.rename("locked/file", "x"),
    "rename to": lambda: os.rename("c", "locked/x"),
    "replace": lambda: os.replace("c", "locked/file"),
    "symlink": lambda: os.symlink("file", "locked/x"),
    "link": lambda: os.link("c", "locked/x"),
    "rmtree": lambda: shutil.rmtree("locked/folder"),
    "write into it": lambda: write("kept", "w", ""),
    "append to it": lambda: write("kept", "a", ""),
    "update it": lambda: write("kept", "r+", ""),
    "truncate it": lambda: os.truncate("kept", 0),
}


@pytest.mark.parametrize("what", DENIED)
def test_who_may_not_write_somewhere_may_not_on_any_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.chdir(stocked(tmp_path / "folder"))
    os.makedirs("locked/folder")
    write("locked/file", "w", "there")
    write("kept", "w", "as it is")
    os.chmod("kept", 0o444)
    os.chmod("locked", 0o555)
    monkeypatch.setattr(os, "access", may)
    seen = tree()
    own = Layer(str(tmp_path / "rank1"))
    with seen_through(OverlayFiles(own, Layer(str(tmp_path / "before")))):
        with pytest.raises(PermissionError) as denied:
            DENIED[what]()
        assert denied.value.errno == errno.EACCES
        assert not str(denied.value.filename).startswith(own.directory)
        assert tree() == seen
        assert (read("locked/file"), read("kept")) == ("there", "as it is")
        assert os.access("c", os.W_OK)
        write("locked/file", "w", "one may write into a file that is there")
        assert read("locked/file").endswith("is there")
    os.chmod("locked", 0o755)


def test_a_read_only_file_system_is_so_on_any_rank_and_nothing_else_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stocked(tmp_path / "folder"))
    monkeypatch.setattr(os, "access", lambda path, mode, **_: not mode & os.W_OK)
    read_only = os.statvfs_result((*os.statvfs("/dev/null")[:8], os.ST_RDONLY, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: read_only)
    monkeypatch.setattr(write_access._access, "is_restricted", True)
    with seen_through(OverlayFiles(Layer(str(tmp_path / "rank1")), None)):
        for name in ("new", "c"):
            with pytest.raises(OSError, match=f"Read-only file system: '{name}'") as denied:
                write(name, "w", "")
            write_access.add_notes(denied.value, rank=1)
            assert not hasattr(denied.value, "__notes__")


def test_links_in_a_circle_have_not_been_changed_by_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink("one", "two")
    os.symlink("two", "one")
    os.mkdir("folder")
    before = Layer(str(tmp_path / "before"))
    role = Rank0Files(before)
    assert not role.has_changed("one")
    assert not role.has_changed("folder")
    for mine in (role, OverlayFiles(Layer(str(tmp_path / "rank1")), before)):
        with seen_through(mine):
            write("folder/new", "w", "x")
            for look in (os.listdir, os.scandir, os.stat, os.chdir, os.mkdir, read):
                with pytest.raises(OSError, match=r"levels of symbolic links|File exists"):
                    look("one")
    assert role.has_changed("folder")


def test_the_mode_of_what_a_link_leads_to_is_changed_where_it_is_this_ranks_own(
    rank1: Path,
) -> None:
    write("file", "w", "x")
    os.symlink("file", "link")
    os.chmod("link", 0o604)
    os.utime("link", (1e9, 1e9))
    os.utime("link", (2e9, 2e9), follow_symlinks=False)
    assert stat.S_IMODE(os.stat("file").st_mode) == 0o604
    assert (os.stat("file").st_mtime, os.lstat("link").st_mtime) == (1e9, 2e9)


def test_a_file_that_vanishes_while_a_layer_is_emptied_is_none_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may empty it at the same time."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "there").write_text("x")
    monkeypatch.setattr(os, "walk", lambda folder: [(f"{folder}/deep", [], ["vanished", "there"])])
    delete_files(str(tmp_path))
    assert os.listdir(tmp_path / "deep") == []


def test_the_last_rank_removes_the_layers_and_none_minds_if_they_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watcher may have removed them already."""
    monkeypatch.delenv(launchers.FAILURE_FILE, raising=False)
    shared = tmp_path / "layers"
    for rank in range(2):
        (shared / f"rank{rank}").mkdir(parents=True)
    directory = layer_directories.SharedDirectory(layer_directories._host(), str(shared))
    first, second = (
        layer_directories.LayerDirectories(directory, World(rank, 2, rank, 2)) for rank in range(2)
    )
    assert second.writable() == [str(shared / "rank1"), str(shared)]
    shutil.rmtree(shared / "rank1")
    assert second.marker().parent == shared / "rank1"
    assert stat.S_IMODE((shared / "rank1").stat().st_mode) == 0o700
    first.delete()
    assert os.listdir(shared) == ["rank1"]
    second.delete()
    assert not shared.exists()
    first.delete()
    second.delete()


def test_what_rank_0_removes_while_another_rank_opens_it_is_opened_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write("file", "w", "old")
    before = Layer(str(tmp_path / "before"))
    role, rank0 = OverlayFiles(Layer(str(tmp_path / "rank1")), before), Rank0Files(before)
    decide, looks = role._write_location, []

    def after_rank_0(plain: str, found: str, path: str, flags: int) -> str:
        looks.append(found)
        if len(looks) == 1:
            rank0.keep("file", follow=False)
            os.unlink("file")
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return decide(plain, found, path, flags)

    monkeypatch.setattr(role, "_write_location", after_rank_0)
    assert read(role.location_to_write("file", os.O_RDWR)) == "old"
    assert len(set(looks)) == 2


def test_rank_0_forgets_paths_that_it_has_kept_long_ago_and_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may write files for ever and never run a command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank0_files, "KNOWN_PATHS", 3)
    before = Layer(str(tmp_path / "before"))
    for name in ("first", "second"):
        write(name, "w", "old")
    rank0 = Rank0Files(before)
    with seen_through(rank0):
        write("first", "w", "new")
        os.unlink("second")
        for number in range(10):
            write(f"file{number}", "w", "new")
        assert len(rank0._kept) == 3
        os.unlink("first")
        for name in ("second", "first"):
            write(name, "w", "newer")
    with seen_through(OverlayFiles(Layer(str(tmp_path / "rank1")), before)):
        assert [read(name) for name in ("first", "second")] == ["old", "old"]
        assert not os.path.exists("file0")


def test_a_file_that_is_too_large_to_keep_leaves_room_for_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank0_files, "KEPT_BYTES", 20)
    before = Layer(str(tmp_path / "before"))
    write("large", "w", "x" * 50)
    write("small", "w", "old")
    with seen_through(Rank0Files(before)):
        write("large", "w", "new")
        write("small", "w", "new")
    with seen_through(OverlayFiles(Layer(str(tmp_path / "rank1")), before)):
        assert read("small") == "old"
        with pytest.raises(UneditedError, match="after rank 0 has written over it"):
            read("large")


@pytest.mark.parametrize(
    "listing", [lambda at: os.listdir(at), lambda at: [e.name for e in os.scandir(at)]]
)
def test_a_directory_that_rank_0_removes_while_another_rank_lists_it_is_listed_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: Callable[[str], list[str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("data")
    write("data/1", "w", "old")
    before = Layer(str(tmp_path / "before"))
    files, rank0 = OverlayFiles(Layer(str(tmp_path / "rank1")), before), Rank0Files(before)
    look = files.listdir

    def before_rank_0(path: str) -> list[str] | None:
        found = look(path)
        with bypass_overlay():
            if os.path.lexists("data"):
                rank0.keep("data/1", follow=False, never_written_again=True)
                os.unlink("data/1")
                rank0.keep("data", follow=False)
                os.rmdir("data")
        return found

    monkeypatch.setattr(files, "listdir", before_rank_0)
    with seen_through(files):
        assert listing("data") == ["1"]
    with bypass_overlay():
        assert not os.path.lexists("data")


def test_a_tree_that_rank_0_removes_at_any_moment_is_removed_by_another_rank_and_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, moment = 1, 0
    while looks > moment:  # until rank 1 is done before rank 0 begins
        moment += 1
        folder = tmp_path / str(moment)
        monkeypatch.chdir(_make_tree(folder))
        before = Layer(f"{folder}/before")
        files, rank0 = OverlayFiles(Layer(f"{folder}/rank1"), before), Rank0Files(before)
        seen = _LetAct(files.find, moment, partial(_make_anew_as_rank_0, rank0))
        monkeypatch.setattr(files, "find", seen)
        with seen_through(files):
            shutil.rmtree("data", ignore_errors=True)
            os.makedirs("data")
            assert os.listdir("data") == []
        looks = seen.looks


class _LetAct:
    """Finds paths, and lets rank 0 act after one of the looks."""

    def __init__(self, find: Callable[[str], str], moment: int, act: Callable[[], None]) -> None:
        self.find, self.moment, self.act, self.looks = find, moment, act, 0

    def __call__(self, resolved: str) -> str:
        found, self.looks = self.find(resolved), self.looks + 1
        if self.looks == self.moment:
            with bypass_overlay():
                self.act()
        return found


def _make_tree(folder: Path) -> Path:
    os.makedirs(folder / "data" / "below")
    write(str(folder / "data" / "one"), "w", "old")
    return folder


def _make_anew_as_rank_0(rank0: Rank0Files) -> None:
    for path, remove in (("data/below", os.rmdir), ("data/one", os.unlink), ("data", os.rmdir)):
        rank0.keep(path, follow=False, never_written_again=remove is os.unlink)
        remove(path)
    os.mkdir("data")
    rank0.keep("data/new")
    write("data/new", "w", "new")


def test_a_file_below_a_link_that_has_gone_is_not_the_one_that_rank_0_has_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is kept, too: through it the kept file would be taken for the new path."""
    monkeypatch.chdir(stocked(tmp_path / "folder"))
    os.symlink("a", "b")
    before = Layer(str(tmp_path / "before"))
    with seen_through(Rank0Files(before)):
        shutil.rmtree("a")
        os.unlink("b")
        os.mkdir("b")
        write("b/a", "w", "new")
    with seen_through(OverlayFiles(Layer(str(tmp_path / "rank1")), before)):
        assert (read("a/a"), read("b/a"), sorted(os.listdir("b"))) == ("first", "first", ["a", "b"])


def test_what_is_below_a_directory_that_was_removed_or_made_anew_is_not_there(
    tmp_path: Path,
) -> None:
    layer = Layer(str(tmp_path / "layer"))
    layer.remove("/a")
    assert layer.find("/a/b") == MISSING
    os.mkdir(layer.add_directory("/a"))
    assert (layer.find("/a/b"), layer.find("/b")) == (MISSING, None)


def test_a_file_that_was_removed_is_missing_until_a_library_has_made_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sqlite3.connect asks more than once where the database is to be, before it makes one."""
    monkeypatch.chdir(tmp_path)
    write("removed", "w", "of the last run")
    files = OverlayFiles(Layer(str(tmp_path / "layer1")), Layer(str(tmp_path / "before")))
    with seen_through(files):
        os.unlink("removed")
        location = files.location_to_write("removed", os.O_CREAT)
        assert not os.path.exists("removed")
        assert "removed" not in os.listdir()
        assert files.location_to_write("removed", os.O_CREAT) == location
        assert not os.path.exists(location)
        write("removed", "w", "new")
        assert "removed" in os.listdir()
    assert read("removed") == "of the last run"


def test_another_name_of_a_temporary_file_is_the_same_file(rank1: Path) -> None:
    with tempfile.NamedTemporaryFile("w") as file:
        os.link(file.name, "other")
        write(file.name, "a", "added")
        assert read("other") == "added"


def test_a_file_that_has_gone_is_missing_by_the_scripts_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program removes it while this rank is about to copy it."""
    monkeypatch.chdir(tmp_path)
    write("file", "w", "old")
    files = OverlayFiles(Layer(str(tmp_path / "rank1")), Layer(str(tmp_path / "before")))
    copy = overlay.copy

    def gone(source: str, target: str) -> None:
        os.unlink(source)
        copy(source, target)

    monkeypatch.setattr(overlay, "copy", gone)
    with pytest.raises(FileNotFoundError) as caught:
        files.location_to_write("file", os.O_RDWR)
    assert caught.value.filename == "file"


def test_names_that_a_rank_has_made_are_listed_in_order(rank1: Path) -> None:
    names = [*map(str, range(10, 30))]
    for name in reversed(names):
        write(name, "w", "")
    assert os.listdir() == names


def test_a_link_between_file_systems_is_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.chdir(tmp_path)
    write("file", "w", "text")
    files = OverlayFiles(Layer(str(tmp_path / "rank1")), Layer(str(tmp_path / "before")))
    monkeypatch.setattr(os, "link", refuses)
    files.link("file", "other")
    assert (read(files.location("other")), read("file")) == ("text", "text")


def test_a_link_that_rank_0_renames_something_to_stays_a_link_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stocked(tmp_path / "folder"))
    os.symlink("c", "link")
    before = Layer(str(tmp_path / "before"))
    with seen_through(Rank0Files(before)):
        os.rename("a/a", "link")
        assert not os.path.islink("link")
    with seen_through(OverlayFiles(Layer(str(tmp_path / "rank1")), before)):
        assert (os.readlink("link"), read("link"), read("a/a")) == ("c", "second", "first")
