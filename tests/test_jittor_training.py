"""Jittor's Dataset and `optimizer.step(loss)`, and scripts that `import jittor`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import SequentialSampler

import instep
import instep.jittor
from instep.compat import jittor as jt
from instep.compat.jittor.dataset import Dataset
from instep.errors import CannotShardError
from launching import Launch
from pool import ranks, run

pytestmark = pytest.mark.slow


class Squares(Dataset):
    def __init__(self, n, **attributes):
        super().__init__()
        self.set_attrs(total_len=n, **attributes)

    def __getitem__(self, k):
        return k, numpy.float32(k) ** 2


class OwnLength(Dataset):
    def __getitem__(self, k):
        return k

    def __len__(self):
        return 10


def epochs_of(n, batch_size, epochs, **attributes):
    dataset = Squares(n, batch_size=batch_size, **attributes)
    with torch.no_grad():
        found = [[(k.tolist(), y.tolist()) for k, y in dataset] for _ in range(epochs)]
    for batch in (batch for epoch in found for batch in epoch):
        assert [k**2 for k in batch[0]] == batch[1]
    return len(dataset), [[k for k, _ in epoch] for epoch in found]


# ----------------------------------------------------------------------------- the division


@pytest.mark.parametrize(
    ("n", "batch_size", "size"), [(211, 21, 2), (50, 16, 3), (9, 8, 3), (23, 9, 4), (10, 3, 4)]
)
def test_the_first_ranks_have_the_larger_share_and_no_sample_comes_twice(n, batch_size, size):
    for rank, (length, (batches,)) in enumerate(run(size, epochs_of, n, batch_size, 1)):
        expected = []
        for start in range(0, n, batch_size):
            batch = [*range(start, min(start + batch_size, n))]
            share = (len(batch) + size - 1) // size
            expected += [batch[rank * share : (rank + 1) * share]]
        assert batches == [block for block in expected if block]
        assert length == len(expected)


def rows_of_a_batch(batch_size: int) -> int:
    return Dataset(batch_size).real_batch_size


def test_of_21_rows_rank_0_has_eleven():
    assert [len(batches[0]) for _, (batches,) in run(2, epochs_of, 42, 21, 1)] == [11, 10]
    assert run(2, rows_of_a_batch, 21) == [11, 10]


@pytest.mark.parametrize("attributes", [{}, {"num_workers": 1}], ids=["here", "worker"])
def test_a_shuffled_epoch_holds_every_sample_once_and_the_next_has_another_order(attributes):
    by_rank = run(2, epochs_of, 40, 10, 2, shuffle=True, **attributes)
    orders = [[i for _, epochs in by_rank for batch in epochs[k] for i in batch] for k in (0, 1)]
    assert [sorted(order) for order in orders] == [[*range(40)]] * 2
    assert orders[0] != orders[1]


def test_the_attributes_count_from_the_next_epoch_on():
    dataset = Squares(10).set_attrs(batch_size=4)
    assert [len(k) for k, _ in dataset] == [4, 4, 2]
    dataset.set_attrs(drop_last=True)
    assert [len(k) for k, _ in jt.dataset.DataLoader(dataset, batch_size=3)] == [3, 3, 3]
    assert len(dataset) == 3
    dataset.set_attrs(sampler=SequentialSampler(range(2)), drop_last=False, shuffle=True)
    assert [k.tolist() for k, _ in dataset] == [[0, 1]]
    with pytest.raises(AttributeError, match=r"no attribute 'batchsize'; it has total_len, batch_"):
        dataset.set_attrs(batchsize=3)
    for name, said in (("keep_numpy_array", "call .numpy"), ("endless", "loop over epochs")):
        with pytest.raises(NotImplementedError, match=f"{name} is not there: {said}"):
            iter(Squares(4, **{name: True})).__next__()
    with pytest.raises(ValueError, match=r"how many samples has Dataset\? Call set_attrs"):
        len(Dataset())
    assert sum(len(k) for k in OwnLength(batch_size=4)) == 10


def test_a_batch_of_a_class_of_its_own_is_collated_by_it():
    class Stacked(Squares):
        def collate_batch(self, batch):
            return {"k": numpy.array([k for k, _ in batch]), "n": len(batch)}

    (batch,) = Stacked(3, batch_size=4)
    assert (batch["k"].tolist(), batch["n"]) == ([0, 1, 2], 3)
    assert isinstance(batch["k"], torch.Tensor)


@ranks(2)
def test_inside_a_scope_the_batches_are_whole():
    dataset = Squares(8, batch_size=4)

    @jt.single_process_scope()
    def inside():
        return [len(k) for k, _ in dataset]

    assert inside() == [4, 4]
    assert [len(k) for k, _ in dataset] == [2, 2]


# ----------------------------------------------------------------------------- the optimizer


class Points(Dataset):
    def __init__(self, n):
        super().__init__(batch_size=7)
        self.total_len = n
        self.x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))

    def __getitem__(self, k):
        return self.x[k], self.x[k].sum()


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model, x, y):
    return (model(x)[:, 0] - y).square().mean()


KINDS = {
    "SGD": ({"momentum": 0.9, "weight_decay": 0.01}, torch.optim.SGD),
    "Adam": ({"betas": (0.8, 0.99), "eps": 1e-3}, torch.optim.Adam),
    "AdamW": ({"weight_decay": 0.1, "eps": 1e-3}, torch.optim.AdamW),
}


@ranks(1, 2, 3, 4)
def test_a_training_by_step_of_loss_is_that_of_one_process():
    """Batches of 7, 7, 7 and 2 rows: of the last, the last ranks of 3 and 4 have none."""
    points = Points(23)
    for kind, (options, theirs) in KINDS.items():
        plain = small_model()
        reference = theirs(plain.parameters(), lr=0.05, **options)
        model = instep.replicate(small_model(instep.rank))
        optimizer = getattr(jt.optim, kind)(model.parameters(), 0.05, **options)
        for _ in range(3):
            for rows in range(0, 23, 7):
                x = points.x[rows : rows + 7]
                reference.zero_grad()
                loss_of(plain, x, x.sum(1)).backward()
                reference.step()
            for x, y in points:
                optimizer.step(loss_of(model, x, y))
        for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-5)


@ranks(1, 2)
def test_losses_are_added_until_the_step_and_clipped():
    points = Points(14)
    model, plain = instep.replicate(small_model(instep.rank)), small_model()
    optimizer = jt.optim.SGD(model.parameters(), 0.1)
    for x, y in points:
        optimizer.backward(loss_of(model, x, y) / 2)
    for x in (points.x[:7], points.x[7:]):
        (loss_of(plain, x, x.sum(1)) / 2).backward()
    optimizer.clip_grad_norm(0.1)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.optim.SGD(plain.parameters(), 0.1).step()
    optimizer.step()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        assert ours.grad is None


@ranks(2)
def test_a_model_that_no_rank_sums_is_refused():
    model = small_model()
    optimizer = jt.optim.Adam(model.parameters(), 0.1)
    with pytest.raises(CannotShardError, match=r"Call instep.replicate\(model\) first"):
        optimizer.step(model(torch.ones(2, 3)).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_and_schedules_see_one_step(kind):
    model = small_model()
    seen = []
    for _ in range(2):
        optimizer = getattr(jt.optim, kind)(model.parameters(), 0.1)
        KINDS[kind][1](model.parameters())
        optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].weight.grad is not None))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.step(model(torch.ones(2, 3)).sum(), retain_graph=True)
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert seen == [True, True]
    with pytest.raises(ValueError, match="dampening is 0 here"):
        jt.optim.SGD(model.parameters(), 0.1, dampening=0.1)


# ------------------------------------------------------------------------------- the other names


@ranks(1, 2)
def test_the_rest_of_the_module():
    assert instep.jittor is jt
    jt.sync_all()
    jt.sync_all(True)
    assert jt.compile_extern.mpi is jt.mpi
    assert (jt.compile_extern.has_mpi, jt.compile_extern.inside_mpi()) == (True, jt.in_mpi)
    with pytest.raises(AttributeError, match=r"no attribute 'array'.*in its place: torch.tensor"):
        _ = jt.array
    assert not hasattr(jt, "nn")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.close()


SCRIPT = """
    import jittor as jt
    from jittor import mpi
    from jittor.dataset import Dataset
    from jittor.dataset.dataset import Dataset as same
    import instep, torch
    try:
        from jittor import nn
    except ImportError as error:
        said = str(error)

    class Rows(Dataset):
        def __init__(self):
            super().__init__()
            self.set_attrs(total_len=21, batch_size=21)

        def __getitem__(self, k):
            return torch.tensor([float(k)])

    model = instep.replicate(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.zeros_(model.weight)
    optimizer = jt.optim.SGD(model.parameters(), 0.1)
    for x in Rows():
        optimizer.step(model(x).mean())
    total = jt.mpi_all_reduce(torch.tensor(len(x)))
    tell(jt.rank, jt.world_size, jt.in_mpi, mpi.world_rank(), len(x), int(total),
         model.weight.item(), Dataset is same, said)
"""


@pytest.mark.launch
def test_a_script_that_imports_jittor_runs_as_it_is(launch: Launch) -> None:
    done = launch.run_forked("-n", 2, launch.script(SCRIPT))
    assert done.returncode == 0, done.stderr
    said = (
        "jittor.nn needs an installed Jittor. In its place: torch.nn, and jittor.optim for the "
        "optimizers."
    )
    assert launch.events(2) == [
        [r, 2, True, r, 11 - r, 21, pytest.approx(-1.0), True, said] for r in (0, 1)
    ]


def test_an_installed_jittor_comes_first(tmp_path: Path) -> None:
    (tmp_path / "jittor").mkdir()
    (tmp_path / "jittor" / "__init__.py").write_text("nn = 'their own'")
    code = (
        "from instep.compat import finder; finder.install(); import sys;"
        f"sys.path.insert(0, {str(tmp_path)!r}); from jittor import nn; print(nn)"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout == "their own\n"


@ranks(3)
def test_a_sample_counts_once_in_training_where_the_last_rank_has_no_rows_of_a_batch():
    mean, gathered = instep.Mean(), []
    for k, _ in Squares(10, batch_size=6):  # the last batch of 4 is divided as 2, 2 and none
        mean.update(k.double())
        gathered += instep.gather_rows(k).tolist()
    assert gathered == [*range(10)]
    assert mean.compute() == 4.5
