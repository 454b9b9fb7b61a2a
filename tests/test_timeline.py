"""`instep run --timeline` and `instep timeline`: where the time of each rank went."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from instep.distributed.flight_record.recorder import FlightRecorder
from instep.distributed.flight_record.timeline_file import TimelineWriter, path_of_node
from instep.errors import CommandLineError
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
    assert (first.span, first.waited, first.hidden, first.computed) == (10, 4, 4, 6)
    assert (second.last, second.made_wait, second.phases) == (2, 3.0, {"data": 3.0})
    assert third.made_wait == 0
    lines = format_summary(sum_up(LATE))
    assert lines[-1].startswith("Rank 1 is the straggler: others waited 3.00 s for it (30.0% of")
    assert "the longest wait was 2.50 s, in all_reduce number 1)" in lines[-1]
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
    with pytest.raises(CommandLineError, match=r"cannot read|no timeline"):
        read_events(path)


def test_a_recorder_writes_collectives_and_phases_that_have_ended(tmp_path):
    recorder = FlightRecorder()
    path = tmp_path / "job.json"
    path.write_text("[\n")
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


def test_the_page_is_self_contained_and_shows_texts_as_they_are():
    evil = collective(0, 3, 11, 1)
    evil["args"]["call"] = "</script><b>"
    page = format_html("a<b", [*LATE, evil], ["1 < 2"])
    assert "<b>" not in page
    assert "1 &lt; 2" in page
    assert not re.search(r"""(?:src|href)=|https?://|@import|url\(""", page)
    data = json.loads(re.search(r"const data = (.*), rows = data", page)[1])
    assert data["rows"] == ["rank 0", "rank 1 phases", "rank 1", "rank 2"]
    assert len(data["events"]) == len(LATE) + 1
    assert data["calls"][data["events"][-1][4]] == "</script><b>"


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

    instep("run", "-n", "3", "--timeline", "job.json", "train.py")
    events = read_events(tmp_path / "job.json")
    sums = [event for event in events if "gradients" in event["name"]]
    assert [sum(event["pid"] == rank for event in sums) for rank in range(3)] == [4, 4, 4]
    assert {event["args"]["call"].rpartition("/")[2] for event in sums} == {"train.py:4"}
    # One clock: whoever is in the same sum is in it at the same time.
    for sequence in {event["args"]["sequence"] for event in sums}:
        together = [e for e in sums if e["args"]["sequence"] == sequence]
        last_entered = max(event["ts"] for event in together)
        assert all(event["ts"] + event["dur"] >= last_entered for event in together)
    said = instep("timeline", "job.json").stdout
    assert said.splitlines()[-1] == "Drawn in job.html."
    assert "rank 2" in Path(tmp_path, "job.html").read_text()
