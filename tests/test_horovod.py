"""Horovod's collectives: by name, on every dtype and shape, differentiable as Horovod's are."""

from __future__ import annotations

import functools
import json
import operator
import os
import tempfile
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

import instep
import instep.compat.horovod as hvd
from horovod_ranks import initialized
from instep.compat.horovod import data
from instep.compat.horovod.errors import NotInitializedError
from instep.errors import NameInFlightError, NotAMemberError, OverflowedError
from instep.launch.timeline.events import read_events
from instep.process import settings
from pool import ranks

pytestmark = pytest.mark.slow

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.float32, torch.float64)
SHAPES = ((7,), (3, 5), (2, 3, 4))


def of_rank(rank, shape, dtype):
    """Small whole numbers, different on every rank: sums and products fit each dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def of_all(shape, dtype):
    return [of_rank(rank, shape, dtype) for rank in range(hvd.size())]


def summed(tensors):
    return functools.reduce(operator.add, tensors)


def trunc_mean(tensors):
    total = summed(tensors)
    integer = not total.is_floating_point()
    return total.div(len(tensors), rounding_mode="trunc" if integer else None)


REDUCTIONS = {
    hvd.Average: trunc_mean,
    hvd.Sum: summed,
    hvd.Min: lambda tensors: functools.reduce(torch.minimum, tensors),
    hvd.Max: lambda tensors: functools.reduce(torch.maximum, tensors),
    hvd.Product: lambda tensors: functools.reduce(operator.mul, tensors),
}


# ------------------------------------------------------------------------------------ who am I


@ranks(1, 2, 3)
def test_every_rank_knows_its_place_between_init_and_shutdown():
    for _ in range(2):
        assert not hvd.is_initialized()
        with pytest.raises(NotInitializedError, match=r"call hvd\.init\(\)"):
            hvd.rank()
        with pytest.raises(NotInitializedError, match=r"call hvd\.init\(\)"):
            hvd.allreduce(torch.ones(1))
        with initialized():
            hvd.init()  # again: nothing
            assert (hvd.rank(), hvd.size()) == (instep.rank, instep.world_size)
            assert (hvd.local_rank(), hvd.local_size()) == (instep.rank, instep.world_size)
            assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
            assert hvd.is_homogeneous()
        hvd.shutdown()  # again: nothing


def test_what_is_built_is_what_torch_has():
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    for absent in ("mpi_built", "mpi_enabled", "mpi_threads_supported", "ddl_built", "ccl_built"):
        assert getattr(hvd, absent)() is False
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert bool(hvd.nccl_built()) == torch.cuda.is_available()


class Epochs(data.AsyncDataLoaderMixin, data.BaseDataLoader):
    """Each epoch has its number, and the next: batches of a loader that reads ahead."""

    def __init__(self, size, **options):
        super().__init__(size, **options)
        self.begun = 0

    def __len__(self):
        return 2

    def _iterate(self):
        self.begun += 1
        if self.begun == 4:
            raise KeyError("no such epoch")
        yield from (self.begun, self.begun + 1)

    def _process_batch(self, batch):
        return str(batch)


@pytest.mark.parametrize("size", [0, 1, 64])
def test_a_loader_may_read_ahead(size):
    loader = Epochs(size, debug_data_loader=False)
    loader.close_async_loader()
    assert [list(loader) for _ in range(3)] == [["1", "2"], ["2", "3"], ["3", "4"]]
    with pytest.raises(KeyError, match="no such epoch"):
        list(loader)
    loader.close_async_loader()
    if size:
        assert list(loader) == []
        assert not loader.thread.is_alive()
        loader = Epochs(size)
        assert next(iter(loader)) == "1"
        loader.close_async_loader()
        assert not loader.thread.is_alive()


def test_what_is_not_there_says_so():
    with pytest.raises(NotImplementedError, match="communicators are not supported"):
        hvd.init(comm=object())
    with pytest.raises(NotImplementedError, match="which ranks there are, here 1"):
        hvd.init(comm=[1])
    hvd.init(comm=[0])
    hvd.shutdown()
    with pytest.raises(AttributeError, match="no attribute 'spam'"):
        _ = hvd.spam
    assert all(getattr(hvd, name) is not None for name in hvd.__all__)


def check_horovods_events(text, name):
    """The tensor's row: from its submission until all ranks are ready, and until it has ended."""
    events = json.loads(text.removesuffix(",\n") + "]")
    row = [event for event in events if event.get("id") == name]
    assert [(event["name"], event["ph"]) for event in row] == [
        ("NEGOTIATE_ALLREDUCE", "b"),
        ("NEGOTIATE_ALLREDUCE", "e"),
        ("ALLREDUCE", "b"),
        ("ALLREDUCE", "e"),
    ]
    times = [event["ts"] for event in row]
    assert times == sorted(times)
    cycles = [event["ts"] for event in events if event["name"] == "CYCLE_START"]
    assert row[1]["ts"] in cycles


@ranks(2)
def test_a_timeline_has_what_rank_0_does_between_its_start_and_its_stop():
    with (
        mock.patch.dict(os.environ, HOROVOD_TIMELINE="DYNAMIC"),  # no file's name
        initialized(),
        tempfile.TemporaryDirectory() as folder,
    ):
        assert settings.TIMELINE.name not in os.environ
        path = os.path.join(folder, "part.json")
        hvd.stop_timeline()  # none is written yet
        for part in range(2):
            hvd.allreduce(torch.ones(1), name=f"before.{part}")
            hvd.start_timeline(path + ".other")
            hvd.start_timeline(path, mark_cycles=True)  # from here on into this file
            for name in ("first", "second"):
                hvd.allreduce(torch.ones(1), name=f"{name}.{part}")
            if hvd.rank() == 0:  # at once, before the file is ended
                check_horovods_events(Path(path).read_text(), f"allreduce.second.{part}")
            hvd.stop_timeline()
            hvd.allreduce(torch.ones(1), name=f"after.{part}")
            if hvd.rank() == 0:
                sums = [e for e in read_events(Path(path)) if e["name"].startswith("all_reduce")]
                assert [event["pid"] for event in sums] == [0, 0], sums
                for file in (path, path + ".other"):
                    assert isinstance(json.loads(Path(file).read_text()), list)
            hvd.barrier()


# ----------------------------------------------------------------------------------- reductions


@ranks(1, 2, 3)
def test_allreduce_of_every_dtype_shape_and_op():
    with initialized():
        for dtype in INTEGERS + FLOATS:
            for shape in SHAPES:
                mine = of_rank(hvd.rank(), shape, dtype)
                for op, reference in REDUCTIONS.items():
                    expected = reference(of_all(shape, dtype))
                    result = hvd.allreduce(mine, op=op)
                    assert result.dtype == dtype
                    assert torch.equal(result, expected), (op, dtype)
                    place = mine.clone()
                    assert hvd.allreduce_(place, op=op) is place
                    assert torch.equal(place, expected)
                assert torch.equal(mine, of_rank(hvd.rank(), shape, dtype))


@ranks(1, 2, 3)
def test_bfloat16_stays_bfloat16():
    half = torch.bfloat16
    with initialized():
        size, mine = hvd.size(), of_rank(hvd.rank(), (hvd.size(), 3), half)
        every = of_all((size, 3), half)
        total = summed(every)
        results = {
            "sum": (hvd.allreduce(mine, op=hvd.Sum), total),
            "mean": (hvd.allreduce(mine), (total.float() / size).to(half)),
            "gathered": (hvd.allgather(mine), torch.cat(every)),
            "of the last": (hvd.broadcast(mine, size - 1), every[-1]),
            "exchanged": (hvd.alltoall(mine), torch.stack([e[hvd.rank()] for e in every])),
            "scattered": (hvd.reducescatter(mine, op=hvd.Sum), total[hvd.rank()][None]),
        }
        for name, (result, expected) in results.items():
            assert result.dtype is half, name
            torch.testing.assert_close(result, expected, rtol=0.0, atol=0.0, msg=name)


@ranks(2, 3)
def test_groups_travel_as_one_and_come_back_as_many():
    with initialized():
        for dtype in (torch.int64, torch.float32):
            mine = [of_rank(hvd.rank(), shape, dtype) for shape in SHAPES]
            expected = [summed(of_all(shape, dtype)) for shape in SHAPES]
            for results in (
                hvd.grouped_allreduce(mine, op=hvd.Sum),
                hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Sum)),
                hvd.grouped_allreduce_(mine, op=hvd.Sum),
            ):
                assert all(map(torch.equal, results, expected))
            assert all(map(torch.equal, mine, expected)), "the last one was in place"


@ranks(1, 2)
def test_a_group_may_have_several_dtypes():
    with initialized():
        n, x = hvd.size(), torch.ones(2, requires_grad=True)
        mine = [x, torch.arange(3), torch.full((2, 2), 0.5), torch.ones(1).double()]
        expected = [n * torch.ones(2), n * torch.arange(3), torch.full((2, 2), n / 2), mine[3] * n]
        for results in (
            hvd.grouped_allreduce(mine, op=hvd.Sum),
            hvd.synchronize(hvd.grouped_allreduce_async(mine, name="group", op=hvd.Sum)),
        ):
            torch.testing.assert_close([each.detach() for each in results], expected)
        total = hvd.grouped_allreduce(mine, op=hvd.Sum)
        (total[0].sum() + total[2].sum()).backward()
        assert x.grad.tolist() == [n, n]
        handle = hvd.grouped_allreduce_async_(mine[1:], op=hvd.Sum)
        hvd.synchronize(handle)
        assert handle.poll()
        torch.testing.assert_close(mine[1:], expected[1:])


@ranks(2, 3)
def test_factors_before_and_after():
    with initialized():
        n = hvd.size()
        for dtype in (torch.float32, torch.float64, torch.float16):
            mine = of_rank(hvd.rank(), (6,), dtype)
            parts = of_all((6,), dtype)
            before = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5)
            after = hvd.allreduce(mine, op=hvd.Average, postscale_factor=4.0)
            assert torch.equal(before, summed([part * 0.5 for part in parts]))
            assert torch.equal(after, summed(parts) * 4.0 / n)
        whole = torch.tensor([5, -5, 3])
        assert hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5).tolist() == [2 * n, -2 * n, n]
        assert hvd.allreduce(whole, op=hvd.Sum, postscale_factor=0.7).tolist() == [
            int(5 * n * 0.7),
            -int(5 * n * 0.7),
            int(3 * n * 0.7),
        ]


@ranks(2, 3)
def test_reducescatter_gives_each_rank_its_rows_the_first_ones_one_more():
    with initialized():
        n, r, rows = hvd.size(), hvd.rank(), 2 * hvd.size() + 1
        start = 0 if r == 0 else 2 * r + 1
        mine = slice(start, start + 2 + (r == 0))
        for dtype in (torch.int32, torch.float16, torch.float64):
            tensor = of_rank(r, (rows, 3), dtype)
            for op, reference in REDUCTIONS.items():
                expected = reference(of_all((rows, 3), dtype))[mine]
                assert torch.equal(hvd.reducescatter(tensor, op=op), expected)
            both = hvd.grouped_reducescatter([tensor, tensor[:n]], op=hvd.Sum)
            assert [len(part) for part in both] == [2 + (r == 0), 1]
            handle = hvd.reducescatter_async(tensor, op=hvd.Sum, prescale_factor=2.0)
            assert torch.equal(hvd.synchronize(handle), summed(of_all((rows, 3), dtype))[mine] * 2)


@ranks(2)
def test_a_sum_that_does_not_fit_is_an_error_on_every_rank():
    with initialized(), pytest.raises(OverflowedError, match="400"):
        hvd.allreduce(torch.tensor([200], dtype=torch.uint8), op=hvd.Sum)


@ranks(2)
def test_adasum_adds_what_is_orthogonal_and_averages_what_is_parallel():
    with initialized():
        r = hvd.rank()
        orthogonal = torch.tensor([2.0, 0.0]) if r == 0 else torch.tensor([0.0, 5.0])
        parallel = torch.tensor([3.0, 3.0]) if r == 0 else torch.tensor([1.0, 1.0])
        assert hvd.allreduce(orthogonal, op=hvd.Adasum).tolist() == [2, 5]
        assert hvd.allreduce(parallel, op=hvd.Adasum).tolist() == [2, 2]
        nothing = torch.zeros(2) if r == 0 else torch.ones(2)
        both = hvd.grouped_allreduce([nothing, parallel], op=hvd.Adasum)
        assert [part.tolist() for part in both] == [[1, 1], [2, 2]]


@ranks(2, 3)
def test_sparse_tensors_are_gathered():
    with initialized():
        dense = torch.zeros(6, 2)
        dense[hvd.rank()] = 3.0
        dense[4] = 1.0
        handle = hvd.sparse_allreduce_async(dense.to_sparse(1), "sparse", hvd.Average)
        expected = torch.zeros(6, 2)
        expected[: hvd.size()] = 3.0 / hvd.size()
        expected[4] = 1.0
        assert torch.allclose(handle().to_dense(), expected)
        with pytest.raises(TypeError, match=r"sparse_coo\. Call sparse_allreduce_async for"):
            hvd.allreduce(dense.to_sparse(1))


# ------------------------------------------------------------------------------- rows that move


@ranks(1, 2, 3)
def test_allgather_of_many_few_and_no_rows():
    with initialized():
        for dtype in (*INTEGERS, *FLOATS, torch.bool):
            rows = [2, 0, 3][: hvd.size()]
            parts = [of_rank(k, (count, 2), dtype) for k, count in enumerate(rows)]
            mine = parts[hvd.rank()]
            assert torch.equal(hvd.allgather(mine), torch.cat(parts))
            same, other = hvd.grouped_allgather([mine, torch.ones(1, dtype=dtype)])
            assert torch.equal(same, torch.cat(parts))
            assert other.tolist() == [1] * hvd.size()


@ranks(1, 2, 3)
def test_groups_of_several_dtypes_are_gathered_and_scattered():
    with initialized():
        me, n = hvd.rank(), hvd.size()
        weight = torch.full((me + 1, 2), float(me), requires_grad=True)
        mine = [weight, torch.tensor([me]), weight.double() * 2, torch.tensor([True]), weight + 1]
        every = torch.cat([torch.full((k + 1, 2), float(k)) for k in range(n)])
        expected = [every, torch.arange(n), every.double() * 2, torch.ones(n).bool(), every + 1]
        started = hvd.grouped_allgather_async(mine, name="rows")
        gathered = hvd.grouped_allgather(mine, name="all")
        for results in (gathered, hvd.synchronize(started)):
            for result, wanted in zip(results, expected, strict=True):
                assert result.dtype == wanted.dtype
                assert torch.equal(result.detach(), wanted)
        (gathered[0].sum() + gathered[2].sum() + gathered[4].sum()).backward()
        assert torch.equal(weight.grad, torch.full_like(weight, 4.0))

        rows = torch.arange(2.0 * n, requires_grad=True)
        parts = [rows, rows.double() * 3, torch.arange(2 * n)]
        start = hvd.grouped_reducescatter_async(parts, name="own", op=hvd.Sum)
        scattered = hvd.grouped_reducescatter(parts, name="each", op=hvd.Sum)
        own = torch.arange(2 * me, 2 * me + 2) * n
        for results in (scattered, hvd.synchronize(start)):
            assert [each.tolist() for each in results] == [[*own], [*(3 * own)], [*own]]
            assert [each.dtype for each in results] == [each.dtype for each in parts]
        (scattered[0].sum() + scattered[1].sum()).backward()
        assert torch.equal(rows.grad, torch.full_like(rows, 4.0 * n))


@ranks(1, 2, 3)
def test_broadcast_from_every_root():
    with initialized():
        for root in range(hvd.size()):
            for dtype in (*INTEGERS, *FLOATS, torch.bool):
                mine = of_rank(hvd.rank(), (3, 2), dtype)
                expected = of_rank(root, (3, 2), dtype)
                assert torch.equal(hvd.broadcast(mine, root), expected)
                assert hvd.broadcast_(mine, root) is mine
                assert torch.equal(mine, expected)
        turned = torch.arange(6.0).view(2, 3).t() * (hvd.rank() + 1)
        assert torch.equal(hvd.broadcast_(turned, 0), torch.arange(6.0).view(2, 3).t())


@ranks(2)
def test_a_thousand_tensors_are_broadcast_at_once():
    broadcast_a_thousand(2)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(20))
@ranks(2, 3)
def test_a_thousand_tensors_are_broadcast_at_once_a_hundred_times(part):
    broadcast_a_thousand(5)


def broadcast_a_thousand(times):
    """More than the sockets between the ranks hold: each used to wait for the other to read."""
    with initialized():
        for time in range(times):
            tensors = {f"tensor{k}": torch.tensor([k * hvd.rank()]) for k in range(1000)}
            hvd.broadcast_parameters(tensors, time % hvd.size())
            expected = [k * (time % hvd.size()) for k in range(1000)]
            assert [tensor.item() for tensor in tensors.values()] == expected


@ranks(1, 2, 3)
def test_alltoall_with_splits_says_what_came_from_whom():
    with initialized():
        n, r = hvd.size(), hvd.rank()
        splits = torch.tensor([(r + to) % 3 for to in range(n)], dtype=torch.int32)
        rows = torch.cat([torch.full((int(k), 2), 10 * r + to) for to, k in enumerate(splits)])
        collected, received = hvd.alltoall(rows, splits)
        assert received.dtype == torch.int32
        assert received.tolist() == [(source + r) % 3 for source in range(n)]
        expected = [[10 * s + r] * 2 for s in range(n) for _ in range((s + r) % 3)]
        assert collected.tolist() == expected
        assert hvd.alltoall(torch.arange(n) + 10 * r).tolist() == [10 * s + r for s in range(n)]


@ranks(1, 2, 3)
def test_objects():
    with initialized():
        r, n = hvd.rank(), hvd.size()
        assert hvd.broadcast_object({"of": r, 3: [r]}, root_rank=n - 1) == {"of": n - 1, 3: [n - 1]}
        assert hvd.allgather_object("x" * r) == ["x" * k for k in range(n)]
        assert [add(1) for add in hvd.allgather_object(lambda x: x + r)] == [*range(1, n + 1)]


@ranks(2)
def test_a_tensor_without_elements_is_returned_so():
    with initialized():
        for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Adasum):
            for dtype in (torch.float32, torch.float16, torch.int64):
                tensor = torch.zeros(0, 3, dtype=dtype)
                assert hvd.allreduce(tensor, op=op).shape == (0, 3)
                assert hvd.allreduce_(tensor, op=op) is tensor
        model = torch.nn.ParameterList([torch.ones(2), torch.zeros(0)])
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 1.0), model.named_parameters(), num_groups=2
        )
        sum(parameter.sum() * (hvd.rank() + 1) for parameter in model).backward()
        optimizer.step()
        assert model[0].tolist() == [-0.5, -0.5]
        assert model[1].grad.shape == (0,)


# ---------------------------------------------------------------------------------- derivatives


@ranks(2, 3)
def test_derivatives_are_horovods():
    with initialized():
        n, r = hvd.size(), hvd.rank()

        def derivative(function, *shape):
            x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
            y = function(x)
            weight = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view(y.shape) * (r + 1)
            (y * weight).sum().backward()
            return x.grad, weight / (r + 1)

        ranks_sum, mean = n * (n + 1) / 2, (n + 1) / 2
        grad, w = derivative(lambda x: hvd.allreduce(x, op=hvd.Sum), 3)
        assert torch.equal(grad, w * ranks_sum)
        grad, w = derivative(lambda x: hvd.allreduce(x, prescale_factor=0.5), 3)
        assert torch.allclose(grad, w * mean * 0.5)
        grad, w = derivative(lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[1], 3)
        assert torch.equal(grad, w * ranks_sum)
        grad, w = derivative(hvd.allgather, 2, 3)
        assert torch.allclose(grad, w[2 * r : 2 * r + 2] * mean)
        grad, w = derivative(lambda x: hvd.broadcast(x, 1), 2)
        assert torch.allclose(grad, w * mean if r == 1 else w * 0)
        grad, w = derivative(hvd.alltoall, n)
        assert grad.tolist() == [(r + 1) * (to + 1) for to in range(n)]
        grad, w = derivative(lambda x: hvd.reducescatter(x, op=hvd.Sum), n, 2)
        assert torch.equal(grad, torch.stack([w[0] * (k + 1) * n for k in range(n)]))
        scales = {"prescale_factor": 0.5, "postscale_factor": 8.0}
        grad, w = derivative(lambda x: hvd.reducescatter(x, op=hvd.Sum, **scales), n, 2)
        assert torch.equal(grad, torch.stack([w[0] * (k + 1) * n * 4 for k in range(n)]))


# ----------------------------------------------------------------------------- names, not order


@ranks(2, 3)
def test_ranks_may_submit_in_different_orders_and_ask_whether_it_is_over():
    with initialized():
        names = [f"tensor{k}" for k in range(6)]
        order = names[hvd.rank() * 2 :] + names[: hvd.rank() * 2]
        handles = {
            name: hvd.allreduce_async(torch.full((4,), float(name[-1])), name=name, op=hvd.Sum)
            for name in order
        }
        if hvd.rank() == 0:
            late = hvd.allreduce_async(torch.ones(1), name="late")
            assert not hvd.poll(late)
        for name, handle in handles.items():
            assert hvd.synchronize(handle).tolist() == [float(name[-1]) * hvd.size()] * 4
            assert hvd.poll(handle)
        hvd.barrier()
        if hvd.rank() > 0:
            late = hvd.allreduce_async(torch.ones(1), name="late")
        assert hvd.synchronize(late).tolist() == [1]


@ranks(3)
def test_process_sets_do_not_wait_for_each_other():
    with initialized():
        even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set([1])
        mine = even if hvd.rank() != 1 else odd
        assert (mine.included(), mine.size(), mine.rank()) == (
            True,
            len(mine.ranks),
            hvd.rank() // 2,
        )
        if hvd.rank() == 1:
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=odd).tolist() == [1, 1]
            with pytest.raises(NotAMemberError, match="the group of ranks 0, 2, but is no member"):
                hvd.allreduce(torch.ones(2), process_set=even)
            hvd.barrier(odd)
        else:
            assert hvd.allgather(torch.tensor([hvd.rank()]), process_set=even).tolist() == [0, 2]
            x = torch.full((1,), float(hvd.rank()))
            assert hvd.broadcast(x, 2, process_set=even).tolist() == [2]
            assert hvd.allgather_object(hvd.rank(), process_set=even) == [0, 2]
        with pytest.raises(ValueError, match=r"process set of the ranks \[0, 2\] already"):
            hvd.add_process_set([2, 0])
        assert hvd.remove_process_set(even)
        assert not hvd.remove_process_set(even)
        assert not hvd.remove_process_set(hvd.global_process_set)
        with pytest.raises(ValueError, match=r"\[0, 2\] is not registered"):
            hvd.allreduce(torch.ones(1), process_set=even)
        with pytest.raises(RuntimeError, match=r"\(0, 1\) on ranks 0, 2; \(0, 2\) on rank 1"):
            hvd.add_process_set([0, 1 + (hvd.rank() == 1)])


@ranks(2, 3)
def test_join_counts_the_absent_as_zeros_and_an_average_still_divides_by_all():
    with initialized():
        n = hvd.size()
        for first in range(n):
            if hvd.rank() != first:
                ones = torch.full((5,), 6.0)
                assert hvd.allreduce(ones).tolist() == [6.0 * (n - 1) / n] * 5
                pair = hvd.grouped_allreduce([torch.ones(2).int(), torch.ones(3).int()], op=hvd.Sum)
                assert [part.tolist() for part in pair] == [[n - 1] * 2, [n - 1] * 3]
                for refused in (hvd.allgather, lambda x: hvd.broadcast(x, hvd.rank())):
                    with pytest.raises(hvd.HorovodInternalError):
                        refused(ones)
                with pytest.raises(hvd.HorovodInternalError, match=r"already called join\(\)"):
                    hvd.allreduce(ones, op=hvd.Min)
            last = hvd.join()
            assert last != first
            assert hvd.allgather_object(last) == [last] * n


# ---------------------------------------------------------------------------------------- misuse


@ranks(2, 3)
def test_ranks_that_disagree_get_the_same_error():
    with initialized():
        odd = hvd.rank() == 1
        texts = []
        for submit in (
            lambda: hvd.allreduce(torch.ones(3 + odd)),
            lambda: hvd.allreduce(torch.ones(6) if odd else torch.ones(2, 3)),
            lambda: hvd.allreduce(torch.ones(3).int() if odd else torch.ones(3)),
            lambda: hvd.allreduce(torch.ones(3), op=hvd.Min if odd else hvd.Max),
            lambda: hvd.allreduce(torch.ones(3), prescale_factor=2.0 if odd else 1.0),
            lambda: hvd.allgather(torch.ones(3, 2 + odd)),
            lambda: hvd.broadcast(torch.ones(3), int(odd)),
            lambda: hvd.alltoall(torch.ones(hvd.size(), 2 + odd)),
            lambda: hvd.reducescatter(torch.ones(3 + odd)),
            lambda: hvd.grouped_allreduce([torch.ones(3)] * (1 + odd)),
        ):
            with pytest.raises(
                hvd.HorovodInternalError, match="the ranks disagree about"
            ) as caught:
                submit()
            assert isinstance(caught.value, RuntimeError)
            texts.append(str(caught.value))
        assert hvd.allgather_object(texts) == [texts] * hvd.size()
        assert "(3) on rank" in texts[0]
        assert "(4) on rank 1" in texts[0]
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist() == [hvd.size()], "work goes on"


@ranks(2)
def test_a_name_that_is_under_way_cannot_be_given_again():
    with initialized():
        for submit in (
            lambda: hvd.allreduce_async(torch.ones(3), name="twice"),
            lambda: hvd.allgather_async(torch.ones(3), name="twice"),
            lambda: hvd.broadcast_async(torch.ones(3), 0, name="twice"),
            lambda: hvd.reducescatter_async(torch.ones(2), name="twice"),
        ):
            for turn in range(2):
                if hvd.rank() == turn:
                    submit()
                    if turn == 0:
                        with pytest.raises(NameInFlightError, match=r"twice.*test_horovod\.py:\d+"):
                            submit()
                hvd.barrier()


@ranks(1, 2)
def test_arguments_that_cannot_be_meant():
    with initialized():
        n, ones = hvd.size(), torch.ones(4)
        wrong = [
            (lambda: hvd.allreduce(ones, average=True, op=hvd.Sum), "op or average, not both"),
            (lambda: hvd.allreduce(ones, op=17), "does not make 17; it makes Average, Sum"),
            (lambda: hvd.reducescatter(ones, op=hvd.Adasum), "reducescatter does not make Adasum"),
            (lambda: hvd.alltoall(ones, [5] * n), r"up to the tensor's 4; got \[5.*\]"),
            (lambda: hvd.alltoall(ones, torch.ones(n)), "are integers .* not torch.float32"),
            (lambda: hvd.allgather(torch.tensor(1.0)), "needs a tensor with rows"),
            (lambda: hvd.reducescatter(torch.tensor(1.0)), "needs a tensor with rows"),
            (lambda: hvd.grouped_allreduce([]), "at least one tensor"),
            (lambda: hvd.grouped_allgather([]), "at least one tensor"),
            (lambda: hvd.grouped_reducescatter([]), "at least one tensor"),
            (lambda: hvd.broadcast(ones, n), f"root_rank {n} does not take part"),
            (lambda: hvd.broadcast_object(1, n), f"root_rank {n} does not take part"),
            (lambda: hvd.broadcast_parameters(ones, 0), "state_dict.* not Tensor"),
            (lambda: hvd.add_process_set([0, 0]), "list of different ranks"),
            (lambda: hvd.add_process_set([n]), "list of different ranks"),
            (lambda: hvd.ProcessSet(["a"]), "list of different ranks"),
        ]
        for call, words in wrong:
            with pytest.raises(ValueError, match=words):
                call()
        if n > 1:
            with pytest.raises(ValueError, match=r"2 ranks the same number of rows, but .* has 3"):
                hvd.alltoall(torch.ones(3))
            first = hvd.add_process_set([0])
            if hvd.rank() == 0:
                with pytest.raises(ValueError, match="does not make a process set; it makes all"):
                    hvd.allreduce(ones, op=hvd.Adasum, process_set=first)


def test_a_loader_of_batches_needs_the_two_methods_of_its_own():
    with pytest.raises(NotImplementedError, match="BaseDataLoader has no __len__"):
        len(data.BaseDataLoader())
    with pytest.raises(NotImplementedError, match="BaseDataLoader has no _iterate"):
        list(data.BaseDataLoader())


@ranks(3)
def test_adasum_needs_pairs_of_pairs():
    with initialized(), pytest.raises(ValueError, match=r"does not make 3 ranks; .* 1, 2, 4, 8"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)


@ranks(2)
def test_what_waits_for_a_rank_that_leaves_ends_with_an_error():
    before = set(threading.enumerate())
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        hvd.shutdown()
        instep.barrier()
        return
    with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 of 2 .* called shutdown\(\)"):
        hvd.allreduce(torch.ones(1), name="alone")
    with pytest.raises(hvd.HorovodInternalError, match="rank 1 of 2"):
        hvd.barrier()
    hvd.shutdown()
    instep.barrier()
    assert set(threading.enumerate()) <= before
