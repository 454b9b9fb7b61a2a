"""Checkpoints of unedited scripts are whole or absent, whoever is ended while they are written."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch

from instep.process import pending_writes
from instep.unedited.files import atomic_writes, os_functions
from instep.unedited.files.compiled_code import libraries
from instep.unedited.files.layers.layer import Layer
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.rank0_files import Rank0Files
from launching import wait_until
from test_overlay import seen_through


class Fails:
    """Cannot be saved."""

    def __reduce__(self) -> object:
        raise ValueError("in the middle")


@pytest.fixture
def rank0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder, with this process in it as rank 0; no draft may be left there."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with seen_through(Rank0Files(Layer(str(tmp_path / "before")))):
        yield folder
    assert not [*folder.rglob(".instep*")]


@pytest.fixture
def rank1(tmp_path: Path) -> OverlayFiles:
    return OverlayFiles(Layer(str(tmp_path / "rank1")), Layer(str(tmp_path / "before")))


def test_a_save_that_fails_leaves_the_old_file(rank0: Path) -> None:
    torch.save(1, "model.pt")
    with pytest.raises(ValueError, match="in the middle"):
        torch.save(Fails(), "model.pt")
    with pytest.raises(ValueError, match="in the middle"):
        torch.save(Fails(), "new.pt")
    with pytest.raises(ValueError, match="in the middle"):
        numpy.save("model.npy", numpy.array([Fails()]))
    assert (torch.load("model.pt"), os.listdir()) == (1, ["model.pt"])


@pytest.mark.parametrize("name", [b"\xff", "\u2028".encode(), b"a\nb"])
def test_drafts_of_any_name_are_removed_after_a_rank_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    marker = tmp_path / "writing"
    monkeypatch.setattr(pending_writes._marker, "value", marker)
    draft = tmp_path / f"{pending_writes.DRAFT_PREFIX}1" / os.fsdecode(name)
    draft.parent.mkdir()
    draft.touch()
    with pending_writes.track_write(str(draft)):
        pending_writes.remove_drafts(marker)
    assert os.listdir(tmp_path) == []


def test_what_is_saved_is_what_plain_python_saves(rank0: Path, tmp_path: Path) -> None:
    os.mkdir(tmp_path / "plain")
    module = torch.nn.Linear(2, 2)
    saves: dict[str, Callable[[str], object]] = {
        "model.pt": lambda path: torch.save(module.state_dict(), path),
        "modèle.pt": lambda path: torch.save(module.state_dict(), path),
        "a.npy": lambda path: numpy.save(path, numpy.arange(3)),
        "b": lambda path: numpy.savez(path, x=numpy.arange(3)),
    }
    for name, save in saves.items():
        save(name)
    with seen_through(None):
        for name, save in saves.items():
            save(str(tmp_path / "plain" / name))
    here, there = (
        {p.name: p.read_bytes() for p in f.iterdir()} for f in (rank0, tmp_path / "plain")
    )
    assert here.keys() == there.keys()
    assert [name for name in here if here[name] != there[name] and name != "b.npz"] == []


def test_mode_links_and_times_are_those_of_writing_in_place(rank0: Path) -> None:
    torch.save(1, "model.pt")
    os.chmod("model.pt", 0o640)
    os.utime("model.pt", (0, 0))
    os.symlink("model.pt", "latest.pt")
    torch.save(2, "latest.pt")
    seen = os.lstat("model.pt")
    assert (torch.load("model.pt"), os.readlink("latest.pt")) == (2, "model.pt")
    assert stat.S_IMODE(seen.st_mode) == 0o640
    assert seen.st_mtime > 0
    os.link("model.pt", "other.pt")
    torch.save(3, "model.pt")
    assert torch.load("other.pt") == 3


def test_what_is_no_file_is_written_where_it_is(rank0: Path) -> None:
    os.mkfifo("pipe")
    os.symlink("pipe", "named")
    for path in ("pipe", "named", "/dev/stdout"):
        with os_functions.files_for(path).location_to_replace(path) as place:
            assert place == path


def test_a_file_that_may_not_be_written_is_not_replaced(rank0: Path) -> None:
    torch.save(1, "model.pt")
    with pytest.raises(RuntimeError, match=r"no/where|directory"):
        torch.save(1, "no/where.pt")
    if os.geteuid() == 0:
        pytest.skip("root may write everything")
    os.chmod("model.pt", 0o400)
    with pytest.raises((RuntimeError, PermissionError)):
        torch.save(2, "model.pt")
    assert torch.load("model.pt") == 1


def test_other_ranks_see_the_old_one_and_no_draft(rank0: Path, rank1: OverlayFiles) -> None:
    with seen_through(None):
        torch.save(1, "model.pt")
    with seen_through(Rank0Files(rank1.layers[1])):
        torch.save(2, "model.pt")
        with seen_through(rank1):
            assert (torch.load("model.pt"), os.listdir()) == (1, ["model.pt"])
    assert torch.load("model.pt") == 2


# ----------------------------------------------------------------------------- real launches

RUN = (sys.executable, "-m", "instep", "run", "-n", "2")
MPIRUN = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable)
KILLED = """
{begin}
import os, select, signal, sys, torch
from instep.unedited import session
from instep.unedited.files.bypass import bypass_overlay

class Ends:
    def __reduce__(self):
        if rank == 0:
            {rank0}
        return int, (2,)

def meet(flags):
    with bypass_overlay():
        os.close(os.open("begun", flags))

rank = session.current().world.rank
if rank == 1:
    {rank1}
torch.save(Ends(), "model.pt")
"""
IS_KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
SAVES_LONG = "meet(os.O_WRONLY); select.select([], [], [], 0.7)"


def killed(folder: Path, command: tuple[str, ...], begin: str, rank0: str, rank1: str) -> str:
    """What is in the folder after that job; its last line of standard error."""
    script = folder / "train.py"
    script.write_text(KILLED.format(begin=begin, rank0=rank0, rank1=rank1))
    torch.save(1, folder / "model.pt")
    os.mkfifo(folder / "begun")
    temporary = folder / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        [*command, script],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if not k.startswith("INSTEP")}
        | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode not in (0, None)
    kept = {"train.py", "model.pt", "begun", "temporary"}
    # Under mpirun the watchers tidy, and they outlive it.
    wait_until(lambda: {path.name for path in folder.iterdir()} == kept, message=done.stderr)
    return done.stderr


@pytest.mark.launch
def test_a_rank_that_is_killed_while_it_saves_leaves_the_old_file(tmp_path: Path) -> None:
    stderr = killed(tmp_path, RUN, "", IS_KILLED, "pass")
    assert torch.load(tmp_path / "model.pt") == 1
    assert "rank 0 of 2 was killed" in stderr


@pytest.mark.launch
def test_a_rank_that_is_killed_when_it_has_saved_leaves_no_folder(tmp_path: Path) -> None:
    killed(tmp_path, RUN, "", f"os.rmdir = lambda folder: {IS_KILLED}", "pass")
    assert torch.load(tmp_path / "model.pt", weights_only=False) == 2


@pytest.mark.launch
def test_another_ranks_failure_lets_a_save_come_to_its_end(tmp_path: Path) -> None:
    killed(tmp_path, RUN, "", SAVES_LONG, f"meet(os.O_RDONLY); {IS_KILLED}")
    assert torch.load(tmp_path / "model.pt", weights_only=False) == 2


@pytest.mark.launch
@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("os._exit(1) if rank else time.sleep(100)", marks=pytest.mark.nightly),
        "os.kill(os.getpid(), 9) if rank == 0 else time.sleep(100)",
        pytest.param("raise KeyError", marks=pytest.mark.nightly),
    ],
)
def test_nothing_is_left_in_the_temporary_folder_under_mpirun(tmp_path: Path, ending: str) -> None:
    (tmp_path / "train.py").write_text(f"""
import instep.auto, os, time, torch
from instep.unedited import session
rank = session.current().world.rank
open("model.pt", "w").write("x")
{ending}
""")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        [*MPIRUN, tmp_path / "train.py"],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(temporary)},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    wait_until(lambda: not [*temporary.glob("instep-*")])


@pytest.mark.nightly
@pytest.mark.launch
def test_under_mpirun_the_file_is_the_new_one_or_the_old_one(tmp_path: Path) -> None:
    killed(tmp_path, MPIRUN, "import instep.auto", SAVES_LONG, f"meet(os.O_RDONLY); {IS_KILLED}")
    assert torch.load(tmp_path / "model.pt", weights_only=False) in (1, 2)  # mpirun gives it 1 s


def test_errors_name_the_scripts_path(rank0: Path) -> None:
    def full(_: object, place: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", place)

    with pytest.raises(OSError, match="No space left") as raised:
        libraries.torch_save(full, 1, "model.pt")
    assert raised.value.filename == "model.pt"
    with pytest.raises(FileNotFoundError) as missing:
        torch.save(1, "no/where/model.pt", _use_new_zipfile_serialization=False)
    assert "instep" not in str(missing.value)
    assert os.listdir() == []


def test_where_no_folder_can_be_made_a_file_is_written_in_place(
    rank0: Path, rank1: OverlayFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save("old", "model.pt")
    written = os.stat("model.pt").st_ino
    made = os.mkdir

    def refuses(path: str, *args: int) -> None:
        if "instep" in path:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        made(path, *args)

    with monkeypatch.context() as patched:  # undone before the fixture's patches are removed
        patched.setattr(os, "mkdir", refuses)
        torch.save("new", "model.pt")
    assert (os.stat("model.pt").st_ino, torch.load("model.pt")) == (written, "new")


def test_a_file_keeps_its_owner(rank0: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("who is not root cannot give a file away")
    torch.save("old", "model.pt")
    os.chown("model.pt", 65534, 65533)
    os.chmod("model.pt", 0o640)
    torch.save("new", "model.pt")
    seen = os.stat("model.pt")
    assert (seen.st_uid, seen.st_gid, seen.st_mode & 0o777) == (65534, 65533, 0o640)


def test_who_is_not_root_may_replace_his_own_files_only() -> None:
    """Of others the draft could not be given to whom the file belongs to."""
    mine = types.SimpleNamespace(st_uid=os.geteuid(), st_gid=os.getegid())
    assert atomic_writes._is_own(mine)
    for group in os.getgroups():
        assert atomic_writes._is_own(types.SimpleNamespace(st_uid=os.geteuid(), st_gid=group))
    assert not atomic_writes._is_own(types.SimpleNamespace(st_uid=1 << 20, st_gid=mine.st_gid))
    assert not atomic_writes._is_own(types.SimpleNamespace(st_uid=mine.st_uid, st_gid=1 << 20))


def test_root_may_replace_the_files_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.pt"
    file.touch()
    files = Rank0Files(Layer(str(tmp_path / "before")))
    monkeypatch.setattr(atomic_writes, "_is_own", lambda status: False)
    for user, may in ((0, True), (1, False), (1000, False)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert atomic_writes._can_be_replaced(file, str(file), files) is may
