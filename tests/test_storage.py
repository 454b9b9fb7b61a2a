"""Where the layers lie: where there is room for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from instep.errors import LaunchVariablesError
from instep.process import storage
from instep.unedited.files.paths import PathResolver

IN_A_SMALL_FOLDER = 'mount -t tmpfs -o size=1m tmpfs "$TMPDIR" && exec "$@"'
SAVES = """
import os, torch
value = torch.arange(1 << 20)
torch.save(value, "model.pt")
assert torch.equal(torch.load("model.pt"), value)
model = torch.nn.Linear(1, 1)
model(torch.ones(8, 1)).sum().backward()
assert torch.equal(torch.load("model.pt"), value)
print("right")
"""
KEEPS = """
import os
from instep.unedited.files.rank0_files import Rank0Files
from instep.unedited.files.layers.layer import Layer
from instep.unedited.files.overlay import OverlayFiles
from instep.errors import UneditedError

before = Layer(os.path.join(os.environ["TMPDIR"], "before"))
for name in "large", "small":
    Rank0Files(before).keep(name)
seen = OverlayFiles(Layer("rank1"), before)
assert open(seen.location_to_read("small")).read() == "content"
assert os.path.getsize(seen.location("large")) == 2 << 20
try:
    seen.location_to_read("large")
except UneditedError:
    print("refused")
"""


def alone(*command: str) -> tuple[str, ...]:
    """With mounts of its own."""
    return ("unshare", "--user", "--map-root-user", "--mount", *command)


def can_mount() -> bool:
    """Whether a process may have mounts of its own here."""
    made = alone("sh", "-c", "mount -t tmpfs tmpfs /mnt")
    return bool(shutil.which("unshare")) and not subprocess.run(made, check=False).returncode


def test_a_cache_with_an_empty_name_is_the_usual_one_and_not_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.chdir(tmp_path)
    assert storage.cache_folder() == os.path.expanduser("~/.cache")
    assert not PathResolver(()).is_private(str(tmp_path / "model.pt"))


@pytest.mark.nightly
@pytest.mark.launch
def test_checkpoints_that_are_larger_than_the_temporary_folder(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("no process may mount anything here")
    small, home = tmp_path / "small", tmp_path / "home"
    small.mkdir()
    home.mkdir()
    (tmp_path / "script.py").write_text(SAVES)
    run = (sys.executable, "-m", "instep", "run", "-n", "2", "script.py")
    done = subprocess.run(
        alone("sh", "-c", IN_A_SMALL_FOLDER, "sh", *run),
        env=os.environ | {"TMPDIR": str(small), "XDG_CACHE_HOME": str(home)},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    assert not [*home.iterdir()]


def test_what_rank_0_has_no_room_to_keep_is_an_error_for_who_reads_it_late(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("no process may mount anything here")
    (tmp_path / "large").write_bytes(bytes(2 << 20))
    (tmp_path / "small").write_text("content")
    (tmp_path / "full").mkdir()
    done = subprocess.run(
        alone("sh", "-c", IN_A_SMALL_FOLDER, "sh", sys.executable, "-c", KEEPS),
        env=os.environ | {"TMPDIR": str(tmp_path / "full")},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_the_first_folder_with_room_is_taken() -> None:
    assert storage.choose_folder(0) == tempfile.gettempdir()
    assert os.access(storage.choose_folder(1 << 40), os.W_OK)


def test_a_job_that_can_write_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(LaunchVariablesError, match=r"can be written\. Let TMPDIR name one"):
        storage.choose_folder(2)
