"""`instep run --timeline` and `instep timeline`: where the time of each rank went."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from instep.distributed.flight_record.recorder import FlightRecorder
from instep.distributed.flight_record.timeline_file import TimelineWriter, create, path_of_node
from instep.errors import CommandLineError, LaunchVariablesError
from instep.launch.timeline.events import format_summary, read_events, sum_up
from instep.launch.timeline.page import format_html


def collective(rank, sequence, start, length, waited=None, group="0:0-2"):
    args = {"call": f"all_reduce number {sequence}", "group": group, "sequence": sequence}
    args["waited_us"] = 1e6 * (length if waited is None else waited)
    times = {"ts": start * 1e6, "dur": length * 1e6}
    return (
        {"ph": "X", "cat": "collective", "pid": rank, "tid": 1, "name": "all_reduce"}
        | times
        | {"args": args}
    )


def phase(rank, name, start, length):
    times = {"ts": start * 1e6, "dur": length * 1e6}
    return {"ph": "X", "cat": "phase", "pid": rank, "tid": 0, "name": name} | times


LATE = [
    *(collective(rank, 0, 0, 0, group="all") for rank in range(3)),
    *(collective(0, 1, 1, 3), collective(1, 1, 3.5, 0.5), collective(2, 1, 1.5, 2.5)),
    *(phase(1, "data", 0, 3), collective(0, 2, 5, 5, waited=1), collective(1, 2, 5.5, 4.5)),
    collective(2, 2, 5, 5),
]


def test_the_summary_says_who_waited_and_for_whom():
    first, second, third = sum_up(LATE)
    assert (first.span, first.waited, first.hidden) == (10, 4, 4)
    assert (second.last, second.made_wait, second.phases) == (2, 3.0, {"data": 3.0})
    assert third.made_wait == 0
    lines = format_summary(sum_up(LATE))
    assert lines[-2].startswith("Rank 1 is the straggler: others waited 3.00 s for it (30.0% of")
    assert "the longest wait was 2.50 s, in all_reduce number 1)" in lines[-2]
    assert lines[-1].startswith("Most of it is that one wait")
    assert any("data 30.0%" in line for line in lines)


def test_the_start_of_the_ranks_is_not_counted():
    slow = [collective(0, 1, 0, 9), collective(1, 1, 8, 1), collective(0, 2, 10, 0)]
    first, second = sum_up(slow)
    assert (first.span, first.waited, second.made_wait) == (2, 1, 0)


def test_groups_of_one_rank_and_an_empty_timeline_have_a_summary():
    assert sum_up([collective(0, 1, 1, 3, group="5:0")])[0].last == 0
    assert format_summary(sum_up([])) == ["no collective has ended; there is nothing to sum up"]


def write(path, events, offset):
    clock = {"ph": "M", "name": "clock", "pid": 0, "tid": 0, "args": {"offset_us": offset}}
    path.write_text("[\n" + "".join(json.dumps(event) + ",\n" for event in (clock, *events)))


def test_the_files_of_other_hosts_are_brought_to_one_clock(tmp_path):
    path = tmp_path / "job.json"
    write(path, [collective(0, 1, 100, 1)], 5_000_000)
    write(path_of_node(str(path), 1), [collective(1, 1, 3, 1)], 103_000_000)
    assert [(event["pid"], event["ts"]) for event in read_events(path)] == [(0, 0), (1, 1e6)]


def test_a_line_that_was_torn_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "job.json"
    write(path, [collective(0, 1, 1, 1)], 0)
    with path.open("a") as file:
        file.write('{"ph": "X", "ca')
    assert len(read_events(path)) == 1


@pytest.mark.parametrize("text", [None, "", "{}", "no"])
def test_another_file_is_an_error_of_one_line(tmp_path, text):
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    said = "cannot read .*: No such file" if text is None else r"other\.json is no timeline"
    with pytest.raises(CommandLineError, match=said):
        read_events(path)


def check_trace_event(event):
    """As Perfetto's importer of the Trace Event Format reads it."""
    assert event["ph"] in ("X", "M")
    assert type(event["pid"]) is int
    assert type(event["tid"]) is int
    assert type(event["name"]) is str
    assert event["name"]
    assert isinstance(event.get("args", {}), dict)
    if event["ph"] == "X":
        assert type(event["cat"]) is str
        assert event["ts"] > 0
        assert event["dur"] >= 0


def test_a_recorder_writes_collectives_and_phases_that_have_ended(tmp_path):
    recorder = FlightRecorder()
    path = tmp_path / "job.json"
    path.write_text("[\n")
    before = time.monotonic() * 1e6
    writer = TimelineWriter(path, 3, recorder)
    group = recorder.add_group("0", range(4))
    with recorder.phase("forward"):
        number = recorder.enter("all_reduce", (4,), "torch.float32", group)
        recorder.leave(number)
    behind = recorder.enter("broadcast", (2, 3), "torch.int64", group, 0)
    recorder.issued(behind)
    recorder.wait(behind)
    recorder.leave(behind)
    recorder.enter("barrier", None, None, group)
    writer.close()
    recorder.leave(recorder.enter("barrier", None, None, group))
    first, second, third = read_events(path)
    assert [first["name"], second["name"], third["name"]] == ["forward", "all_reduce", "broadcast"]
    assert first["dur"] >= second["dur"]
    assert second["args"]["waited_us"] == pytest.approx(second["dur"])
    assert 0 < third["args"]["waited_us"] < third["dur"]
    assert third["args"]["call"].startswith("broadcast int64 [2, 3] from rank 0 at ")
    assert {event["pid"] for event in (first, second, third)} == {3}
    assert first["tid"] != second["tid"] != third["tid"]
    text = path.read_text()
    assert text.endswith(",\n")  # the format needs no closing bracket
    written = json.loads(text.removesuffix(",\n") + "]")
    for event in written:
        check_trace_event(event)
    ends = [event["ts"] + event["dur"] for event in written if event["ph"] == "X"]
    assert before <= min(event["ts"] for event in written if event["ph"] == "X")
    assert max(ends) <= time.monotonic() * 1e6  # microseconds
    titles = {(e["name"], e["tid"], *e["args"].values()) for e in written if e["ph"] == "M"}
    assert ("process_name", 0, "rank 3") in titles
    assert ("process_sort_index", 0, 3) in titles
    assert {("thread_name", e["tid"]) for e in written if e["ph"] == "X"} <= {
        title[:2] for title in titles
    }


def test_phases_that_are_nested_keep_their_whole_time(tmp_path):
    recorder = FlightRecorder()
    path = tmp_path / "job.json"
    path.write_text("[\n")
    writer = TimelineWriter(path, 0, recorder)
    with recorder.phase("forward"), recorder.phase("checkpoint"):
        pass
    with recorder.phase("optimizer"):
        pass
    writer.close()
    outer, inner, last = read_events(path)
    assert [outer["name"], inner["name"], last["name"]] == ["forward", "checkpoint", "optimizer"]
    assert outer["ts"] + outer["dur"] >= inner["ts"] + inner["dur"]
    assert last["ts"] >= outer["ts"] + outer["dur"]


def test_time_in_a_phase_is_told_from_waits_and_phases_within_it():
    events = [
        *(collective(rank, 0, 0, 0, group="all") for rank in range(2)),
        *(phase(0, "backward", 1, 6), collective(0, 1, 2, 2), phase(0, "checkpoint", 5, 1)),
        *(phase(0, "optimizer", 7, 1), collective(1, 1, 3, 1)),
    ]
    first, second = sum_up(events)
    assert first.computed_in == {"backward": 3.0, "checkpoint": 1.0, "optimizer": 1.0}
    assert first.phases == {"backward": 6.0, "checkpoint": 1.0, "optimizer": 1.0}
    assert second.computed_in == {}
    row = format_html("job", events, [first, second])
    assert re.findall(r'k-(\w+)" style="width: ([\d.]+)%', row) == [
        *(("late", "12.50"), ("comm", "12.50"), ("backward", "37.50")),
        *(("optimizer", "12.50"), ("other", "12.50")),
        *(("late", "0.00"), ("comm", "12.50")),
    ]


def test_a_phase_within_one_of_the_same_name_is_counted_once():
    events = [
        *(collective(rank, 0, 0, 0, group="all") for rank in range(2)),
        *(phase(0, "forward", 1, 4), phase(0, "forward", 2, 1), phase(0, "forward", 6, 2)),
    ]
    assert sum_up(events)[0].phases == {"forward": 6.0}


def test_the_page_is_self_contained_and_shows_texts_as_they_are():
    evil = collective(0, 3, 11, 1)
    evil["args"]["call"] = "</script><b>"
    page = format_html("a<b", [*LATE, evil], sum_up([*LATE, evil]))
    assert "<b>" not in page
    assert "a&lt;b" in page
    assert "others waited 3.00 s for it" in page
    assert not re.search(r"""(?:src|href)=|https?://|@import|url\(""", page)
    data = data_of(page)
    assert [(rank["rank"], rank["lanes"], rank["late"]) for rank in data["ranks"]] == [
        *((0, 2, False), (1, 1, True), (2, 1, False))
    ]
    assert "</script><b>" in [data["calls"][event[5]] for event in data["events"]]


def data_of(page):
    return json.loads(re.search(r"const data = (.*), ranks = data", page)[1])


def test_the_page_tells_a_wait_for_a_late_rank_from_communication():
    data = data_of(format_html("job", LATE, sum_up(LATE)))
    kinds = [kind[0] for kind in data["kinds"]]
    drawn = [(e[0], kinds[e[3]], e[1] / 1e6, e[2] / 1e6, e[7]) for e in data["events"]]
    assert sorted(drawn) == sorted(
        [
            *((0, "late", 1, 2.5, 1), (0, "comm", 3.5, 0.5, -1)),
            *((2, "data", 0, 3, -1), (2, "comm", 3.5, 0.5, -1)),
            *((3, "late", 1.5, 2, 1), (3, "comm", 3.5, 0.5, -1)),
            *((1, "aside", 5, 5, -1), (0, "comm", 9, 1, -1), (2, "comm", 5.5, 4.5, -1)),
            *((3, "late", 5, 0.5, 1), (3, "comm", 5.5, 4.5, -1)),
        ]
    )


def steps(late, name="", seconds=0.0):
    """20 steps of 1 s, in which one rank comes `late` seconds after the others."""
    for step in range(20):
        for rank in range(3):
            is_late = rank == 1
            if name:
                yield phase(rank, name, step, seconds * is_late)
            start = step + 0.5 + late * is_late
            yield collective(rank, step, start, step + 1 - start)


def test_a_full_disk_ends_the_timeline_and_not_the_training(capfd):
    recorder = FlightRecorder()
    writer = TimelineWriter(Path("/dev/full"), 1, recorder)
    recorder.on_phase(0, 1, 2)
    writer.close(is_alone=True)
    said = "instep: the timeline of rank 1 ends here: No space left on device\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize(
    ("path", "why"), [("nowhere/job.json", "No such file"), ("/dev/full", "No space left")]
)
def test_a_timeline_that_cannot_begin_is_an_error_that_names_it(tmp_path, monkeypatch, path, why):
    monkeypatch.setenv("INSTEP_TIMELINE", str(tmp_path / path))
    with pytest.raises(LaunchVariablesError, match=rf"{path} \(INSTEP_TIMELINE\): {why}"):
        create(0, 0)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (steps(0.4, "data", 0.4), "The phase data takes 40.0% of its time.*num_workers"),
        (steps(0.4, "checkpoint", 0.4), "The phase checkpoint .* only this rank does there"),
        (steps(0.4), "Its own code takes longer in every step"),
        (steps(0.0), "Every rank spends at least 51% in collectives, and none is late"),
        (
            [
                collective(r, s, s + 0.5 * (r == (s % 5 < 3)), 1 - 0.5 * (r == (s % 5 < 3)))
                for s in range(90)
                for r in range(2)
            ],
            "The ranks wait for one another in turn",
        ),
        (
            [
                collective(r, s, s + 0.9 * (s % 9 == r), 1 - 0.9 * (s % 9 == r))
                for s in range(90)
                for r in range(9)
            ],
            "The ranks wait for one another in turn.*unequal time",
        ),
        ([collective(r, s, s, 0.01) for s in range(9) for r in range(2)], "No rank is late"),
    ],
)
def test_the_summary_ends_with_the_cause_and_what_to_change(events, said):
    assert re.match(said, format_summary(sum_up(events))[-1])


SCRIPT = """\
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
for step in range(4):
    torch.nn.functional.mse_loss(model(torch.randn(12, 4)), torch.zeros(12, 2)).backward()
"""


@pytest.mark.launch
def test_every_rank_of_a_job_is_in_its_timeline(tmp_path):
    Path(tmp_path, "train.py").write_text(SCRIPT)
    Path(tmp_path, "job.json").write_text("of an earlier job")

    def instep(*words):
        return subprocess.run(
            [sys.executable, "-m", "instep", *words],
            env={**os.environ, "INSTEP_DIVIDE": "always", "CUDA_VISIBLE_DEVICES": ""},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )

    instep("run", "-n", "2", "--timeline", "job.json", "train.py")
    events = read_events(tmp_path / "job.json")
    sums = [event for event in events if "gradients" in event["name"]]
    assert [sum(event["pid"] == rank for event in sums) for rank in range(2)] == [4, 4]
    assert {event["args"]["call"].rpartition("/")[2] for event in sums} == {"train.py:4"}
    # One clock: whoever is in the same sum is in it at the same time.
    for sequence in {event["args"]["sequence"] for event in sums}:
        together = [e for e in sums if e["args"]["sequence"] == sequence]
        last_entered = max(event["ts"] for event in together)
        assert all(event["ts"] + event["dur"] >= last_entered for event in together)
    said = instep("timeline", "job.json").stdout
    assert said.splitlines()[-1] == "Drawn in job.html."
    data = data_of(Path(tmp_path, "job.html").read_text())
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
