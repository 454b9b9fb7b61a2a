"""Jittor's MPI functions: values and gradients, and what Jittor's own tests lack."""

import random

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import instep
from instep.compat import jittor as jt
from instep.compat.jittor import mpi
from instep.errors import UnknownOpError, UnsuitableTensorError
from pool import ranks, run

pytestmark = pytest.mark.slow


def of_rank(rank, shape=(3, 2), dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def mine(**options):
    return of_rank(instep.rank, **options).requires_grad_()


def total(of=lambda r: of_rank(r)):
    return sum(of(r) for r in range(instep.world_size))


# ------------------------------------------------------------------------ test_mpi, test_mpi_op


@ranks(1, 2, 3)
def test_the_names_say_who_this_is():
    world = instep.world
    assert (jt.in_mpi, instep.in_mpi) == (world.size > 1, world.size > 1)
    assert (jt.rank, jt.world_size, jt.world_rank) == (world.rank, world.size, world.size)
    assert (mpi.world_rank(), mpi.world_size()) == (world.rank, world.size)
    assert (mpi.local_rank(), mpi.get_state()) == (world.local_rank, True)
    mpi.mpi_barrier()
    with pytest.raises(AttributeError, match="no attribute 'local_rank'"):
        _ = jt.local_rank
    with pytest.raises(AttributeError, match=r"'set_state'. In its place: `@jt.single"):
        mpi.set_state(False)
    with pytest.raises(AttributeError, match=r"no attribute 'world'\.$"):
        mpi.world()


@ranks(1, 2, 3)
def test_all_reduce_adds_and_so_does_its_gradient():
    for op in ("add", "sum"):
        x = mine()
        y = jt.mpi_all_reduce(x, op)
        torch.testing.assert_close(y, total())
        y.backward(torch.full_like(y, instep.rank + 1.0))
        assert torch.equal(x.grad, torch.full_like(x, sum(range(1, instep.world_size + 1))))
    assert torch.equal(mpi.ops.mpi_all_reduce(x.detach()), mpi.var_all_reduce(x))


@ranks(1, 2, 3)
def test_all_reduce_mean_averages_and_so_does_its_gradient():
    x = mine()
    y = jt.mpi_all_reduce(x, "mean")
    torch.testing.assert_close(y, total() / instep.world_size)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))


@ranks(1, 2, 3)
def test_broadcast_gives_roots_value_and_collects_gradients_there():
    for root in range(instep.world_size):
        x = mine()
        y = jt.mpi_broadcast(x, root)
        assert torch.equal(y, of_rank(root))
        y.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, (instep.rank == root) * instep.world_size))
        assert torch.equal(mpi.var_broadcast(x, root), of_rank(root))


@ranks(1, 2, 3)
def test_reduce_adds_at_root_gives_zeros_elsewhere_and_roots_gradient_to_all():
    for root in range(instep.world_size):
        for op, share in (("add", 1), ("mean", instep.world_size)):
            x = mine()
            y = jt.mpi_reduce(x, op, root)
            expected = total() / share if instep.rank == root else torch.zeros(3, 2)
            torch.testing.assert_close(y, expected)
            y.backward(torch.full_like(y, 1.0 + instep.rank))
            torch.testing.assert_close(x.grad, torch.full_like(x, (1.0 + root) / share))
        assert torch.equal(mpi.var_reduce(x, root), jt.mpi_reduce(x.detach(), "add", root))


@ranks(2, 3)
def test_other_dtypes_are_exact():
    """Jittor sends int64 as pairs, and its mean of halves overflows."""
    big = 2**53 + 1 + instep.rank
    n = instep.world_size
    summed = jt.mpi_all_reduce(torch.tensor([big, -big]))
    assert summed.tolist() == [n * (2**53 + 1) + sum(range(n)), -n * (2**53 + 1) - sum(range(n))]
    half = torch.full((4,), 60000.0, dtype=torch.float16)
    assert torch.equal(jt.mpi_all_reduce(half, "mean"), half)
    assert jt.mpi_reduce(torch.tensor([True]), root=n - 1).tolist() == [instep.rank == n - 1]
    assert jt.mpi_broadcast(torch.tensor(1j), n - 1) == 1j


@ranks(1, 2, 3)
def test_numpy_arrays_are_broadcast_in_place_from_any_root():
    for root in range(instep.world_size):
        for dtype in ("float32", "float64", "int32", "int64", "float16", "bool"):
            array = numpy.full((3, 4), instep.rank).astype(dtype)
            mpi.broadcast(array[:, ::2], root)
            expected = numpy.full((3, 4), instep.rank).astype(dtype)
            expected[:, ::2] = numpy.array(root).astype(dtype)
            assert (array == expected).all()


@ranks(1, 2)
def test_mistakes_are_named():
    with pytest.raises(UnknownOpError, match="unknown reduction 'avg'; known are add, sum, mean"):
        jt.mpi_all_reduce(torch.ones(1), "avg")
    with pytest.raises(UnknownOpError, match="'max'"):
        jt.mpi_reduce(torch.ones(1), "max")
    with pytest.raises(UnsuitableTensorError, match=r"mean of torch.int64"):
        jt.mpi_all_reduce(torch.ones(1).long(), "mean")
    with pytest.raises(UnsuitableTensorError, match="takes tensors, not int"):
        jt.mpi_all_reduce(3)
    if instep.in_mpi:
        with pytest.raises(ValueError, match="root 2 does not exist"):
            jt.mpi_broadcast(torch.ones(1), 2)


@ranks(1, 2)
def test_as_methods_when_asked():
    jt.add_methods()
    try:
        x = mine()
        assert torch.equal(x.mpi_all_reduce("mean"), jt.mpi_all_reduce(x, "mean"))
        assert torch.equal(x.mpi_reduce(root=0), jt.mpi_reduce(x, root=0))
        assert torch.equal(x.mpi_broadcast(), of_rank(0))
        layer = nn.Linear(2, 2)
        layer.mpi_param_broadcast()
        assert torch.equal(layer.weight, instep.broadcast(layer.weight))
    finally:
        for name in ("mpi_all_reduce", "mpi_reduce", "mpi_broadcast"):
            delattr(torch.Tensor, name)
        del nn.Module.mpi_param_broadcast


# ------------------------------------------------------ test_nccl_ops: test_sync, test_optimizer


@ranks(2, 3)
def test_parameters_and_not_buffers_become_roots():
    torch.manual_seed(instep.rank)
    model = nn.BatchNorm1d(3)
    nn.init.normal_(model.weight)
    model.running_mean.fill_(instep.rank)
    theirs = instep.all_gather(model.weight.detach())
    jt.mpi_param_broadcast(model, root=1)
    assert torch.equal(model.weight, theirs[1])
    assert model.running_mean.tolist() == [instep.rank] * 3


@ranks(1, 2, 3)
def test_an_optimizer_fits_on_split_data():
    torch.manual_seed(0)
    model = instep.replicate(nn.Sequential(nn.Linear(1, 10), nn.ReLU(), nn.Linear(10, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.rand(100, 50, 1, generator=torch.Generator().manual_seed(3))
    for batch in x:
        (share,) = instep.shard((batch,))
        optimizer.zero_grad()
        loss = (model(share) - share.square()).square().mean()
        loss.backward()
        optimizer.step()
    assert jt.mpi_all_reduce(loss.detach(), "mean") < 0.0025


# ---------------------------------------------------------------- test_mpi_dataset, test_dataset


def epochs_of(n, batch_size, epochs, **options):
    loader = instep.shard(DataLoader(TensorDataset(torch.arange(n)), batch_size, **options))
    assert (loader.total_len, len(loader)) == (n, -(-n // batch_size))
    with torch.no_grad():
        return [[x.tolist() for (x,) in loader] for _ in range(epochs)]


@pytest.mark.parametrize(
    ("n", "batch_size", "size"), [(211, 21, 2), (160, 16, 3), (9, 8, 3), (100, 9, 4), (10, 16, 4)]
)
def test_every_sample_comes_once_in_blocks_of_the_global_batch(n, batch_size, size):
    """Jittor gives some twice, or divides by zero, at each of these sizes."""
    for rank, (batches,) in enumerate(run(size, epochs_of, n, batch_size, 1)):
        expected = []
        for start in range(0, n, batch_size):
            batch = list(range(start, min(start + batch_size, n)))
            block = batch[rank * len(batch) // size : (rank + 1) * len(batch) // size]
            expected += [block] if block else []
        assert batches == expected


def test_a_shuffled_epoch_holds_every_sample_once_and_the_next_has_another_order():
    by_rank = run(2, epochs_of, 160, 10, 2, shuffle=True)
    orders = [[i for rank in by_rank for batch in rank[k] for i in batch] for k in range(2)]
    assert [sorted(order) for order in orders] == [list(range(160))] * 2
    assert orders[0] != orders[1]
    assert all(len(batch) == 5 for rank in by_rank for epoch in rank for batch in epoch)


# ---------------------------------------------------------------- test_single_process_scope


@ranks(2, 3)
def test_inside_a_scope_the_batches_are_whole_and_the_operations_the_identity():
    loader = instep.shard(DataLoader(TensorDataset(torch.arange(32)), 16))
    root = instep.world_size - 1

    @jt.single_process_scope(rank=root)
    def inside():
        assert (jt.in_mpi, jt.rank, jt.world_size, mpi.get_state()) == (False, 0, 1, False)
        x = torch.ones(2)
        for y in (jt.mpi_all_reduce(x), jt.mpi_reduce(x, root=root), jt.mpi_broadcast(x, root)):
            assert torch.equal(x, y)
        return [len(x) for (x,) in loader]

    outside = [len(x) for (x,) in loader]
    assert sum(sum(sizes) for sizes in instep.all_gather_object(outside)) == 32
    assert inside() == [16, 16]
    assert jt.in_mpi


@ranks(2, 3)
def test_an_exception_inside_a_scope_reaches_every_rank():
    @jt.single_process_scope()
    def fails():
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        fails()
    mpi.mpi_barrier()


# -------------------------------------------------------------------------------- the seeds


@ranks(1, 2)
def test_seeds_differ_between_ranks_or_do_not():
    def drawn():
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    jt.set_global_seed(7)
    seeds = instep.all_gather_object(drawn())
    assert len(set(seeds)) == instep.world_size
    random.seed(7 + 2591 * instep.rank)
    assert random.random() == seeds[instep.rank][0]
    jt.set_global_seed(7, different_seed_for_mpi=False)
    assert set(instep.all_gather_object(drawn())) == {seeds[0]}


# ------------------------------------------------- the two validations of the documentation


class Rows:
    """n samples, of which a fixed model gets some right."""

    def __init__(self, n):
        generator = torch.Generator().manual_seed(n)
        self.data = TensorDataset(
            torch.randn(n, 3, generator=generator), torch.randint(0, 4, (n,), generator=generator)
        )
        torch.manual_seed(0)
        self.model = nn.Linear(3, 4)
        self.batch_size = 1 + n % 7

    def accuracy(self):
        """In one process, by hand."""
        x, y = self.data.tensors
        return (self.model(x).argmax(1) == y).sum().item() / len(y)

    def loader(self):
        return instep.shard(DataLoader(self.data, self.batch_size))


def count_correct(model, loader):
    model.eval()
    correct_nums = torch.zeros(1)
    with torch.no_grad():
        for images, labels in loader:
            correct_nums += (model(images).argmax(1) == labels).sum()
    return correct_nums


@pytest.mark.nightly
@ranks(1, 2, 3, 4)
def test_validation_with_all_reduce_has_the_accuracy_of_one_process():
    for n in range(1, 41):
        rows = Rows(n)
        loader = rows.loader()
        correct_nums = count_correct(rows.model, loader)
        if jt.in_mpi:
            correct_nums = jt.mpi_all_reduce(correct_nums)
        assert correct_nums.item() / loader.total_len == rows.accuracy()


@ranks(1, 2, 3, 4)
def test_validation_in_a_single_process_scope_has_the_accuracy_of_one_process():
    for n in range(1, 41):
        rows = Rows(n)
        loader = rows.loader()

        @jt.single_process_scope()
        def val(rows=rows, loader=loader):
            return count_correct(rows.model, loader).item() / loader.total_len

        assert val() == rows.accuracy()


def test_a_dataset_names_what_it_lacks():
    dataset = jt.dataset.Dataset()
    with pytest.raises(
        AttributeError, match=r"no attribute 'batch'; it has total_len, batch_size, shuffle"
    ):
        dataset.set_attrs(batch=3)
    with pytest.raises(ValueError, match=r"how many samples has Dataset\? Call set_attrs"):
        len(dataset)
    with pytest.raises(NotImplementedError, match="Dataset has no __getitem__"):
        dataset[0]
