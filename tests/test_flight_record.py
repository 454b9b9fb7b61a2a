"""The flight record: its format, its ring, and a reader in another process."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from functools import partial

import pytest
import torch

import forked_jobs
from instep.distributed.flight_record import record_format
from instep.distributed.flight_record.recorder import FlightRecorder
from instep.distributed.watchdog.mismatch import recorded_steps
from instep.process import isolated_command
from instep.process.failures.last_position import format_position, read_whole, write_later_position


@pytest.fixture
def recorder():
    return FlightRecorder()


def test_an_entry_holds_what_the_rank_entered(recorder) -> None:
    fd = recorder.file_descriptor()
    recorder.set_step(2, 17)
    with recorder.phase("backward"):
        number = recorder.enter("broadcast", torch.Size([4, 3]), torch.float32, "0:0-2", 1)
    (entry,) = record_format.read(fd).entries
    assert (entry.number, entry.sequence, entry.group, entry.root) == (number, 1, "0:0-2", 1)
    assert (entry.op, entry.shape, entry.dtype) == ("broadcast", (4, 3), "float32")
    assert (entry.epoch, entry.step, entry.phase) == (2, 17, "backward")
    assert entry.describe() == f"broadcast float32 [4, 3] from rank 1 at {entry.line}"
    line = test_an_entry_holds_what_the_rank_entered.__code__.co_firstlineno + 4
    assert entry.line == f"{__file__}:{line}"
    assert entry.left is None
    recorder.leave(number)
    (entry,) = record_format.read(fd).entries
    assert entry.left is not None
    assert entry.left >= entry.entered


def test_messages_name_the_peer_and_are_compared_with_nothing(recorder) -> None:
    fd, pair = recorder.file_descriptor(), record_format.message_group(2, 0)
    recorder.leave(recorder.enter("send", (4,), torch.float32, pair, 0))
    recorder.enter("recv", (4,), torch.float32, pair, 0)
    sent, received = record_format.read(fd).entries
    assert sent.describe() == f"send float32 [4] to rank 0 at {sent.line}"
    assert received.describe() == f"recv float32 [4] from rank 0 at {received.line}"
    assert group_members(sent.group) == [0, 2]
    assert recorded_steps(record_format.read(fd)) == []


def test_a_path_that_is_no_utf8_is_written_as_tracebacks_write_it(recorder, tmp_path) -> None:
    script = compile(
        "recorder.enter('barrier', None, None, '')", os.fsdecode(b"/\xc1/a.py"), "exec"
    )
    exec(script, {"recorder": recorder})
    [entry] = record_format.read(recorder.file_descriptor()).entries
    assert entry.line == r"/\udcc1/a.py:1"


def test_an_entry_names_the_line_of_the_script_through_any_number_of_library_frames(
    recorder,
) -> None:
    library = compile(
        "def call(frames, function):\n"
        "    return call(frames - 1, function) if frames else function()",
        torch.__file__,
        "exec",
    )
    script = compile(
        "def train(frames):\n"
        "    call(frames, enter)\n"
        "def evaluate(frames):\n"
        "    call(frames, enter); call(frames + 1, enter)\n"
        "def alone():\n"
        "    enter()\n"
        "def descend(depth, frames):\n"
        "    if depth: return descend(depth - 1, frames)\n"
        "    call(frames, enter)\n"
        "def through():\n"
        "    call(1, enter); helper()\n"
        "def helper():\n"
        "    call(0, enter)",
        "/home/me/train.py",
        "exec",
    )
    space = {"enter": partial(recorder.enter, "all_reduce", (4,), torch.float32, "", root=None)}
    exec(library, space)
    exec(script, space)
    lines = []
    for frames in (0, 20, 3, 3, 20, 0, *range(12), 5):
        space["train"](frames)
        space["evaluate"](frames)
        lines += [2, 4, 4]
    for depth, frames in ((0, 3), (0, 0), (5, 0)):  # the function is where it was and nearer
        space["descend"](depth, frames)
        lines.append(9)
    space["enter"].keywords["root"] = 0  # where no frame is known yet
    space["through"]()
    lines += [11, 13]  # a helper of the script's stands where a library's function did
    in_thread = threading.Thread(target=space["alone"])  # with a short stack
    in_thread.start()
    in_thread.join()
    entries = record_format.read(recorder.file_descriptor()).entries
    assert [entry.line for entry in entries] == [f"/home/me/train.py:{n}" for n in (*lines, 6)]


def test_the_last_collective_is_a_position_of_the_rank(recorder, tmp_path) -> None:
    fd = recorder.file_descriptor()
    assert record_format.read_position(fd) is None
    before = time.monotonic()
    recorder.enter("barrier", None, None, "0:0-2")
    seen, line = record_format.read_position(fd)
    assert before <= seen <= time.monotonic()
    assert line == record_format.read(fd).entries[0].line
    with open(tmp_path / "seen", "w+b") as file:
        for at, place, kept in ((5.0, "a", "a"), (4.0, "b", "a"), (seen, line, line)):
            write_later_position(file.fileno(), at, place)
            assert format_position(read_whole(file.fileno()), at).startswith(
                f"It was last seen at {kept}, "
            )
    others = threading.Thread(target=recorder.enter, args=("barrier", None, None, "0:0-2"))
    others.start()
    others.join()
    assert "/threading.py:" in record_format.read(fd).entries[1].line
    assert record_format.read_position(fd) is None


def test_the_end_of_the_script_has_the_last_collective_before_it(recorder) -> None:
    assert recorder.end_of_script() == "the end of the script"
    recorder.enter("barrier", None, None, "0:0-2")
    with recorder.phase("exit"):
        recorder.enter("all_reduce", (1,), torch.int64, "0:0-2")
    line = recorder.end_of_script().partition(" at ")[2]
    assert recorder.end_of_script() == f"the end of the script, after barrier at {line}"
    assert line.startswith(f"{__file__}:")


def test_what_was_entered_before_the_descriptor_was_asked_for_is_kept(recorder) -> None:
    number = recorder.enter("barrier", None, None, "0:0-2")
    fd = recorder.file_descriptor()
    recorder.leave(number)
    record = record_format.read(fd)
    assert [(e.op, e.shape, e.dtype) for e in record.entries] == [("barrier", None, "")]
    assert record.open_entries() == ()
    assert record.last_left is not None


def test_the_ring_keeps_the_last_entries_and_a_late_leave_changes_no_other(recorder) -> None:
    fd = recorder.file_descriptor()
    first = recorder.enter("all_reduce", (1,), torch.int64, "0:0-2")
    for _ in range(record_format.SLOTS + 5):
        recorder.leave(recorder.enter("all_reduce", (1,), torch.int64, "0:0-2"))
    recorder.leave(first)
    last = recorder.enter("all_reduce", (1,), torch.int64, "0:0-2")
    record = record_format.read(fd)
    assert record.count == last
    assert [e.number for e in record.entries] == [*range(last - record_format.SLOTS + 1, last + 1)]
    assert [e.number for e in record.open_entries()] == [last]


def test_each_group_counts_its_own_collectives(recorder) -> None:
    fd = recorder.file_descriptor()
    for group in ("0:0-2", "1:0,2", "0:0-2"):
        recorder.enter("barrier", None, None, group)
    assert [e.sequence for e in record_format.read(fd).entries] == [1, 1, 2]


def test_phases_nest_and_belong_to_the_main_thread(recorder) -> None:
    fd = recorder.file_descriptor()
    seen = []
    with recorder.phase("evaluation"):
        with recorder.phase("data"):
            seen.append(record_format.read(fd).phase)

        def load() -> None:
            with recorder.phase("checkpoint"):
                seen.append(record_format.read(fd).phase)

        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    seen.append(record_format.read(fd).phase)
    assert seen == ["data", "evaluation", ""]


def test_equal_signatures_have_equal_tags_and_different_ones_do_not(recorder) -> None:
    fd = recorder.file_descriptor()
    signatures = [
        ("all_reduce", (4,), torch.float32, None, "SUM"),
        ("all_reduce", (4,), torch.float32, None, "MAX"),
        ("all_reduce", (4,), torch.float64, None, "SUM"),
        ("all_reduce", (5,), torch.float32, None, "SUM"),
        ("reduce", (4,), torch.float32, 0, "SUM"),
        ("reduce", (4,), torch.float32, 1, "SUM"),
    ]
    for op, shape, dtype, root, reduction in signatures * 2:
        recorder.enter(op, shape, dtype, "0:0-2", root, reduction)
    tags = [e.tag for e in record_format.read(fd).entries]
    assert tags[:6] == tags[6:]
    assert len({*tags}) == 6


def test_shapes_with_as_many_elements_agree_as_they_do_in_torch(recorder) -> None:
    fd = recorder.file_descriptor()
    recorder.enter("all_reduce", (4, 3), torch.float32, "0:0-2")
    recorder.enter("all_reduce", (12,), torch.float32, "0:0-2")
    first, second = record_format.read(fd).entries
    assert first.tag == second.tag


def test_the_detail_names_a_collective_and_does_not_change_its_tag(recorder) -> None:
    fd = recorder.file_descriptor()
    recorder.enter("all_reduce", (4,), torch.float32, "0:0-2")
    recorder.detail = "gradients, bucket 2"
    recorder.enter("all_reduce", (4,), torch.float32, "0:0-2")
    first, second = record_format.read(fd).entries
    assert second.op == "all_reduce (gradients, bucket 2)"
    assert first.tag == second.tag


@pytest.mark.parametrize("letter", ["x", "训"])
def test_of_a_detail_that_is_too_long_the_operation_and_the_line_are_kept(recorder, letter) -> None:
    fd = recorder.file_descriptor()
    recorder.detail = f"gradient for the hook at {letter * 60}.py:1234"
    recorder.enter("all_reduce", (4,), torch.float32, "0:0-2")
    (entry,) = record_format.read(fd).entries
    assert entry.op.startswith("all_reduce (gradient for the hook at")
    assert entry.op.endswith(f"{letter}.py:1234)")
    assert (entry.shape, entry.group) == ((4,), "0:0-2")


def test_the_collective_that_runs_is_the_oldest_open_one_of_its_group(recorder) -> None:
    other = recorder.add_group("1", [0, 1])
    group = recorder.add_group("0", [0, 1, 2])
    recorder.enter("barrier", None, None, other)
    first = recorder.enter("all_reduce", (2,), torch.float32, group, reduction="SUM")
    recorder.enter("broadcast", (2,), torch.float32, group, 0)
    assert recorder.describe(group).startswith("all_reduce SUM float32 [2] at ")
    recorder.leave(first)
    assert recorder.describe(group).startswith("broadcast float32 [2] from rank 0 at ")


def test_a_new_group_counts_from_the_beginning(recorder) -> None:
    fd = recorder.file_descriptor()
    for _ in range(2):
        group = recorder.add_group("0", [0, 1, 2])
        recorder.enter("barrier", None, None, group)
    assert [e.sequence for e in record_format.read(fd).entries] == [1, 1]


def test_texts_that_are_too_long_are_cut_and_the_rest_stays(recorder) -> None:
    fd = recorder.file_descriptor()
    group = record_format.group_text("g" * 99, range(0, 4000, 2))
    recorder.enter("all_reduce" * 20, (10**9,) * 20, torch.float32, group, 3)
    (entry,) = record_format.read(fd).entries
    assert (entry.shape, entry.dtype, entry.root) == (None, "float32", 3)
    assert group_members(entry.group) == []


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2], [1, 3], [0, 1, 4, 5, 6, 9]])
def test_members_can_be_read_from_the_text_of_a_group(ranks) -> None:
    assert group_members(record_format.group_text("x:1", ranks)) == ranks


def test_a_forked_child_leaves_the_record_of_its_parent_alone(recorder) -> None:
    fd = recorder.file_descriptor()
    recorder.enter("barrier", None, None, "0:0-2")
    pid = os.fork()
    if pid == 0:
        recorder.reset_after_fork()
        recorder.enter("all_reduce", (1,), torch.int64, "0:0-2")
        os._exit(0)
    os.waitpid(pid, 0)
    assert [e.op for e in record_format.read(fd).entries] == ["barrier"]


def test_another_process_reads_whole_entries_while_the_rank_writes(recorder, tmp_path) -> None:
    """Shape and root of an entry are its number, so a torn one would show."""
    fd = recorder.file_descriptor()
    program = (
        "import sys\n"
        "from instep.distributed.flight_record.record_format import read\n"
        "def main(fd):\n"
        "    record = read(int(fd))\n"
        "    print('ready', flush=True)\n"
        "    seen = 0\n"
        "    while record.count < 20000:\n"
        "        record = read(int(fd))\n"
        "        for e in record.entries:\n"
        "            assert e.shape == (e.number,) and e.root == e.number % 97, e\n"
        "            seen += 1\n"
        "    assert 'torch' not in sys.modules\n"
        "    print(seen)\n"
    )
    command = isolated_command("reader", str(fd))
    (tmp_path / "reader.py").write_text(program)
    command[command.index("-c") + 1] = (
        f"import sys; sys.path.append({str(tmp_path)!r}); " + command[command.index("-c") + 1]
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=(fd,)) as reader:
        assert reader.stdout.readline() == "ready\n"
        for number in range(1, 20001):
            recorder.enter("all_reduce", (number,), torch.float32, "0:0-2", number % 97)
        seen = int(reader.stdout.read())
    assert reader.returncode == 0
    assert seen > 0


LOOP = """
import os, torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
import instep
from instep.distributed.flight_record import record_format, recorder

phases = []
fd = recorder.file_descriptor()
see = lambda *_: phases.append(record_format.read(fd).phase)
instep.init()
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, x):
        see()
        return self.layer(x)
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index in (0, 4):
            see()
        return torch.ones(4) * index
model = instep.replicate(Net())
loader = instep.shard(DataLoader(Data(), batch_size=4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    for batch in loader:
        loss = model(batch).sum()
        loss.register_hook(see)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
with torch.no_grad():
    model(torch.ones(2, 4))
with instep.single_process_scope() as here:
    see()
    if here:
        here.value = 1
record = record_format.read(fd)
words = [instep.rank, *phases, "|", record.epoch, record.step, record.phase or "none", "|",
         *sorted({e.op for e in record.entries if "gradients" in e.op})]
print(*words)
"""


@pytest.mark.launch
def test_the_record_follows_a_training(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP)
    finished = forked_jobs.run("run", "-n", "2", script)
    assert finished.returncode == 0, finished.stderr
    (first,) = (line for line in finished.stdout.splitlines() if line.startswith("0 "))
    phases, where, ops = first.removeprefix("0 ").split(" | ")
    assert phases.split() == [
        *["data", "forward", "backward"] * 4,
        *("evaluation", "single_process_scope"),
    ]
    assert where == "1 4 none"
    assert ops == "all_reduce (gradients, bucket 1)"


def group_members(text):
    """The members of a group by its text; none where they were too many to be recorded."""
    members = []
    for run in text.rpartition(":")[2].split(","):
        first, _, last = run.partition("-")
        if not first.isdigit() or not (last.isdigit() or not last):
            return []
        members += range(int(first), int(last or first) + 1)
    return members
