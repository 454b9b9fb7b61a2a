"""Ranks that enter different collectives: both sides are named, with their ranks and lines."""

from __future__ import annotations

import itertools
import os

import pytest

import forked_jobs
from instep.distributed.conditions import advise_on_condition
from instep.distributed.errors import DisagreementError
from instep.distributed.watchdog.hub.deadlocks import format_waits
from instep.distributed.watchdog.mismatch import EnteredCollectives, are_steps

pytestmark = pytest.mark.slow


def step(sequence, text, group="0:0-2"):
    return [group, sequence, hash(text) & 0xFFFF, f"{text} at train.py:{len(text)}"]


def find_mismatch(steps):
    entered = EnteredCollectives()
    for rank, own in steps.items():
        entered.add(rank, own)
    return entered.find_mismatch()


def test_ranks_that_agree_do_not_disagree() -> None:
    same = [step(1, "barrier"), step(2, "all_reduce float32 [4]")]
    assert find_mismatch({0: same, 1: same, 2: same}) == {}
    assert find_mismatch({}) == {}


def test_the_first_difference_is_the_one_that_counts() -> None:
    later = range(3, 40)
    sides = find_mismatch(
        {
            0: [step(1, "barrier"), step(2, "all_reduce"), *(step(k, "barrier") for k in later)],
            1: [step(1, "barrier"), step(2, "broadcast"), *(step(k, "reduce") for k in later)],
            2: [step(1, "barrier"), step(2, "all_reduce")],
        }
    )
    assert sides == {"all_reduce at train.py:10": [0, 2], "broadcast at train.py:9": [1]}
    assert str(DisagreementError.of_collectives(sides)).startswith(
        "the ranks disagree about which collective comes next: all_reduce at train.py:10 on "
        "ranks 0, 2; broadcast at train.py:9 on rank 1. Every rank must"
    )


def test_one_call_at_several_lines_is_no_disagreement() -> None:
    lines = {rank: [["0", 1, 77, f"barrier at train.py:{rank}"]] for rank in range(3)}
    assert find_mismatch(lines) == {}


def test_lines_differ_even_within_one_side() -> None:
    steps = {0: [["0", 1, 7, "barrier at a:1"]], 1: [["0", 1, 7, "barrier at a:2"]]}
    sides = find_mismatch(steps | {2: [["0", 1, 8, "all_reduce at a:3"]]})
    assert sides == {"barrier at a:1": [0], "barrier at a:2": [1], "all_reduce at a:3": [2]}


def test_a_rank_that_is_behind_and_groups_of_other_ranks_are_left_out() -> None:
    steps = {
        0: [step(1, "barrier"), step(2, "all_reduce")],
        1: [step(1, "barrier")],
        2: [step(1, "broadcast", "1:2")],
    }
    assert find_mismatch(steps) == {}


def test_a_description_that_comes_later_has_the_line() -> None:
    steps = {
        0: [["0", 1, 5, "barrier"], ["0", 1, 5, "barrier at a:1"]],
        1: [["0", 1, 6, "b at a:2"]],
    }
    assert find_mismatch(steps) == {"barrier at a:1": [0], "b at a:2": [1]}


@pytest.mark.parametrize(
    "value", [None, "", [1], [["0", 1, 2]], [["0", True, 2, "x"]], [[0, 1, 2, "x"]], [[]]]
)
def test_what_is_no_list_of_steps_is_refused(value) -> None:
    assert not are_steps(value)


LOOP = """
for step, (x, y) in enumerate(loader):
    if step == 10:
        break
    out = model(x)
    loss = cost(out, y)
    {condition}
        {leave}
    loss.backward()
print(mean.compute())
"""
OWN_LOSS = ("if loss > 3:", "if torch.isnan(out).any():", "if (l := loss.item()) > 3:")


@pytest.mark.parametrize("condition", OWN_LOSS)
@pytest.mark.parametrize("leave", ["continue", "break"])
def test_a_condition_on_the_rank_s_own_loss_is_named(tmp_path, condition, leave) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(condition=condition, leave=leave))
    error = DisagreementError.of_collectives(
        {
            f"all_reduce at {script}:9": [0],
            f"all_gather at {script}:{5 + 5 * (leave == 'break')}": [1],
        }
    )
    assert f"`{condition[:-1]}` at {script}:7 decides" in str(error)
    assert 'instep.all_reduce(loss.detach(), "mean")' in str(error)


@pytest.mark.parametrize(
    ("condition", "leave"), [("if step % 7 == 3:", "continue"), ("if loss > 3:", "pass")]
)
def test_a_condition_that_parts_no_ranks_is_not_named(tmp_path, condition, leave) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(condition=condition, leave=leave))
    sides = {
        f"all_reduce at {script}:9": [0],
        f"all_gather at {script}:10": [1],
        "barrier at ?": [2],
    }
    assert str(DisagreementError.of_collectives(sides)).endswith("dtypes and roots.")


RAISES = "if loss > 9: raise ValueError"


@pytest.mark.parametrize(
    ("first", "named"),
    [
        (RAISES, "`if loss > 3` at {}:8 decides"),
        (f"try: pass\n    except OSError: pass\n    {RAISES}", "`if loss > 3` at {}:10"),
        (f"try:\n        {RAISES}\n    except OSError: pass", "`if loss > 9` at {}:8 decides"),
    ],
)
def test_a_condition_for_an_error_is_named_only_where_the_script_catches_it(
    tmp_path, first, named
) -> None:
    script = tmp_path / "train.py"
    condition = f"{first}\n    if loss > 3:"
    script.write_text(LOOP.format(condition=condition, leave="break"))
    ends = len(script.read_text().splitlines())
    advice = advise_on_condition(
        [f"all_reduce at {script}:{ends - 1}", f"all_gather at {script}:{ends}"]
    )
    assert named.format(script) in advice


IN_A_FUNCTION = """
def step(x, number):
    {inside}
    loss = cost(model(x))
    loss.backward()
    return loss
def train(loader):
    for number, x in enumerate(loader):
        loss = step(x, number)
        {outside}
    print(mean.compute())
train(loader)
"""
HAS_PART = "if x.sum() > 0: return"


@pytest.mark.parametrize(
    ("inside", "outside", "named"),
    [
        ("pass", "if loss < 1: break", "`if loss < 1` at {}:10 decides"),
        (r"print('\d')", "if loss < 1: break", "`if loss < 1` at {}:10 decides"),
        (HAS_PART, "pass", "`if x.sum() > 0` at {}:3 decides"),
        ("if number > 3: return", "if number > 5: break", None),
    ],
)
def test_a_condition_in_a_function_that_calls_or_is_called_is_named(
    tmp_path, inside, outside, named
) -> None:
    script = tmp_path / "train.py"
    script.write_text(IN_A_FUNCTION.format(inside=inside, outside=outside))
    advice = advise_on_condition([f"all_reduce at {script}:5", f"all_gather at {script}:11"])
    assert named.format(script) in advice if named else advice == ""


def test_a_condition_in_an_installed_package_is_not_named(tmp_path) -> None:
    script = tmp_path / "site-packages" / "train.py"
    script.parent.mkdir()
    script.write_text(IN_A_FUNCTION.format(inside="pass", outside="if loss < 1: break"))
    assert advise_on_condition([f"all_reduce at {script}:5"]) == ""


def test_a_function_that_no_loop_calls_decides_nothing_again(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def main(x):\n    if x > 3:\n        return\n    share(x)\nmain(read())\n")
    assert advise_on_condition([f"all_reduce at {script}:4"]) == ""


def test_ranks_that_wait_for_each_other_are_told_of_the_condition(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(IN_A_FUNCTION.format(inside="pass", outside="if loss < 1: break"))
    waits = {
        rank: {"call": "all_reduce", "line": f"{script}:{line}"}
        for rank, line in enumerate((11, 5))
    }
    assert f"`if loss < 1` at {script}:10 decides" in format_waits(waits)


@pytest.mark.parametrize("backend", ["auto", pytest.param("gloo", marks=pytest.mark.nightly)])
def test_a_rank_that_left_by_its_own_loss_is_explained_to_the_one_that_waits(
    tmp_path, backend
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, instep\n"
        "model = instep.replicate(torch.nn.Linear(1, 1, bias=False))\n"
        "data = torch.utils.data.TensorDataset(torch.tensor([[0.0], [1.0]]) / 8)\n"
        "for (x,) in instep.shard(torch.utils.data.DataLoader(data, batch_size=2)):\n"
        "    loss = (model(x) - x).pow(2).mean()\n"
        "    if loss == 0:\n"
        "        break\n"
        "    loss.backward()\n"
    )
    environ = os.environ | {"INSTEP_BACKEND": backend}
    finished = forked_jobs.run("run", "-n", "2", script, env=environ)
    assert finished.returncode == 1
    assert f"`if loss == 0` at {script}:6 decides whether a rank comes there" in finished.stderr


@pytest.mark.parametrize(
    ("one", "said"),
    [
        ("pass", "rank 0 waits in new_group at {}:6 for rank 1, which has ended."),
        pytest.param(
            "dist.barrier()",
            "  rank 0 waits in new_group at {0}:6\n  rank 1 waits in barrier at {0}:4",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_rank_that_makes_no_group_with_the_others_is_named(tmp_path, one, said) -> None:
    """The others waited for half an hour, and nothing was printed."""
    script = tmp_path / "train.py"
    script.write_text(
        "import instep, torch.distributed as dist\n"
        "instep.init()\n"
        "if instep.rank == 1:\n"
        f"    {one}\n"
        "else:\n"
        "    dist.new_group()\n"
    )
    finished = forked_jobs.run("run", "--plain", "-n", "2", script)
    assert finished.returncode == 1
    assert said.format(script) in finished.stderr


SCRIPT = """
import sys, torch, torch.distributed as dist, instep
dist.init_process_group("gloo") if "its own group" in sys.argv else instep.init()
rank, values = dist.get_rank(), torch.ones(4)
dist.barrier()
if rank != 1:
    {others}
else:
    {one}
dist.barrier()
"""
REDUCE = "dist.all_reduce(values)"
DOUBLE = "dist.all_reduce(values.double())"
FAULTS = {
    "shape": (REDUCE, "dist.all_reduce(torch.ones(5))", "all_reduce", "float32 [4]", "float32 [5]"),
    "dtype": (REDUCE, DOUBLE, "all_reduce", "float32 [4]", "float64 [4]"),
    "op": (REDUCE, "dist.broadcast(values, 0)", "all_reduce", "float32 [4] at", "broadcast"),
    "root": ("dist.broadcast(values, 0)", "dist.broadcast(values, 1)", "broadcast", "0 ", "1 "),
    "one too many": (
        REDUCE, f"{REDUCE}; {REDUCE}", "all_reduce", "barrier at", "all_reduce"
    ),
    "barrier": (
        "instep.barrier()", "instep.all_reduce(torch.ones(()))", "barrier at", "all_reduce"
    ),
    "scatter": (
        "dist.scatter(values, None, 1)", REDUCE, "scatter", "all_reduce"
    ),
    "instep": (
        "values = instep.all_reduce(values)", "values = instep.all_reduce(torch.ones(3))",
        "all_reduce", "float32 [4]", "float32 [3]",
    ),
}  # fmt: skip
"""What the other ranks call, what rank 1 calls, and words of the message about both sides."""


BY_DAY = (("instep", "shm"), ("root", "gloo"))


@pytest.mark.parametrize(
    ("fault", "backend"),
    [
        pytest.param(*case, marks=[] if case in BY_DAY else [pytest.mark.nightly])
        for case in itertools.product(FAULTS, ["shm", "gloo", "its own group"])
    ],
)
def test_both_sides_are_named_with_ranks_and_lines(tmp_path, fault, backend) -> None:
    others, one, *words = FAULTS[fault]
    ranks = "2" if (fault, backend) in BY_DAY else "3"
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(others=others, one=one))
    variables = {"INSTEP_BACKEND": "shm" if backend == "shm" else "gloo", "INSTEP_TIMEOUT": "60"}
    finished = forked_jobs.run("run", "-n", ranks, script, backend, env=os.environ | variables)
    assert finished.returncode != 0
    assert "the ranks disagree about" in finished.stderr
    message = next(
        line for line in finished.stderr.splitlines() if "the ranks disagree about" in line
    )
    sides = message.partition(": ")[2] if ": the ranks" not in message else message
    mine = next(side for side in sides.split("; ") if "on rank 1" in side)
    theirs = next(side for side in sides.split("; ") if "on rank 1" not in side)
    line = 10 if fault == "one too many" else 7
    assert f"{script}:9 " in mine
    assert f"{script}:{line} " in theirs
    assert all(word in message for word in words)
    if fault == "scatter" and backend == "shm":  # PyTorch's own record has neither shape nor root
        assert "scatter float32 [4] from rank 1 at" in theirs


HOOKED = """\
import torch
import instep
model = instep.replicate(torch.nn.Linear(4, 1))
if instep.rank == 0:
    model.weight.{}({})
for x in instep.shard(torch.utils.data.DataLoader(torch.ones(4, 4), 4)):
    model(x).mean().backward()
"""


@pytest.mark.parametrize(
    ("kind", "hook", "named"),
    [
        ("register_hook", "lambda each: None", "at train.py:5"),
        ("register_post_accumulate_grad_hook", "lambda each: None", "at train.py:5"),
        ("register_hook", "torch.nan_to_num", "nan_to_num"),
    ],
)
def test_a_hook_on_one_rank_is_named_with_its_line(tmp_path, kind, hook, named) -> None:
    script = tmp_path / "train.py"
    script.write_text(HOOKED.format(kind, hook))
    finished = forked_jobs.run("run", "-n", "2", script)
    assert finished.returncode != 0
    assert f"all_reduce (gradient for the hook {named}) SUM float32" in finished.stderr
    assert "all_reduce (gradients, bucket 1) SUM" in finished.stderr
