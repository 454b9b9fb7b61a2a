"""The cases of benchmarks/unedited_cases, the tables in docs, and a few cases run."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from instep.launch.worker.static_opt_out import find_opt_out

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import unedited_docs  # noqa: E402
import unedited_table  # noqa: E402

CASES = sorted(path.stem for path in unedited_table.CASES.glob("*.py"))
ROWS = json.loads((ROOT / "benchmarks" / "results" / "unedited_table.json").read_text())
EXAMPLES = json.loads(unedited_table.EXAMPLES_JSON.read_text())
CHOSEN = ["accelerate_loop", "mingpt", "nanogpt", "nlp_tutorial_transformer", "pytorch_cifar"]
NEEDS = {"accelerate_loop": "accelerate"}


def test_every_row_of_the_table_is_that_of_a_case():
    assert set(ROWS) <= set(CASES)
    for name, row in ROWS.items():
        assert unedited_table.described(unedited_table.CASES / f"{name}.py")[0] == row["title"]


def test_no_case_knows_of_instep():
    for name in CASES:
        path = unedited_table.CASES / f"{name}.py"
        assert find_opt_out([str(path)]) is None
        assert "instep" not in path.read_text()


@pytest.mark.parametrize("page", sorted(unedited_docs.HEADS))
def test_both_pages_hold_the_table_of_the_results(page):
    text = (ROOT / "docs" / page).read_text()
    assert unedited_docs.between_markers(text) == unedited_docs.table(ROWS, page)
    examples = unedited_docs.between_markers(text, unedited_docs.BEGIN_EXAMPLES)
    assert examples == unedited_docs.examples_table(EXAMPLES, page)
    assert {*EXAMPLES} == {script.stem for script in unedited_table.EXAMPLES.glob("*.py")}


def test_another_number_step_or_file_is_different():
    def ran(last: float, printed: str, files: list[str], steps: int) -> unedited_table.Run:
        array = np.full(3, last)
        calls = {"sharded": steps, "whole": 0, "samples": 8}
        times = [float(k) for k in range(steps + 1)]
        return unedited_table.Run(0, printed, "", files, 1, [[array]], [[[array]]], times, calls)

    plain = ran(0.5, "loss 0.25", ["a"], 2)
    verdicts = {}
    for name, many in {
        "same": ran(0.5, "loss 0.250001", ["a"], 2),
        "parameters": ran(0.51, "loss 0.25", ["a"], 2),
        "printed": ran(0.5, "loss 0.26", ["a"], 2),
        "files": ran(0.5, "loss 0.25", ["a", "b"], 2),
        "steps": ran(0.5, "loss 0.25", ["a"], 1),
    }.items():
        result = unedited_table.Result(
            "case", "package: what", "", noise={"parameters": 0, "printed": 0}
        )
        unedited_table.add(result, plain, many, "2")
        verdicts[name] = result.verdict
    assert verdicts.pop("same") == "same"
    assert verdicts == {name: f"different: {name}" for name in verdicts}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CHOSEN)
def test_a_case_is_the_same_on_two_and_three_ranks(name):
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    result = unedited_table.compare(unedited_table.CASES / f"{name}.py", [2, 3], 120)
    assert result.verdict == "same", result
    assert result.calls == "divided", result


def test_all_cases_run_where_none_is_named_and_the_pages_are_written(tmp_path, monkeypatch):
    """As `make unedited` does."""
    compared, written = [], []

    def compare(case, sizes, limit, folder, *, timed):
        assert timed
        compared.append(case.stem)
        return unedited_table.Result(case.stem, "a case", "")

    monkeypatch.setattr(unedited_table, "compare", compare)
    monkeypatch.setattr(unedited_table, "write", lambda rows, *_: written.append(sorted(rows)))
    file = tmp_path / "table.json"
    monkeypatch.setattr("sys.argv", ["unedited_table.py", "--json", str(file), "--docs"])
    unedited_table.main()
    assert compared == sorted(path.stem for path in unedited_table.CASES.glob("*.py"))
    assert written == [sorted(compared)]
    monkeypatch.setattr("sys.argv", [*sys.argv, "--no-runs"])
    unedited_table.main()
    assert len(written) == 2
    assert len(compared) == len(written[1])
