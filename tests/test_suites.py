"""scripts/suites: other projects' tests, whatever they do to their process."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts" / "suites"
TESTS = """
import os, pytest, unittest

class Tests(unittest.TestCase):
    def test_a_passes(self): pass
    def test_b_fails(self): self.assertEqual(1, 2)
    def test_c_ends_its_process(self): os._exit(3)
    def test_d_is_skipped(self): self.skipTest("no GPU")
    def test_e_fails_in_a_part(self):
        with self.subTest(): raise OSError("the disk | is full (/a/b-1/c.py)")
        self.skipTest("and then")
    @pytest.mark.skip(reason="not yet")
    def test_f_is_skipped_by_pytest(self): assert False
"""


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_outcomes_of_tests_are_recorded_and_one_that_ends_its_process_stops_no_other(
    tmp_path, scripts
):
    from runs import read_outcomes, run_tests

    (tmp_path / "foreign.py").write_text(TESTS)
    files = [tmp_path / "outcomes.0.json"]
    command = [
        sys.executable,
        SCRIPTS / "worker.py",
        tmp_path / "foreign.py",
        tmp_path / "outcomes",
    ]
    run_tests(command, {}, files)
    outcomes = read_outcomes(files)
    assert {test: (each["outcome"], each["reason"]) for test, each in outcomes.items()} == {
        "Tests.test_a_passes": ("pass", ""),
        "Tests.test_b_fails": ("fail", "AssertionError: 1 != 2"),
        "Tests.test_c_ends_its_process": ("fail", "the process ended with status 3"),
        "Tests.test_d_is_skipped": ("skip", "no GPU"),
        "Tests.test_e_fails_in_a_part": ("fail", "OSError: the disk | is full (c.py)"),
        "Tests.test_f_is_skipped_by_pytest": ("skip", "not yet"),
    }


def test_the_table_has_each_test_that_fails_or_ends_otherwise(tmp_path, monkeypatch, scripts):
    import pages

    runs = {
        "instep": {
            "T.same": "pass",
            "T.ours": "fail: E: a | b",
            "T.both": "fail: E",
            "T.skip": "skip",
            "T.went": "skip",
        },
        "Gloo": {
            "T.same": "pass",
            "T.ours": "pass",
            "T.both": "fail: F",
            "T.skip": "pass",
            "T.went": "fail: the process ended",
        },
    }
    sides = {
        side: {"tests": tests, "groups": {"shared memory": 4}, "version": "1", "date": "today"}
        for side, tests in runs.items()
    }
    results = {"torch": {"2": sides, "3": sides}}
    rows = pages.differences(results, "en")[2:]
    assert [row.split(" | ")[1:5] for row in rows] == [
        ["2, 3", "`T.both`", "fail", "fail"],
        ["2, 3", "`T.ours`", "fail", "pass"],
        ["2, 3", "`T.skip`", "skip", "pass"],
        ["2, 3", "`T.went`", "skip", "fail"],
    ]
    assert "E: a / b" in rows[1]
    known = tmp_path / "reasons.json"
    known.write_text('{"torch": {"*": {"en": "theirs"}, "T.ours": {"en": "a bug"}}}')
    monkeypatch.setattr(pages, "REASONS", known)
    assert [row.split(" | ")[-1] for row in pages.differences(results, "en")[2:4]] == [
        *("theirs |", "a bug |")
    ]
    assert pages.summary(results, "en")[2].split(" | ")[1:8] == [
        *("2", "instep", "1", "2", "2", "4", "0")
    ]


def test_the_tables_are_written_between_their_marks(tmp_path, monkeypatch, scripts):
    import pages

    page, other = tmp_path / "suites.md", tmp_path / "other.md"
    marks = "before\n<!-- summary -->\n{}<!-- end -->\nafter\n"
    marks_of_other = "before\n<!-- differences -->\n{}<!-- end -->\n"
    page.write_text(marks.format(""))
    other.write_text(marks_of_other.format(""))
    monkeypatch.setattr(pages, "PAGES", {"en": [page, other]})
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "absent.json")
    for _ in range(2):
        pages.write_pages()
        summary = "\n".join(pages.summary({}, "en"))
        assert page.read_text() == marks.format(f"{summary}\n")
        assert other.read_text() == marks_of_other.format("none\n")


def test_each_side_of_horovods_tests_has_its_own_launcher_and_interpreter(tmp_path, scripts):
    import suites

    (suite,) = (each for each in suites.SUITES if each.name == "horovod")
    file = tmp_path / "horovod" / suite.files[0]
    file.parent.mkdir(parents=True)
    file.write_text("")
    for side, launcher in (
        ("instep", [sys.executable, "-m", "instep", "horovodrun", "-np", 3, sys.executable]),
        (
            "Horovod",
            [str(Path(suites.HOROVOD).with_name("horovodrun")), "--gloo", "-np", 3, suites.HOROVOD],
        ),
    ):
        ((words, files),) = suites.commands(suite, 3, side, tmp_path)
        assert words[: len(launcher)] == launcher
        assert len(files) == 3


def test_a_suite_is_left_out_where_its_folder_is_not(tmp_path, scripts):
    import suites

    found = [suite.name for suite in suites.SUITES if suite.modules(tmp_path)]
    assert found == ["torch", "torch-rpc"]
