"""The files after commands, as ranks see them: both see one process's files."""

from __future__ import annotations

import os
import random
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from instep.errors import UneditedError
from instep.unedited.files import rank0_files
from instep.unedited.files.layers.generations import Generations, before_layer
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.rank0_files import Rank0Files
from instep.unedited.processes.command_files import CommandFiles, GenerationChange, stamps
from test_overlay import NAMES, operations, outcome, read, seen_through, stocked, tree, write


class Ranks:
    """Rank 0 and rank 1 of one job, in one process, by turns."""

    def __init__(self, folder: Path) -> None:
        shared = str(folder / "layers")
        os.makedirs(f"{shared}/rank1")
        layers = Generations(f"{shared}/rank1", shared)
        rank0 = Rank0Files(before_layer(shared, 0))
        rank1 = OverlayFiles(layers.rank_layer, layers.before)
        self.files = (rank0, rank1)
        self.changes = [
            GenerationChange(rank0, shared, None),
            GenerationChange(rank1, shared, layers),
        ]

    def command(self, do: Callable[[], object]) -> None:
        """Both come to a command that does this, and to its end."""
        first, second = (
            CommandFiles(change, "", (), new_generation=True) for change in self.changes
        )
        do()
        second.apply(first.capture())


def story(seed: int) -> Iterator[list[object]]:
    """What a script sees that does 25 things, and then 25 more, and so on."""
    numbers = random.Random(seed)
    for _ in range(6):
        seen = [outcome(numbers.choice([*operations(numbers)])) for _ in range(25)]
        yield [*seen, tree()]


def commands(seed: int) -> Iterator[None]:
    """What commands do in between."""
    numbers = random.Random(seed + 1000)
    while True:
        for _ in range(5):
            outcome(numbers.choice([*operations(numbers)]))
        for path in filter(os.path.isfile, NAMES):  # two names of one file part when it is changed
            write(f"{path}.copy", "w", read(path))
            os.replace(f"{path}.copy", path)
        yield


SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(5, 40))]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rank_sees_what_one_process_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.chdir(stocked(tmp_path / "alone"))
    oracle = [seen for seen, _ in zip(story(seed), commands(seed), strict=False)]
    monkeypatch.chdir(stocked(tmp_path / "shared"))
    ranks, starts = Ranks(tmp_path), commands(seed)
    stories = [story(seed), story(seed)]
    for expected in oracle:
        for files, own in zip(ranks.files, stories, strict=True):
            with seen_through(files):
                assert next(own) == expected
        ranks.command(lambda: next(starts))


def test_a_rank_that_made_its_working_directory_before_rank_0_is_in_rank_0s_after_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    ranks = Ranks(tmp_path)
    with seen_through(ranks.files[1]):
        os.makedirs("out")
        os.chdir("out")
        assert os.getcwd() == str(folder / "out")
    (folder / "out").mkdir()
    with seen_through(ranks.files[1]):
        ranks.command(lambda: write(f"{folder}/out/log", "w", "command"))
        assert os.listdir() == ["log"]
    assert os.readlink("/proc/self/cwd") == str(folder / "out")


def test_what_is_open_and_what_only_this_rank_has_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    ranks = Ranks(tmp_path)
    logs = []
    for rank, files in enumerate(ranks.files):
        os.chdir(tmp_path / "folder")
        with seen_through(files):
            os.makedirs(f"out/run{rank}")
            write(f"out/run{rank}/log", "w", "mine")
            logs.append(open("out/log", "a", buffering=1))  # noqa: SIM115
            logs[-1].write("script\n")
            os.chdir("out")
    ranks.command(lambda: write("log", "a", "command\n"))
    for log, files in zip(logs, ranks.files, strict=True):
        with seen_through(files):
            log.write("script\n")
            assert read("log") == "script\ncommand\nscript\n"
            log.close()
    with seen_through(ranks.files[1]):
        assert os.getcwd() == str(tmp_path / "folder" / "out")
        assert read("run1/log") == "mine"
        assert sorted(os.listdir()) == ["log", "run0", "run1"]


def test_a_rank_that_is_late_sees_its_own_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stocked(tmp_path / "folder"))
    ranks = Ranks(tmp_path)
    first, second = (CommandFiles(change, "", (), new_generation=True) for change in ranks.changes)
    state = first.capture()
    with seen_through(ranks.files[0]):
        write("c", "w", "later")
        write("new", "w", "later")
    for applied in (False, True):
        if applied:
            second.apply(state)
        with seen_through(ranks.files[1]):
            assert (read("c"), os.path.exists("new")) == ("second", False)


def test_a_rank_that_is_two_commands_late_sees_its_own_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rank 0 changes then is kept for the ranks of all generations."""
    monkeypatch.chdir(stocked(tmp_path / "folder"))
    monkeypatch.setattr(rank0_files, "KEPT_BYTES", 20)
    os.mkdir("empty")
    os.chmod("empty", 0o711)
    for name, text in (("large", "x" * 50), ("twice", "two names"), ("gone", "soon")):
        write(name, "w", text)
    os.link("twice", "other name")
    os.symlink("c", "link")
    ranks = Ranks(tmp_path)
    oldest = ranks.files[1]
    first = CommandFiles(ranks.changes[0], "", (), new_generation=True)
    first.capture()  # rank 1 does not come to it
    with seen_through(ranks.files[0]):
        write("new", "w", "later")
        write("twice", "w", "later")
        write("c", "w", "later")
        os.unlink("gone")
        os.unlink("link")
        os.rmdir("empty")
        shutil.rmtree("a")
        write("large", "w", "later")
    with seen_through(oldest):
        assert read("twice") == "two names"
        assert (read("c"), read("gone"), read("link")) == ("second", "soon", "second")
        assert stat.S_IMODE(os.stat("empty").st_mode) == 0o711
        assert (os.listdir("empty"), os.path.exists("new")) == ([], False)
        assert read("a/a") == "first"
        assert os.path.isdir("a/b")
        assert os.path.getsize("large") == 50
        with pytest.raises(UneditedError, match="after rank 0 has written over it"):
            read("large")


def test_what_all_ranks_have_left_is_deleted_once_and_not_looked_for_after_each_later_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stocked(tmp_path / "folder"))
    ranks = Ranks(tmp_path)
    kept = before_layer(str(tmp_path / "layers"), 0)
    with seen_through(ranks.files[0]):
        write("c", "w", "changed")
    path = str(tmp_path / "folder" / "c")
    location = kept.find(path)
    assert location
    for _ in range(2):
        ranks.command(lambda: None)
    assert not os.path.exists(location)
    Path(location).touch()
    for _ in range(2):
        ranks.command(lambda: None)
    assert os.path.exists(location)


def test_a_rank_stays_in_a_folder_that_only_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a process id in its name."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    ranks = Ranks(tmp_path)
    with seen_through(ranks.files[1]):
        os.makedirs("run1/deep")
        os.chdir("run1/deep")
        write("log", "w", "mine")
    for number in range(3):
        ranks.command(lambda: None)
        with seen_through(ranks.files[1]):
            assert os.getcwd() == str(tmp_path / "folder" / "run1" / "deep")
            write("log", "a", str(number))
            assert read("log") == read(f"{tmp_path}/folder/run1/deep/log")
    with seen_through(ranks.files[1]):
        assert read("log") == "mine012"
    assert os.listdir(tmp_path / "folder") == []


def test_on_another_host_files_stay_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk may be another one; a temporary file of rank 0's is not there at all."""
    monkeypatch.chdir(stocked(tmp_path / "folder"))
    ranks = Ranks(tmp_path)
    layers = Generations(str(tmp_path / "elsewhere"), None)
    there = OverlayFiles(layers.rank_layer, layers.before)
    side = GenerationChange(there, None, layers)
    assert (side.is_on_rank0_host, ranks.changes[1].is_on_rank0_host) == (False, True)
    with seen_through(there):
        write("c", "w", "mine")
    command = CommandFiles(side, "", (), new_generation=True)
    command.apply(CommandFiles(ranks.changes[0], "", (), new_generation=True).capture())
    with seen_through(there):
        assert read("c") == "mine"
    assert layers.number == 0
    ranks.files[0].add_temporary("/tmp/of-rank-0")
    told = CommandFiles(ranks.changes[0], "sort /tmp/of-rank-0", (), new_generation=True).capture()
    assert told.temporary == ["/tmp/of-rank-0"]
    with pytest.raises(UneditedError, match="/tmp/of-rank-0"):
        command.apply(told)


def test_the_ranks_shared_memory_is_none_of_the_files_that_a_process_has_open(
    tmp_path: Path,
) -> None:
    with (
        open(tmp_path / "file", "w") as file,
        tempfile.NamedTemporaryFile(dir="/dev/shm") as memory,
    ):
        found = stamps()
    assert os.path.realpath(file.name) in found
    assert memory.name not in found
