"""`--bitwise`: the same bits at any number of ranks, and what `verify --bitwise` says if not."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

import forked_jobs
import instep as instep_package
from forked import Forked
from instep import InstepError, cli
from instep.distributed.communication.local_transport import LocalTransport
from instep.distributed.communication.transport import get_transport
from instep.launch.worker.static_opt_out import find_opt_out
from instep.process.patching import PatchHandle
from instep.training.errors import BitwiseError
from instep.unedited import one_process_api
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call.run.grad_sums import CallGradients, alias_parameters
from instep.unedited.sharded_call.run.mappings import scatter_to_region
from instep.unedited.sharded_call.shards.large_weights import (
    LayerCall,
    outputs_of_shards,
    rows_of,
)
from instep.unedited.sharded_call.shards.local_sums import alias_for_shards
from instep.unedited.sharded_call.shards.shard_group import ShardGroup, sparse_tree_sum
from instep.unedited.sharded_call.shards.shard_threads import BranchError, ShardThreads
from instep.unedited.sharded_call.shards.weighted_layers import Convolution, Linear
from instep.verify.bit_comparison import report_bits, verify_bits
from pool import ranks, run, talking_over

SCRIPT = str(Path(__file__).parent / "bitwise_scripts" / "trainings.py")
SHARDS = 4
BY_DAY = ("two lines",)
AT_NIGHT = (
    *("cnn", "large", "attention", "adversarial"),
    *("recurrent", "loss inside", "experts", "checkpointed", "accumulation", "bfloat16"),
    *("sparse", "in a list", "few rows"),
)


def report(*command: str, sizes: tuple[int, ...] = (1, 2, 4), **variables: str) -> list[str]:
    start = Forked({"INSTEP_BITWISE": str(SHARDS), "OMP_NUM_THREADS": "1", **variables})
    runs = verify_bits([SCRIPT, *command], sizes, SHARDS, start=start)
    assert all(run.steps == (run_steps := runs[0].steps) and run_steps >= 5 for run in runs)
    for one_run in runs:
        optimizers = 2 if "sparse" in command else 1  # that step after the same calls
        _check_division(one_run, divided="few rows" not in command, optimizers=optimizers)
    return list(report_bits(runs, SHARDS))


def _check_division(run, divided: bool, optimizers: int) -> None:
    """Each rank computed its shards in every step: bits are also the same where all compute all."""
    each = SHARDS // len(run.ranks)
    for r, rank in enumerate(run.ranks):
        own = set(range(r * each, (r + 1) * each)) if divided else set()
        seen = [set(step.of_shards) for step in rank.steps]
        for start in range(0, len(seen), optimizers):
            assert set().union(*seen[start : start + optimizers]) == own


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "name", [*BY_DAY, *(pytest.param(name, marks=pytest.mark.nightly) for name in AT_NIGHT)]
)
def test_a_training_has_the_same_bits_on_any_number_of_ranks(name) -> None:
    sizes = (1, 4) if name == "large" else (1, 2, 4)
    listed = ", ".join(map(str, sizes))
    expected = [f"IDENTICAL on {listed} ranks, step by step, with every batch in 4 shards."]
    if name == "few rows":
        expected.append(
            "No call of a module was divided: every rank computed everything. `instep run -n 2 "
            "--bitwise 4` of the script says why."
        )
    assert report(name, sizes=sizes)[2 + len(sizes) :] == expected


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_and_over_gloo() -> None:
    *_, verdict = report("cnn", INSTEP_BACKEND="gloo")
    assert verdict.startswith("IDENTICAL")


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "fault", "n", "said"),
    [
        ("cnn", "another kernel", 2, "the output of Sequential.0 for shard 1 of 4"),
        *(
            pytest.param(*row, marks=pytest.mark.nightly)
            for row in (
                ("long sum", "threads", 2, "the output of LongSum"),
                ("attention", "sequential sums", 2, "the gradient of encoder.layers.0"),
                ("attention", "a ring", 4, "the gradient of encoder.layers.0"),
            )
        ),
    ],
)
def test_the_first_value_with_other_bits_is_named(name, fault, n, said) -> None:
    *_, verdict = report(name, fault, sizes=(1, n))
    assert verdict.startswith(f"DIFFERENT: on {n} ranks {said}")
    assert verdict.endswith(" has other bits than on 1 rank, first in step 1.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "-n", "3", "--bitwise", "8"), "--bitwise 8 runs on 1, 2, 4 or 8 ranks, not on 3."),
        (("run", "-n", "1", "--bitwise", "6"), "--bitwise takes a power of two (8, say), not 6"),
        (("run", "-n", "2", "--bitwise", "2", "--plain"), "--plain does not: drop one."),
        (("verify", "-n", "1,2", "--bitwise", "1"), "--bitwise 1 runs on 1 ranks, not on 2."),
        (
            ("verify", "-n", "1", "--bitwise", "2", "--json", "x"),
            "--bitwise prints its report; leave --json and --plot out.",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path, arguments, said, capsys) -> None:
    (tmp_path / "train.py").touch()
    assert cli.main([*arguments, str(tmp_path / "train.py")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.launch
def test_a_script_with_the_two_lines_runs_and_is_not_checked_for_several_processes(
    tmp_path,
) -> None:
    text = "import instep\nif instep.is_main_process:\n    instep.barrier()\n    print('one')"
    done = instep(tmp_path, text, "run", "-n", "2", "--bitwise", "2")
    assert (done.returncode, done.stdout) == (0, "one\n")
    assert "instep check" not in done.stderr


@pytest.mark.launch
def test_a_script_that_divides_its_work_itself_is_refused(tmp_path) -> None:
    done = instep(tmp_path, "import horovod.torch", "run", "-n", "1", "--bitwise", "2")
    assert done.returncode != 0
    assert "divides scripts that are one process" in done.stderr
    assert "train.py uses horovod itself" in done.stderr


@pytest.mark.parametrize("other", ["import instep.jittor as jt", "from instep import jittor"])
def test_only_names_of_its_own_are_those_of_one_process(tmp_path, other, monkeypatch) -> None:
    monkeypatch.setenv("INSTEP_BITWISE", "2")
    script = tmp_path / "train.py"
    for text, opts_out in (("import instep\nfrom instep import shard", False), (other, True)):
        script.write_text(text)
        assert (find_opt_out([str(script)]) is not None) is opts_out


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: one_process_api.replicate(nn.Linear(2, 2), dropout="rank"), "leave batch_stat"),
        (lambda: one_process_api.replicate(nn.Linear(2, 2), bitwise=8), "with --bitwise 4"),
        (lambda: one_process_api.shard([], bitwise=2), "with --bitwise 4"),
        (lambda: instep_package.Checkpoint("here"), "instep run --checkpoint FOLDER"),
        (lambda: instep_package.group([0]), "without instep.group"),
    ],
)
def test_what_instep_cannot_be_for_one_process_is_refused(call, said, monkeypatch) -> None:
    monkeypatch.setenv("INSTEP_BITWISE", "4")
    with (
        PatchHandle(one_process_api.ONE_PROCESS_PATCHES),
        pytest.raises(InstepError, match=re.escape(said)),
    ):
        call()


@pytest.mark.parametrize("call", [instep_package.replicate, instep_package.shard])
def test_who_asks_for_shards_gets_them_or_an_error(call, monkeypatch) -> None:
    with pytest.raises(BitwiseError, match="instep run --bitwise 8 "):
        call(nn.Linear(2, 2), bitwise=8)
    monkeypatch.setenv("INSTEP_BITWISE", "2")
    with pytest.raises(BitwiseError, match="instep run --bitwise 2 "):
        call(nn.Linear(2, 2))


def instep(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    return forked_jobs.run(*arguments, "train.py", cwd=folder)


# ------------------------------------------------------------------------------ sums of shards


def sums(dtype: torch.dtype) -> list[list[float]]:
    generator = torch.Generator().manual_seed(0)
    terms = [[torch.randn(5, generator=generator).to(dtype)] * 2 for _ in range(8)]
    group = ShardGroup(get_transport(), 8, True)
    own = [terms[shard] for shard in group.own]
    found = [*group.sum_each(own), group.sum([each[0].clone() for each in own])]
    gathered = group.all_gather([each[0] for each in own])
    assert all(torch.equal(part, term[0]) for part, term in zip(gathered, terms, strict=True))
    return [total.double().tolist() for total in found]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "gloo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_of_shards_does_not_depend_on_the_number_of_ranks(backend, dtype) -> None:
    with talking_over(backend):
        one, *others = (run(n, sums, dtype) for n in (1, 2, 4))
    assert all(rank == one[0] for many in others for rank in many)


def layouts_of_shards() -> list[object]:
    group = ShardGroup(get_transport(), 4, True)
    images = torch.zeros(8, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    wholes = [torch.zeros(8, 3), torch.zeros(3, 8).t(), images]
    wholes += [whole.clone().requires_grad_() for whole in wholes]
    layouts = []
    for whole in wholes:
        for part in scatter_to_region(whole, group.blocks(8), 0, group):
            layouts.append((part.stride(), part.data_ptr() % 64))
    return layouts


def test_strides_and_alignment_of_shards_do_not_depend_on_the_number_of_ranks() -> None:
    """Kernels are chosen by them, and each has its own rounding."""
    one, two, four = (run(n, layouts_of_shards) for n in (1, 2, 4))
    assert {*two[0], *two[1]} == {*chain(*four)} == {*one[0]}


def sparse_sums() -> list[object]:
    generator = torch.Generator().manual_seed(0)
    terms = [
        torch.randn(6, 3, generator=generator).to_sparse(1)
        + torch.randn(6, 3, generator=generator).mul(torch.arange(6)[:, None] > k).to_sparse(1)
        for k in range(7)
    ]
    group = ShardGroup(get_transport(), 8, True)
    own = [None if shard == 2 else terms[shard - (shard > 2)] for shard in group.own]
    found = group.sum_sparse_over_ranks(sparse_tree_sum(own), torch.device("cpu"))
    assert found is not None
    return [found.is_coalesced(), found.indices().tolist(), found.values().tolist()]


@pytest.mark.slow
def test_nor_does_a_sum_of_sparse_shards() -> None:
    one, *others = (run(n, sparse_sums) for n in (1, 2, 4))
    assert all(rank == one[0] for many in others for rank in many)


def test_what_some_shards_have_no_gradient_of_is_zero_there() -> None:
    used, unused = (torch.randn(3, requires_grad=True) for _ in range(2))
    aliases = alias_for_shards([used, unused], 4, 2**64 - 1)
    grads = {k: torch.tensor([-0.0, value, 3]) for k, value in ((0, 1e-8), (2, 0.1), (3, 0.7))}
    sum((aliases[k][0] * grad).sum() for k, grad in grads.items()).backward()
    assert unused.grad is None
    expected = (grads[0] + torch.zeros(3)) + (grads[2] + grads[3])
    assert used.grad is not None
    assert used.grad.view(torch.int32).equal(expected.view(torch.int32))


def test_gradients_are_added_up_before_backward_goes_on() -> None:
    """Else all shards' gradients of all parameters are in memory at its end."""
    first, last = (torch.randn(2**18, requires_grad=True) for _ in range(2))
    aliases = alias_for_shards([first, last], 2, 2**64 - 1)
    is_summed = []

    def forward(shard: int) -> torch.Tensor:
        hidden = aliases[shard][0] * 2
        hidden.register_hook(lambda grad: is_summed.append(last.grad is not None))
        return hidden * aliases[shard][1]

    threads = ShardThreads(2, lambda number: None)
    sum(threads.run([lambda k=k: forward(k).sum() for k in range(2)])).backward()
    assert is_summed == [True, True]


LAYERS = {
    "linear": (Linear(), nn.functional.linear, (512, 640), (640,)),
    "convolution": (
        Convolution(stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        partial(nn.functional.conv2d, stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        *((256, 80, 3, 3), (80, 3, 5)),
    ),
}
"""The layer, the function that it is, and the shapes of a weight and of a row of inputs."""


def shards_of_large_layer(sizes=(3, 1, 2, 4), kind="linear"):
    """The sharded call of a layer with a large weight: its parameters, and what the layer returns
    for rows of each of four shards."""
    group = ShardGroup(LocalTransport(), 4, is_virtual=True)
    layer, function, weight_shape, row_shape = LAYERS[kind]
    original = getattr(function, "func", function)
    parameters = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in (weight_shape, weight_shape[:1])
    ]
    aliases = alias_parameters(parameters, CallGradients(), group)
    rows = torch.randn(sum(sizes), *row_shape, dtype=torch.float64, requires_grad=True)

    def outputs(shards):
        parts = rows.split(sizes)
        calls = [LayerCall(original, layer, parts[k], *aliases[k]) for k in shards]
        assert all(call.is_collected(rows_of(call.weight)) for call in calls)
        return outputs_of_shards(calls)

    return parameters, rows, outputs


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("sizes", [(3, 1, 2, 4), (2, 2, 2, 2)])
def test_the_gradients_of_a_large_weight_are_those_of_all_rows(kind, sizes) -> None:
    parameters, rows, layer = shards_of_large_layer(sizes, kind)
    once_more = slice(sizes[0], sizes[0] + sizes[1])
    loss = torch.cat([*layer([0, 1, 2, 3]), *layer([1, 3])[:1]]).square().sum()
    found = torch.autograd.grad(loss, [*parameters, rows])
    output = LAYERS[kind][1](rows, *parameters)
    plain = output.square().sum() + output[once_more].square().sum()
    for mine, theirs in zip(found, torch.autograd.grad(plain, [*parameters, rows]), strict=True):
        assert torch.allclose(mine, theirs)


def test_a_large_convolution_that_cannot_be_cut_into_blocks_is_known() -> None:
    known = Convolution((2, 2), (1, 1), (1, 1))
    assert Convolution.of(2, (2, (1, 1), 1, 1)) == Convolution.of(2, ((2,), 1, [1, 1], 1)) == known
    assert Convolution.of(2, (1, 0, 1, 2)) is None  # groups
    assert Convolution.of(2, (1, "same", 1, 1)) is None


@pytest.mark.parametrize("kind", LAYERS)
def test_rows_of_a_backward_that_did_not_reach_the_weight_do_not_count(kind) -> None:
    parameters, rows, layer = shards_of_large_layer(kind=kind)
    loss = torch.cat(tuple(layer([0, 1, 2, 3]))).square().sum()
    torch.autograd.grad(loss, rows, retain_graph=True)
    (first,) = torch.autograd.grad(loss, parameters[0], retain_graph=True)
    (again,) = torch.autograd.grad(loss, parameters[0], create_graph=True)
    assert again.requires_grad
    assert torch.allclose(first, again)


@pytest.mark.parametrize("sizes", [(3, 1, 2, 4), (8, 8, 8, 8)])
def test_an_output_of_a_large_layer_can_be_changed_in_place(sizes) -> None:
    """With 8 rows each, kernels often have the same bits for all: then they are one product."""
    _, rows, layer = shards_of_large_layer(sizes)
    outputs = layer([0, 1, 2, 3])
    outputs[1].relu_()
    sum(output.exp().sum() for output in outputs).backward()
    assert rows.grad is not None


def test_sparse_and_dense_gradients_of_one_parameter_are_refused() -> None:
    parameter = torch.randn(4, 2, requires_grad=True)
    aliases = alias_for_shards([parameter], 2, 2**64 - 1)
    rows = nn.functional.embedding(torch.tensor([1, 2]), aliases[0][0], sparse=True)
    with pytest.raises(ShardedCallError, match="sparse for a part of the batch"):
        (rows.sum() + aliases[1][0].sum()).backward()


# -------------------------------------------------------------------------------------- threads


def test_functions_run_one_at_a_time_and_meet() -> None:
    order: list[str] = []
    threads = ShardThreads(3, lambda number: order.append(f"turn {number}"))

    def function(number: int) -> int:
        order.append(f"begin {number}")
        met = threads.meet(number, lambda values: [sum(values)] * 3)
        order.append(f"met {met}")
        return met + number

    found = threads.run([lambda k=k: function(k) for k in range(3)])
    assert found == [3, 4, 5]
    assert order == [
        *("turn 0", "begin 0", "turn 1", "begin 1", "turn 2", "begin 2"),
        *("turn 0", "met 3", "turn 1", "met 3", "turn 2", "met 3"),
    ]


def test_only_those_meet_that_come_to_a_place() -> None:
    """0 and 2 meet at "a", and in the end all; at "b" each is alone."""
    threads = ShardThreads(3, lambda number: None)
    met: list[tuple[int, ...]] = []

    def note(values):
        met.append(tuple(values))
        return values

    def function(number: int) -> int:
        for place in {0: "a", 1: "b", 2: "ab"}[number]:
            assert threads.meet(number, note, place) == number
        return threads.meet(number, lambda values: [sum(values)] * 3)

    assert threads.run([lambda k=k: function(k) for k in range(3)]) == [3, 3, 3]
    assert met == [(0, 2), (1,), (2,)]


@pytest.mark.parametrize("absent", [0, 1])
def test_functions_that_do_not_meet_are_an_error(absent) -> None:
    threads = ShardThreads(2, lambda number: None)

    def function(number: int) -> None:
        if number != absent:
            threads.meet(number, tuple)

    with pytest.raises(BranchError, match="different branches"):
        threads.run([lambda: function(0), lambda: function(1)])


def test_that_is_an_error_even_if_the_script_catches_what_it_sees() -> None:
    threads = ShardThreads(2, lambda number: None)

    def function(number: int) -> None:
        if number:
            with suppress(Exception):
                threads.meet(number, tuple)

    with pytest.raises(BranchError):
        threads.run([lambda: function(0), lambda: function(1)])


@pytest.mark.parametrize("place", ["function", "joint"])
def test_the_error_of_one_function_or_of_what_they_meet_for_is_raised(place) -> None:
    threads = ShardThreads(2, lambda number: None)

    def fail(*values: object) -> None:
        raise KeyError(place)

    def function(number: int) -> None:
        try:
            threads.meet(number, fail if place == "joint" else tuple)
        except Exception:
            pytest.fail("a function that waits sees the error of another one")
        fail()

    with pytest.raises(KeyError, match=place):
        threads.run([lambda: function(0), lambda: function(1)])


def test_a_function_has_the_modes_of_the_caller() -> None:
    threads = ShardThreads(1, lambda number: None)

    def modes() -> tuple[object, ...]:
        made = torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")
        return torch.is_grad_enabled(), made.dtype, torch.get_num_threads(), torch.empty(0).device

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        expected = modes()
        assert threads.run([modes]) == [expected]
    assert expected[1] is torch.bfloat16


class Together(torch.autograd.Function):
    """One node for several tensors, each of which it scales."""

    @staticmethod
    def forward(ctx, *parts):
        return tuple(part * 0.3 for part in parts)

    @staticmethod
    def backward(ctx, *grads):
        return tuple(grad * 0.3 for grad in grads)


def test_gradients_are_added_up_in_the_order_of_one_function() -> None:
    """A tensor with four gradients, two of which wait for a node of all functions."""

    def forward(x, together):
        early, met = x * 0.1, together(x)
        return early.sin() + met + (x * 0.7).exp() + together(x * 1.3)

    rows = [row.clone().requires_grad_() for row in torch.randn(2, 500)]
    threads = ShardThreads(2, lambda number: None)

    def meet(x):
        return threads.meet(x, lambda parts: Together.apply(*parts))

    first, second = threads.run([lambda row=row: forward(row * 1.1, meet) for row in rows])
    (first.sum() + second.sum()).backward()
    for row in rows:
        alone = row.detach().clone().requires_grad_()
        forward(alone * 1.1, lambda x: Together.apply(x)[0]).sum().backward()
        assert torch.equal(row.grad, alone.grad)


@ranks(2)
def test_with_one_shard_for_each_rank_sums_are_those_of_the_transport() -> None:
    group = ShardGroup.of(get_transport())
    assert (group.size, group.is_virtual, len(group.own)) == (2, False, 1)
    assert group.sum([torch.ones(3)]).tolist() == [2.0, 2.0, 2.0]
