"""What is done about launchers that are not there and cannot be installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

import components

SCRIPT = Path(__file__).parents[1] / "scripts" / "components"


@pytest.mark.parametrize(
    ("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)]
)
def test_a_test_without_its_launcher_is_skipped_and_under_ci_a_failure(monkeypatch, ci, outcome):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(components, "PATH", "")
    with pytest.raises(outcome, match=r"MPICH is not installed \(mpirun.mpich not found\)"):
        components.require(("MPICH",))


def test_what_is_compiled_needs_pythons_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(components, "HEADER", tmp_path / "Python.h")
    monkeypatch.setattr(components, "PROGRAMS", {"C++": ()})
    assert "Python's headers are not installed" in (components.missing("C++") or "")
    components.HEADER.touch()
    assert components.missing("C++") is None


@pytest.mark.parametrize(("ci", "are"), [("", "skipped"), ("true", "failures, as CI is set")])
def test_what_cannot_be_installed_keeps_no_other_test_from_running(tmp_path, ci, are):
    (tmp_path / "id").symlink_to(str(shutil.which("id")))
    ran = subprocess.run(
        ["/bin/sh", str(SCRIPT)],
        env={"CI": ci, "PATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert " mpich " in ran.stderr
    assert ran.stderr.endswith(f". Tests that need these are {are}.\n")
