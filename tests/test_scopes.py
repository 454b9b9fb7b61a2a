"""Run once: one rank runs, all get the value or the exception; the world inside is of one."""

import os
import random
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import instep
from instep.distributed.rendezvous import bootstrap
from instep.errors import InsideScopeError, RunOnceError, UnknownOpError
from instep.process import print_line
from pool import RankError, ranks, run

pytestmark = pytest.mark.slow


@ranks(1, 2, 3)
def test_the_value_reaches_every_rank_and_only_one_ran():
    for root in range(instep.world_size):
        ran = []

        @instep.single_process_scope(rank=root)
        def evaluate(base, *, factor, ran=ran):
            ran.append(os.getpid())
            return {"pid": os.getpid(), "value": torch.tensor([base * factor])}

        outer = instep.rank
        result = evaluate(3, factor=5)
        assert result["value"].tolist() == [15]
        assert ran == ([result["pid"]] if outer == root else [])
        assert len(set(instep.all_gather_object(result["pid"]))) == 1
        assert evaluate.__name__ == "evaluate"


@ranks(1, 2)
def test_a_function_of_the_main_process_runs_on_rank_0_alone():
    @instep.on_main_process
    def log(value):
        if value < 0:
            raise ValueError("negative")
        return value + 1

    assert instep.is_main_process == (instep.rank == 0)
    assert log(1) == (2 if instep.is_main_process else None)
    assert log.__name__ == "log"
    if instep.rank != 0:
        assert log(-1) is None
    with redirect_stdout(StringIO()) as out:
        instep.print("loss", 0.5, sep="=", end=";")
    assert out.getvalue() == ("loss=0.5;" if instep.is_main_process else "")


@ranks(1, 2)
def test_a_progress_bar_is_shown_by_rank_0_and_counts_the_jobs_batches():
    loader = instep.shard(DataLoader(TensorDataset(torch.arange(22.0)), batch_size=4))
    out = StringIO()
    bar = instep.progress(loader, desc="epoch", file=out)
    rows = 0
    for (part,) in bar:
        rows += len(part)
        bar.set_postfix(rows=rows)
    assert instep.all_reduce(torch.tensor(rows)) == 22
    shown = out.getvalue().rpartition("\r")[2]
    if instep.is_main_process:
        assert shown.startswith("epoch: 100%|")
        assert " 6/6 " in shown
        assert f"rows={rows}" in shown
    else:
        assert out.getvalue() == ""


@ranks(1)
def test_a_progress_bar_without_tqdm_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)  # an import of it fails
    with pytest.raises(ImportError, match=r"instep\.progress needs tqdm.*pip install tqdm"):
        instep.progress(range(3))


def test_a_line_of_insteps_own_is_not_behind_a_progress_bar():
    with redirect_stderr(StringIO()) as out:
        for _ in instep.progress(range(1), mininterval=0):
            print_line("said")
    assert "\rinstep: said\n" in out.getvalue()
    assert out.getvalue().count("0/1") == 2, "the bar is shown again"


@ranks(1, 2, 3)
def test_the_with_form_asks_and_hands_the_value_over():
    last = instep.world_size - 1
    ran = 0
    with instep.single_process_scope(last) as here:
        if here:
            ran = 1
            here.value = ["made", "once"]
    assert here.value == ["made", "once"]
    assert sum(instep.all_gather_object(ran)) == 1


@ranks(2, 3)
def test_a_with_form_that_does_not_ask_is_an_error_on_every_rank():
    with (
        pytest.raises(RunOnceError, match=r"test_scopes\.py:\d+ ran on every rank.*if here:"),
        instep.single_process_scope(),
    ):
        pass
    instep.barrier()


class OddError(Exception):
    """Does not pickle: its constructor takes something else than its args."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fail(error):
    raise error


@ranks(2, 3)
def test_an_exception_is_raised_on_every_rank_with_its_traceback():
    once = instep.single_process_scope(rank=1)(fail)
    with pytest.raises(ZeroDivisionError, match="as it was") as caught:
        once(ZeroDivisionError("as it was"))
    if instep.rank == 1:
        assert caught.traceback[-1].name == "fail"
    else:
        (note,) = caught.value.__notes__
        assert note.startswith("On rank 1, in its single_process_scope at ")
        assert "in fail\n    raise error\nZeroDivisionError: as it was" in note
    with pytest.raises(SystemExit) as left:
        once(SystemExit(3))
    assert left.value.code == 3
    with pytest.raises(UnknownOpError, match="unknown reduction 'avg'"):
        once(UnknownOpError("avg", ["sum"]))
    instep.barrier()


@ranks(2, 3)
def test_what_does_not_pickle_is_the_same_error_on_every_rank():
    once = instep.single_process_scope()(fail)
    with pytest.raises(RunOnceError, match=r"raised OddError.*does not pickle") as caught:
        once(OddError(1, 2))
    assert "OddError: 1 and 2" in str(caught.value)
    assert "in fail\n    raise error" in str(caught.value)
    with pytest.raises(RunOnceError, match="returned a function that cannot be sent"):
        instep.single_process_scope()(lambda: lambda: 1)()
    assert instep.single_process_scope()(lambda: ValueError("a value"))().args == ("a value",)
    instep.barrier()


@ranks(2, 3)
def test_inside_the_world_is_of_one():
    loader = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=4)
    model = instep.replicate(nn.BatchNorm1d(2))

    @instep.single_process_scope(rank=1)
    def evaluate():
        assert (instep.rank, instep.world_size, instep.local_rank) == (0, 1, 0)
        assert "single_process_scope" in instep.world.source
        assert not dist.is_initialized()
        assert instep.init().size == 1
        assert instep.all_reduce(torch.ones(2)).tolist() == [1, 1]
        assert instep.all_gather_object("me") == ["me"]
        assert instep.broadcast(torch.ones(1), group=instep.group([0])).item() == 1
        instep.barrier()
        mean = instep.Mean()
        for (x,) in instep.shard(loader):
            mean.update(x)
        model(torch.randn(8, 2))
        return mean.compute()

    before = instep.world
    assert evaluate() == 4.5
    assert instep.world == before
    assert dist.is_initialized()
    assert instep.all_reduce(torch.ones(1)).item() == instep.world_size


@ranks(2, 3)
def test_a_collective_of_torch_inside_raises_at_once_and_names_scope_and_line():
    pair = dist.new_group([0, 1])
    mistakes = [
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.barrier(),
        lambda: dist.broadcast_object_list([1], 0),
        lambda: dist.all_gather([torch.ones(1)] * instep.world_size, torch.ones(1)),
        lambda: dist.all_reduce(torch.ones(1), group=pair),
        lambda: dist.send(torch.ones(1), 1),
    ]
    where = r"at \S+test_scopes\.py:\d+ is inside the single_process_scope of rank 0 \(\S+py:\d+\)"
    for mistake in mistakes:
        with pytest.raises(InsideScopeError, match=where):
            instep.single_process_scope()(mistake)()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == instep.world_size


@ranks(2)
def test_a_group_of_the_outer_world_cannot_talk_inside():
    pair = instep.group([0, 1])
    with pytest.raises(InsideScopeError):
        instep.single_process_scope(rank=1)(lambda: instep.all_reduce(torch.ones(1), group=pair))()


@ranks(2, 3)
def test_beside_the_condition_of_a_with_form_no_rank_can_talk():
    with instep.single_process_scope() as here:
        if not here:
            with pytest.raises(InsideScopeError):
                instep.all_reduce(torch.ones(1))


@ranks(1, 2, 3)
def test_scopes_nest_and_can_be_used_again():
    inner = instep.single_process_scope(rank=0)(lambda: (instep.rank, instep.world_size))
    scope = instep.single_process_scope(instep.world_size - 1)

    @scope
    def outer():
        with scope as here:
            if here:
                here.value = inner()
        return here.value, instep.world_size, inner()

    for _ in range(3):
        assert outer() == ((0, 1), 1, (0, 1))
    assert inner()[1] == 1
    instep.barrier()


@ranks(1)
def test_in_a_world_of_one_the_function_is_just_called():
    value = object()
    assert instep.single_process_scope()(lambda: value)() is value
    with pytest.raises(OddError):
        instep.single_process_scope()(fail)(OddError(1, 2))


@ranks(2)
def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="rank 7 does not exist: the ranks are 0 to 1"):
        instep.single_process_scope(rank=7)(lambda: 1)()


@ranks(2)
def test_the_others_wait_in_no_collective():
    """The running rank finds no key of theirs but its own, and the store clean afterwards."""
    store = bootstrap.store()
    before = store.num_keys() if hasattr(store, "num_keys") else 0
    for _ in range(4):
        instep.single_process_scope()(lambda: 1)()
    instep.barrier()
    assert store.num_keys() <= before + 1


def die_in_scope(folder):
    @instep.single_process_scope(rank=1)
    def run_once():
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        run_once()
    except RunOnceError as error:
        Path(folder, f"rank{instep.rank}").write_text(str(error))
        raise


def test_the_others_notice_when_the_running_rank_dies(tmp_path):
    with pytest.raises(RankError, match="the process died"):
        run(2, die_in_scope, str(tmp_path))
    said = (tmp_path / "rank0").read_text()
    assert "rank 1 ended inside its single_process_scope" in said
    assert "its process is gone" in said


@ranks(2, 3)
def test_a_loader_sharded_before_gives_everything_inside_and_its_share_after():
    loader = instep.shard(DataLoader(TensorDataset(torch.arange(10)), 4, shuffle=True))

    def taken():
        with torch.no_grad():
            return [i for (x,) in loader for i in x.tolist()]

    assert sorted(instep.single_process_scope()(taken)()) == list(range(10))
    # The epoch inside counted on no rank, so that the ranks still have one order.
    assert sorted(chain(*instep.all_gather_object(taken()))) == list(range(10))


def training_around_scopes():
    torch.manual_seed(3)
    model = instep.replicate(nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3)))
    data = torch.randn(24, 4)
    loader = instep.shard(DataLoader(TensorDataset(data), 6, shuffle=True))

    @instep.single_process_scope()
    def spread():
        for (x,) in loader:
            model(x)
        return torch.stack([model(data) for _ in range(3)]).std(0).mean().item()

    spreads = [spread()]
    for (x,) in loader:
        model(x).square().mean().backward()
        spreads.append(spread())
    return torch.tensor([*spreads, *(p.grad.norm() for p in model.parameters())])


def test_calls_for_training_inside_are_no_steps_and_draw_numbers_of_their_own():
    (alone,) = run(1, training_around_scopes)
    assert len({*alone[:5].tolist()}) == 5
    for size in (2, 3):
        for of_rank in run(size, training_around_scopes):
            assert torch.allclose(of_rank, alone, rtol=1e-5)


def draw():
    return torch.rand(()).item(), np.random.rand(), random.random()


def draw_and_fail():
    return torch.rand(()) + np.random.rand() + 1 / 0


@ranks(1, 2, 3)
def test_numbers_drawn_inside_leave_in_step_what_was_in_step():
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    alone = [draw() for _ in range(3)]
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    random.seed(instep.rank)  # each rank its own, on purpose
    own = [random.random() for _ in range(2)]
    random.seed(instep.rank)
    assert instep.single_process_scope(instep.world_size - 1)(draw)()[:2] == alone[0][:2]
    with pytest.raises(ZeroDivisionError):
        instep.single_process_scope()(draw_and_fail)()
    drawn = draw()
    assert drawn[:2] == alone[2][:2]
    assert drawn[2] == own[instep.world_size - 1 == instep.rank]


@ranks(1, 2)
def test_numbers_that_the_main_process_draws_leave_the_ranks_in_step():
    for _ in range(2):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(3)
        drawn = [instep.on_main_process(draw)() for _ in range(2)]
        assert instep.rank or drawn[0] != drawn[1]
        assert draw() == instep.broadcast_object(draw_after_seeding())


def draw_after_seeding():
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    return draw()


def orders_around_scopes():
    generator = torch.Generator().manual_seed(3)
    rows = TensorDataset(torch.arange(8))
    loader = instep.shard(DataLoader(rows, 4, shuffle=True, generator=generator))
    orders = []
    for _ in range(2):
        inside = instep.single_process_scope()(lambda: [x for (x,) in loader])()
        orders += inside + [instep.gather_rows(x) for (x,) in loader]
    return torch.cat(orders).tolist()


def test_what_a_loader_draws_inside_leaves_its_order_the_same_on_all_ranks():
    (alone,) = run(1, orders_around_scopes)
    assert run(2, orders_around_scopes) == [alone] * 2
