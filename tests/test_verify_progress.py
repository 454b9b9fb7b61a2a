"""The lines by which `instep verify` says how far it is."""

from __future__ import annotations

from io import StringIO

import pytest

from instep.verify import progress
from instep.verify.progress import RunProgress


class Screen(StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def runs(stream, clock, took):
    """One process and two, each run of this many seconds."""
    told = RunProgress([2], stream, clock)
    for title, seconds in took:
        told.start(title)
        clock.now += seconds
    told.close()
    return stream.getvalue()


TITLES = (
    progress.WHOLE,
    progress.AGAIN,
    progress.PLAIN,
    progress.NOISE,
    progress.pinned_steps(2),
    progress.all_steps(2),
)


def test_each_run_is_a_line_with_the_seconds_that_are_left():
    took = zip(TITLES, (30, 5, 4, 30, 6, 20), strict=True)
    assert runs(StringIO(), Clock(), took).splitlines() == [
        "instep verify: run 1 of 6: 1 process",
        "instep verify: run 2 of 6 (about 3 min left): 1 process again, for its gradients",
        "instep verify: run 3 of 6 (about 70 s left): plain Python, its first steps",
        "instep verify: run 4 of 6 (about 65 s left): 1 process against itself, for the script's "
        "own noise",
        "instep verify: run 5 of 6 (about 35 s left): 2 processes, steps from the "
        "parameters of 1 process",
        "instep verify: run 6 of 6 (about 30 s left): 2 processes, all steps",
    ]


def test_a_second_run_for_the_noise_and_runs_with_other_rounding_are_added():
    titles = (*TITLES[:4], progress.NOISE, *TITLES[4:], progress.ROUNDING, progress.ROUNDING)
    said = runs(StringIO(), Clock(), [(title, 1) for title in titles]).splitlines()
    assert [line.partition(" (")[0].partition(":")[2].partition(":")[0] for line in said] == [
        " run 1 of 6",
        " run 2 of 6",
        " run 3 of 6",
        " run 4 of 6",
        " run 5 of 7",
        " run 6 of 7",
        " run 7 of 7",
        " run 8 of 8",
        " run 9 of 9",
    ]


@pytest.mark.parametrize("columns", [40, 200])
def test_a_terminal_has_one_line_that_is_removed_at_the_end(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Screen()
    said = runs(screen, Clock(), [(progress.WHOLE, 3), (progress.AGAIN, 3)])
    assert "\n" not in said
    first, second, *_, end = said.split("\r\033[K")[1:]
    assert first == "instep verify: run 1 of 6 (0 s): 1 process"[: columns - 1]
    assert second.startswith("instep verify: run 2 of 6 (0 s, about 15 s"[: columns - 1])
    assert len(second) < columns
    assert end == ""


def test_a_run_that_takes_longer_than_others_has_no_estimate():
    clock = Clock()
    told = RunProgress([], StringIO(), clock)
    told.start(progress.WHOLE)
    clock.now = 10.0
    told.start(progress.AGAIN)
    clock.now = 12.0
    assert "(about 28 s left)" in told.line()
    clock.now = 20.5
    assert told.line() == f"run 2 of 4: {progress.AGAIN}"


def test_a_note_is_a_line_of_its_own():
    screen = Screen()
    told = RunProgress([], screen, Clock())
    told.start(progress.WHOLE)
    told.note("one process does not repeat itself")
    told.close()
    assert "\r\033[Kinstep verify: one process does not repeat itself\n" in screen.getvalue()
