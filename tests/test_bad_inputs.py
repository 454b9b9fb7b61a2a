"""The quick ones of the bad inputs; `python tests/bad_inputs.py` tries all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bad_inputs import CASES, Case, attempt, prepare
from instep.launch.worker import static_opt_out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder)
    return folder


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.nightly] if case.slow else [], id=case.name)
        for case in CASES
    ],
)
def test_what_is_wrong_is_said(case: Case, folder: Path) -> None:
    outcome = attempt(case, folder)
    assert outcome.verdict == "as expected", outcome.output


def test_functions_that_call_each_other_a_thousand_deep_are_followed(folder: Path) -> None:
    script = folder / "called.py"
    assert static_opt_out.find_opt_out([str(script)]) is None
    begins = script.with_name("begins.py")
    begins.write_text(script.read_text().replace("pass", "init_process_group()", 1))
    reason = static_opt_out.find_opt_out([str(begins)])
    assert reason == "it starts a process group of its own"
    begins.unlink()
