"""The scripts under examples/unedited/ know nothing of instep, and are the same on many ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forked import Forked
from instep.launch.worker.static_opt_out import find_opt_out
from instep.verify.verdict import Report, Verdict
from instep.verify.verification import verify_script

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "examples" / "unedited"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py"))
WHOLE = {"gcn"}
"""One graph is no batch: every rank computes it."""
RANDOM = {"cifar", "siamese"}
"""What is random in their samples is drawn from a stream of each sample's own."""
LONG = {
    *("amp_accumulation", "char_transformer", "cifar", "contrastive", "data_parallel", "dcgan"),
    *("time_series", "siamese", "unet", "vae", "wgan_gp", "word_language_model"),
}
"""Their whole trainings are compared at night."""
FEW = {"mnist": ["--epochs", "1", "--batch-size", "24"]}


def proven(name: str, sizes: list[int], steps: int | None, arguments: list[str]) -> Report:
    report = verify_script([str(FOLDER / f"{name}.py"), *arguments], sizes, Forked(), steps)
    assert report.verdict is not Verdict.DIFFERENT, (report.divergence, report.cause)
    assert (report.compare_with_python is not None) == (name in RANDOM)
    assert [result.run.n for result in report.results] == sizes
    return report


def most_of_one_rank(report: Report) -> float:
    """The largest part of all samples that went through one rank's modules."""
    (whole,) = report.oracle.samples_per_rank
    return max(max(result.run.samples_per_rank) for result in report.results) / whole


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name == "mnist" else ())
        for name in EXAMPLES
        if name not in LONG
    ],
)
def test_the_first_steps_are_those_of_one_process(name):
    report = proven(name, [3], 7, FEW.get(name, []))
    assert most_of_one_rank(report) == 1 if name in WHOLE else most_of_one_rank(report) < 0.4


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_whole_training_is_that_of_one_process(name):
    report = proven(name, [2, 3], None, [])
    assert most_of_one_rank(report) == 1 if name in WHOLE else most_of_one_rank(report) < 0.55


def test_none_of_them_knows_of_instep():
    assert len(EXAMPLES) >= 10
    for name in EXAMPLES:
        path = FOLDER / f"{name}.py"
        assert find_opt_out([str(path)]) is None
        assert "instep" not in path.read_text()


@pytest.mark.launch
@pytest.mark.timeout(150)
@pytest.mark.nightly
def test_the_command_writes_table_json_and_picture(tmp_path):
    report, picture = tmp_path / "report.json", tmp_path / "curves.png"
    script = FOLDER / "char_transformer.py"
    asked = ["-n", "2", "--steps", "2", "--json", report, "--plot", picture, script]
    told = subprocess.run(
        [sys.executable, "-m", "instep", "verify", *asked],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert told.stdout.endswith("\nSAME\n"), told.stderr
    value = json.loads(report.read_text())
    assert [run["samples_per_rank"] for run in value["runs"]] == [[24], [12, 12]]
    assert value["compare_with_python"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")
