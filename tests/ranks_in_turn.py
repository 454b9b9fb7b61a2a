"""Calls that several ranks make one after the other in one process, with all patches installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from instep.unedited import patch_table
from instep.unedited.files import os_functions
from instep.unedited.files.layers.layer import Layer
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.rank0_files import Rank0Files
from test_overlay import outcome


def story(folder: Path, calls: Callable[[], Iterator[Callable[[], object]]]) -> list[object]:
    """What comes of all these calls in a folder."""
    folder.mkdir(exist_ok=True)
    before = os.getcwd()
    os.chdir(folder)
    try:
        return [outcome(do) for do in calls()]
    finally:
        os.chdir(before)


@contextmanager
def all_patches(files: Rank0Files | OverlayFiles | None) -> Iterator[None]:
    """As rank 0, or as nobody in particular: everything is in."""
    patch_table.install()
    os_functions.set_files(files)
    try:
        yield
    finally:
        os_functions.set_files(None)
        patch_table.remove()


@contextmanager
def another_rank(own: str, before: Layer) -> Iterator[None]:
    """As a process that a rank other than 0 has spawned."""
    patch_table.install_files(Layer(own), before)
    try:
        yield
    finally:
        os_functions.set_files(None)
        patch_table.remove()


def check_on_every_rank(folder: Path, calls: Callable[[], Iterator[Callable[[], object]]]) -> None:
    """These calls do on every rank what they do under plain Python, and change the files once."""
    alone = story(folder / "alone", calls)
    with all_patches(None):
        assert story(folder / "nobody", calls) == alone
    before = Layer(str(folder / "before"))
    (folder / "shared").mkdir()
    with all_patches(Rank0Files(before)):
        assert story(folder / "shared", calls) == alone
    left = contents(folder / "shared")
    assert left.keys() == contents(folder / "alone").keys()
    for rank in (1, 2):
        with another_rank(str(folder / f"rank{rank}"), before):
            assert story(folder / "shared", calls) == alone
    assert contents(folder / "shared") == left


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
