"""The quick ones of the bad inputs; `python tests/bad_inputs.py` tries all of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bad_inputs import CASES, Case, attempt, attempt_here, prepare
from instep.errors import LaunchVariablesError
from instep.launch.worker import static_opt_out
from instep.unedited import seeds
from launching import LAUNCHER_VARIABLES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder)
    return folder


QUICK = [case for case in CASES if not case.slow]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_what_is_wrong_is_said(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: none of them starts another."""
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
        monkeypatch.delenv(name)
    for name, value in ({"COLUMNS": "100"} | case.environ).items():
        monkeypatch.setenv(name, value)
    outcome = attempt_here(case)
    assert outcome.verdict == "as expected", outcome.output


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_wrong_is_said_by_a_process(case: Case, folder: Path) -> None:
    outcome = attempt(case, folder)
    assert outcome.verdict == "as expected", outcome.output


def test_thirty_wrong_command_lines_are_among_them() -> None:
    assert len({case.words for case in QUICK if case.code == 2}) >= 30


def test_functions_that_call_each_other_a_thousand_deep_are_followed(folder: Path) -> None:
    script = folder / "called.py"
    assert static_opt_out.find_opt_out([str(script)]) is None
    begins = script.with_name("begins.py")
    begins.write_text(script.read_text().replace("pass", "init_process_group()", 1))
    reason = static_opt_out.find_opt_out([str(begins)])
    assert reason == "it starts a process group of its own"
    begins.unlink()


def test_a_folder_of_checkpoints_that_cannot_be_written_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSTEP_CHECKPOINT", str(folder / "train.py"))
    with pytest.raises(LaunchVariablesError, match=r"train\.py \(INSTEP_CHECKPOINT\): File exists"):
        seeds.choose_seed()
