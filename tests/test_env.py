"""`instep env`: what it says, and that it is the truth about every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from unittest import mock

import pytest
import torch

from instep import cli
from instep.distributed.identity import accelerators, torch_devices
from instep.errors import InstepWarning
from instep.launch.env import command, rank_report, self_test, self_test_job, training_test
from instep.process.torch_private import versions
from launching import LAUNCHER_VARIABLES
from pool import ranks


@pytest.mark.parametrize(
    ("count", "said", "found"),
    [
        (2, None, ["0", "1"]),
        (2, "3,1", ["3", "1"]),
        (1, "2, -1, 0", ["2"]),  # CUDA stops at the first that is none
        (2, "3, 1", ["3", "1"]),
        (1, "0,7", ["0"]),  # there is no 7
        (1, "GPU-8932f937", ["GPU-8932f937"]),
        (1, "MIG-41b36325", ["MIG-41b36325"]),
        (0, "", []),
        (1, "1,no,0", ["1"]),
    ],
)
def test_the_physical_device_of_each_visible_one(
    count: int, said: str | None, found: list[str]
) -> None:
    assert accelerators.physical_devices(count, said) == found


def test_a_self_test_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test_job, "_SECONDS", 0.01)
    ran = self_test_job._run(2, "instep", "env")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "It had not ended after 0.01 seconds, and was killed: " in ran.stderr


@pytest.mark.parametrize(
    ("said", "shown", "late"),
    [
        (None, ["a1", "b2"], False),
        ("1", ["b2"], False),
        ("1", ["a1", "b2"], True),  # is_available() came first
        ("", ["a1"], True),
        ("0,7", ["a1"], False),  # there is no 7
        ("1,-1,0", ["a1", "b2"], True),  # -1 ends the list
        ("GPU-b", ["b2"], False),
        ("GPU-b", ["a1"], True),
        ("MIG-c", ["a1"], False),  # an instance has a name of its own
        ("1,0", ["a1", "b2"], False),  # the order of numbers cannot be seen
    ],
)
def test_a_variable_that_was_not_read_was_set_too_late(
    said: str | None, shown: list[str], late: bool
) -> None:
    variable = "CUDA_VISIBLE_DEVICES"
    warning = accelerators.changed_after_init_warning(variable, said, None, shown)
    assert (warning is not None) == late
    if warning:
        assert warning.startswith(f"{variable} is {said!r}, but torch shows {len(shown)}")
        assert "it was unset when this process started" in warning
        again = accelerators.changed_after_init_warning(variable, said, "2,3", shown)
        assert again == warning.replace("it was unset when", "it was '2,3' when")


@ranks(1, 2, 3)
def test_every_collective_is_tried_and_right() -> None:
    found = self_test.run_collectives(torch_devices.own_device())
    assert [name for name, _, _ in found] == list(self_test.TESTS)
    assert {verdict for _, verdict, _ in found} == {"ok"}


@pytest.mark.slow
@ranks(2, 3)
def test_trainings_have_the_numbers_of_one_process() -> None:
    found = training_test.run_trainings(torch.device("cpu"))
    assert [each.name for each in found] == list(training_test.TRAININGS)
    assert {each.verdict for each in found} == {"ok"}, found


@ranks(2)
def test_a_training_whose_gradients_are_not_summed_differs() -> None:
    with (
        mock.patch.object(training_test, "replicate", lambda model: model),
        warnings.catch_warnings(action="ignore", category=InstepWarning),  # INS718
    ):
        (found,) = training_test.run_trainings(torch.device("cpu"))
    assert found.verdict == "DIFFERS BY MORE THAN 0.001"


@pytest.mark.launch
@pytest.mark.nightly
def test_alone_the_self_test_starts_its_own_jobs() -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    ran = subprocess.run(
        [sys.executable, "-m", "instep", "env", "--selftest", "--json"],
        env=environ, capture_output=True, text=True, timeout=50, check=True,
    )  # fmt: skip
    report = json.loads(ran.stdout)
    assert report["failure"]["verdict"] == "ok"
    trained = [each["name"] for each in report["trainings"][1]]
    assert (report["job"]["ranks"], trained) == (2, list(training_test.TRAININGS))


def test_what_is_wrong_on_one_rank_is_shown() -> None:
    tests = [[("barrier", "ok", 1.0)], [("barrier", "WRONG RESULT", 3.0)]]
    alike = dict.fromkeys(command.RANK_COLUMNS, 0) | {
        "versions": {"torch": "2"}, "interfaces": ["lo"], "accelerators": [], "warnings": [],
        "scratch": "/tmp (9.0 GiB free)",
    }  # fmt: skip
    other = alike | {"rank": 1, "interfaces": ["lo", "eth0"]}
    job = {"launcher": "srun", "why": {"SLURM_STEP_ID": "0"}, "ranks": 2, "hosts": 1,
           "available": ["gloo"], "set": {}}  # fmt: skip
    trained = {"name": "overlap", "verdict": "ok", "difference": 0.0, "seconds": 1.0}
    trainings = [[trained], [trained | {"verdict": "DIFFERS", "difference": 0.5}]]
    text = command.format_report(
        {"job": job, "ranks": [alike, other], "tests": tests, "trainings": trainings}
    )
    assert "overlap   1.00     5.0e-01                    rank 1: DIFFERS" in text
    assert "launcher    srun (SLURM_STEP_ID=0)" in text
    assert "interfaces  lo (rank 0)\ninterfaces  lo; eth0 (rank 1)" in text
    assert "versions    torch 2\n" in text
    assert "scratch     /tmp (9.0 GiB free)\n" in text
    assert "barrier     3.00  rank 1: WRONG RESULT" in text
    assert "To test several" not in text


def test_alone_it_is_a_world_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    told = capsys.readouterr().out
    assert "ranks       1 on 1 host" in told
    assert told.endswith("To test several: instep run -n 2 -m instep env\n\n")


@pytest.mark.launch
def test_under_a_launcher_rank_0_reports_for_all() -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    ran = subprocess.run(
        [sys.executable, "-m", "instep", "run", "-n", "2", "-m", "instep", "env", "--json"],
        env=environ, capture_output=True, text=True, timeout=50, check=True,
    )  # fmt: skip
    report = json.loads(ran.stdout)
    assert report["job"]["launcher"] == "instep run"
    assert report["job"]["why"]["WORLD_SIZE"] == "2"
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert len({rank["pid"] for rank in report["ranks"]}) == 2
    assert {verdict for tests in report["tests"] for _, verdict, _ in tests} == {"ok"}


def test_a_pytorch_that_is_newer_than_any_that_was_tried_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    major, minor = versions.TRIED[1]
    for version, named in ((f"{major}.{minor}.9+cu130", False), (f"{major}.{minor + 1}.0", True)):
        monkeypatch.setattr(torch, "__version__", version)
        lines = [line for line in rank_report.describe_rank()["warnings"] if "newer" in line]
        assert (
            lines
            == [f"PyTorch {version} is newer than any that was tried ({major}.{minor})"] * named
        )
