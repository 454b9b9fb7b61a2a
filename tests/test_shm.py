"""The shared-memory backend: Gloo's results, nobody hangs, nothing is left behind."""

import copy
import faulthandler
import functools
import gc
import os
import random
import re
import resource
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from instep.distributed.flight_record import record_format
from instep.distributed.flight_record.recorder import recorder
from instep.distributed.shm import joining
from instep.distributed.shm.backend import InstepProcessGroup
from instep.distributed.shm.joining import group_by_host, obstacle
from instep.distributed.shm.memory.mapping import create_memory
from instep.distributed.shm.memory.peers import Peer
from instep.distributed.shm.memory.reduction import buffer_count, find_reduction, reduce_into
from instep.distributed.shm.memory.signals import BYTES_PER_RANK, Signals, signature_of
from instep.distributed.shm.memory.staging import BUFFERS, Staging
from instep.distributed.shm.over_gloo import ProcessGroupOverGloo
from instep.distributed.shm.shared_buckets import Resident
from instep.distributed.shm.work_queue import Collective, WorkQueue
from instep.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DisagreementError,
    ForkedChildError,
    PeerDiedError,
    PeerGaveUpError,
    PeerLeftError,
)
from instep.process.procfs import has_ended
from pool import forkserver, ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.uname().machine != "x86_64", reason="needs Linux on x86-64"
    ),
]

OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]
SHAPES = [(), (0,), (1,), (5, 3), (40_000,), (3, 200_001)]

# Older versions of torch have the other names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@functools.cache
def group():
    """In a rank of the pool, whose world talks over Gloo: a group that shares memory."""
    made = dist.new_group(backend="instep")
    assert made.shares_memory()
    return made


def values(shape, dtype, seed=0):
    """Other numbers on every rank, small enough for any dtype."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(dist.get_rank()))


# What it computes


@pytest.mark.parametrize("op", OPS)
@ranks(2, 3)
def test_all_reduce_gives_what_gloo_gives(op):
    kinds = INTEGERS if op.startswith("B") else FLOATS if op == "AVG" else FLOATS + INTEGERS
    for dtype in kinds:
        for shape in SHAPES if dtype in (torch.float32, torch.int64) else SHAPES[:-1]:
            ours, theirs = values(shape, dtype), values(shape, dtype)
            dist.all_reduce(ours, getattr(ReduceOp, op), group=group())
            dist.all_reduce(theirs, getattr(ReduceOp, op))
            if dtype == torch.bool:  # Gloo leaves 2 in a bool that is true twice
                theirs = theirs.view(torch.uint8) != 0
            torch.testing.assert_close(ours, theirs, msg=f"{dtype} {shape}")


@ranks(2, 3)
def test_all_reduce_takes_complex_tensors():
    ours = torch.complex(noise(7), noise(7) + 1)
    theirs = ours.clone()
    dist.all_reduce(ours, group=group())
    dist.all_reduce(theirs)
    torch.testing.assert_close(ours, theirs)


@ranks(2)
def test_what_gloo_refuses_is_refused_in_its_words():
    with pytest.raises(RuntimeError, match=r"Cannot use ReduceOp\.BAND with non-integral dtype"):
        dist.all_reduce(torch.ones(3), ReduceOp.BAND, group=group())
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        dist.all_reduce(torch.ones(3, dtype=torch.int16), group=group())


@ranks(2)
def test_a_root_or_a_list_that_there_is_not_is_refused_and_the_group_goes_on():
    ours, none = group(), torch.zeros(2)
    for root in (-1, dist.get_world_size()):
        for call, arguments, options in (
            (ours.broadcast, ([none],), dist.BroadcastOptions()),
            (ours.reduce, ([none],), dist.ReduceOptions()),
            (ours.scatter, ([none], []), dist.ScatterOptions()),
        ):
            options.rootRank = root
            with pytest.raises(RuntimeError, match=f"invalid root rank: {root}"):
                call(*arguments, options)
    with pytest.raises(RuntimeError):
        ours.allreduce_coalesced([])
    dist.all_reduce(none.add_(1), group=ours)
    assert none.tolist() == [2, 2]
    entries = record_format.read(recorder.file_descriptor()).entries
    assert [entry.describe() for entry in entries if entry.left is None] == []


@ranks(2, 3)
def test_only_the_elements_of_a_strided_tensor_change():
    memory = torch.zeros(4, 6)
    dist.all_reduce(memory[:, ::2].t().add_(dist.get_rank() + 1), group=group())
    n = dist.get_world_size()
    assert memory[:, ::2].eq(n * (n + 1) / 2).all()
    assert memory[:, 1::2].eq(0).all()


@ranks(2, 3, 5)  # from 4 ranks on sums have buffers
def test_what_is_kept_from_inference_mode_serves_outside_of_it():
    ours = dist.new_group(backend="instep")  # which keeps nothing yet
    for inside in (True, True, False, False):
        with torch.inference_mode(inside):
            mine = torch.full((1237,), dist.get_rank() + 1.0, dtype=torch.float64)
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mine, group=ours)
            dist.all_reduce(mine, group=ours)
            assert [int(part[0]) for part in parts] == [*range(1, len(parts) + 1)]
            assert torch.equal(mine, torch.stack(parts).sum(0))
    dist.destroy_process_group(ours)


@ranks(2)
def test_a_sign_that_a_view_only_notes_is_not_forgotten():
    for inside in (False, True):
        with torch.inference_mode(inside):
            noted = torch.complex(torch.zeros(3), torch.ones(3)).conj().imag
            assert noted.is_neg()
            dist.all_reduce(noted, group=group())
            assert noted.tolist() == [-2] * 3
            noted = torch.complex(torch.zeros(3), torch.ones(3)).conj()
            assert noted.is_conj()
            group().allreduce([noted]).wait()  # torch's own functions refuse it
            assert noted.tolist() == [-2j] * 3


@ranks(2)
def test_ranks_may_hold_the_same_values_in_different_ways():
    dense = torch.arange(12.0)
    if dist.get_rank() == 0:
        tensor = torch.stack([dense, dense], 1)[:, 0]
    else:
        with torch.inference_mode():
            tensor = dense.clone()
    dist.all_reduce(tensor, group=group())
    assert torch.equal(tensor, 2 * dense)
    parameter = torch.nn.Parameter(dense.clone())
    dist.all_reduce(parameter, group=group())
    assert torch.equal(parameter.data, 2 * dense)
    assert parameter.grad_fn is None


@ranks(2, 3, 5)
def test_sums_follow_one_tree_and_have_the_same_bits_everywhere():
    for numel in (1000, 300_000):
        mine = noise(numel)
        everyone = [torch.empty(numel) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        while len(everyone) > 1:
            pairs = zip(everyone[::2], everyone[1::2], strict=False)
            odd = everyone[-1:] if len(everyone) % 2 else []
            everyone = [left + right for left, right in pairs] + odd
        for _ in range(3):
            result = mine.clone()
            dist.all_reduce(result, group=group())
            assert torch.equal(result, everyone[0])


def test_what_one_rank_reduces_is_its_own():
    mean = find_reduction(ReduceOp.RedOpType.AVG, torch.float32)
    out, mine = torch.zeros(3), torch.arange(3.0)
    reduce_into(out, [mine], mean, [])
    assert out.equal(mine)


def test_the_tree_of_eleven_ranks_needs_no_more_scratch_than_it_says():
    parts = [torch.tensor([2**rank]) for rank in range(11)]
    out, scratch = torch.empty(1, dtype=torch.int64), torch.empty(buffer_count(11), 1).long()
    reduction = find_reduction(ReduceOp.RedOpType.SUM, torch.int64)
    reduce_into(out, parts, reduction, list(scratch))
    assert out.item() == 2**11 - 1
    assert [part.item() for part in parts] == [2**rank for rank in range(11)]


@ranks(2, 3)
def test_broadcast_and_gathers_move_any_dtype_and_size():
    size, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float32, torch.bool, torch.complex64, torch.int16, torch.float8_e4m3fn):
        for shape in SHAPES:
            everyone = [values(shape, torch.float32, seed=r).to(dtype) for r in range(size)]
            mine = everyone[0].clone()
            gathered = [torch.empty(shape, dtype=dtype) for _ in range(size)]
            dist.all_gather(gathered, mine, group=group())
            whole = torch.empty(size, *shape, dtype=dtype)
            all_gather_single(whole, mine, group=group())
            for r in range(size):
                theirs = mine.clone()
                dist.broadcast(theirs, r, group=group())
                assert _same(gathered[r], theirs), (dtype, shape)
                assert _same(whole[r], theirs), (dtype, shape)
                if r == rank:
                    assert _same(theirs, mine)


def _same(left, right):
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("numel", [0, 1, 1001, 400_003])
@ranks(2, 3)
def test_reduce_and_reduce_scatter_give_what_gloo_gives(numel):
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = noise(size * numel)
    ours, theirs, listed = torch.empty(numel), torch.empty(numel), torch.empty(numel)
    reduce_scatter_single(ours, whole, group=group())
    dist.reduce_scatter(listed, list(whole.chunk(size)) if numel else [ours] * size, group=group())
    everything = whole.clone()
    dist.all_reduce(everything)
    theirs = everything[rank * numel : (rank + 1) * numel]
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(listed, theirs)
    reduced = whole.clone()
    dist.reduce(reduced, size - 1, group=group())
    torch.testing.assert_close(reduced, everything if rank == size - 1 else whole)


@ranks(2, 3)
def test_results_stay_right_when_sizes_follow_each_other_at_random():
    order = random.Random(5)
    size = dist.get_world_size()
    for _ in range(200):
        numel = order.choice([1, 3, 1000, 8_192, 60_000, 262_147, 600_001])
        dtype = order.choice([torch.float32, torch.int64, torch.uint8])
        kind = order.choice(["all_reduce", "broadcast", "gather", "scatter", "barrier"])
        mine = torch.full((numel,), dist.get_rank() + 1, dtype=dtype)
        total = size * (size + 1) // 2
        if kind == "all_reduce":
            dist.all_reduce(mine, group=group())
            assert mine.eq(total).all()
        elif kind == "broadcast":
            dist.broadcast(mine, size - 1, group=group())
            assert mine.eq(size).all()
        elif kind == "gather":
            whole = torch.empty(size * numel, dtype=dtype)
            all_gather_single(whole, mine, group=group())
            assert [part.unique().tolist() for part in whole.chunk(size)] == [
                [rank + 1] for rank in range(size)
            ]
        elif kind == "scatter":
            out = torch.empty_like(mine)
            reduce_scatter_single(out, mine.repeat(size), group=group())
            assert out.eq(total).all()
        else:
            dist.barrier(group=group())


# The staging


def staging_of(size):
    return Staging(memoryview(bytearray(BUFFERS * size * 1000)), size)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_rank_stages_where_it_has_read(size):
    staging = staging_of(size)
    for _ in range(4 * size * BUFFERS):
        use = staging.next_use()
        before = use - BUFFERS
        for rank in range(size):
            others = {*range(size)} - {rank}
            read = {staging.part(before, other, torch.uint8, 1).data_ptr() for other in others}
            assert staging.part(use, rank, torch.uint8, 1).data_ptr() in read
            for other in others:
                room = staging.slot(use, rank, other, torch.uint8, 1)
                room_read = staging.slot(before, other, rank, torch.uint8, 1)
                assert room.data_ptr() == room_read.data_ptr()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_two_stretches_of_the_staging_overlap(size):
    staging, everyone = staging_of(size), range(size)
    whole, room = staging.part_bytes, staging.slot_bytes // 4
    for use in range(2 * size * BUFFERS):
        uses = range(use, use + BUFFERS)  # while one is read the next is written
        for pieces in (
            [staging.part(u, w, torch.uint8, whole) for u in uses for w in everyone],
            [
                staging.slot(u, w, r, torch.float32, room)
                for u in uses
                for w in everyone
                for r in everyone
            ],
        ):
            for number, piece in enumerate(pieces):
                piece.fill_(number)
            assert all(piece.eq(number).all() for number, piece in enumerate(pieces))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_kept_parts_are_those_of_the_next_use(size):
    staging = staging_of(size)
    for use in range(1, 4 * size * BUFFERS):
        for writer, part in enumerate(staging.parts(torch.int32, 3)):
            assert part.numel() == 3
            assert part.data_ptr() == staging.part(use, writer, torch.int32, 3).data_ptr()


# Order, threads, resident buckets


@ranks(2, 3)
def test_asynchronous_works_end_in_order_and_blocking_ones_wait_for_them():
    tensors = [torch.full((50_000,), float(k)) for k in range(20)]
    works = [dist.all_reduce(tensor, group=group(), async_op=True) for tensor in tensors]
    last = torch.ones(1)
    dist.all_reduce(last, group=group())
    assert all(work.is_completed() for work in works)
    for k, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work.wait()
        assert tensor.eq(k * dist.get_world_size()).all()
        assert work.get_future().wait()[0] is tensor
    assert last.item() == dist.get_world_size()


@ranks(2, 3)
def test_callbacks_of_futures_issue_collectives_and_wait_for_them():
    size = dist.get_world_size()

    def summed_again(future):
        values = future.value()[0]
        dist.all_reduce(values, group=group(), async_op=True).get_future().wait()
        dist.all_reduce(values, group=group(), async_op=True).wait()
        dist.all_reduce(values, group=group())
        return values

    for _ in range(20):
        work = dist.all_reduce(torch.ones(3), group=group(), async_op=True)
        done = work.get_future().then(summed_again)
        dist.barrier(group=group())
        assert done.wait().tolist() == [size**4] * 3


@ranks(2)
def test_what_a_callback_issues_comes_before_what_was_issued_after_its_own_collective():
    first, inner, second = torch.ones(1), torch.ones(2), torch.ones(3)
    group()  # ranks that make it wait for each other
    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), 0)  # rank 0 has the first two under way, and the callback
        for tensor in (first, inner, second):
            dist.all_reduce(tensor, group=group())
        return
    later = []
    issued = threading.Event()

    def then(future):
        issued.wait()
        dist.all_reduce(inner, group=group(), async_op=True).wait()
        assert second.tolist() == [1] * 3
        return later[0].wait()  # the thread that would run it is this one

    work = dist.all_reduce(first, group=group(), async_op=True)
    done = work.get_future().then(then)
    later.append(dist.all_reduce(second, group=group(), async_op=True))
    issued.set()
    dist.send(torch.ones(1), 1)
    assert done.wait()
    assert [t.tolist() for t in (first, inner, second)] == [[2], [2] * 2, [2] * 3]


@ranks(2)
def test_a_work_is_completed_when_its_future_is():
    for _ in range(300):
        work = dist.all_reduce(torch.ones(3), group=group(), async_op=True)
        assert work.get_future().wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.get_future().done()


def test_only_an_error_in_the_exchange_itself_ends_a_group():
    told = []
    order = WorkQueue(told.append, lambda: None)
    done = Collective(lambda *_: None)
    with pytest.raises(RuntimeError, match="memory format"):
        order.run(Collective(done.step, [torch.eye(2).to_sparse()]), "of what has no memory", [])
    order.run(done, "goes on", [])
    assert told == []
    with pytest.raises(ZeroDivisionError):
        order.run(Collective(lambda *_: 1 / 0), "half done", [])
    with pytest.raises(BrokenGroupError, match="division by zero"):
        order.run(done, "too late", [])
    assert told == ["division by zero"]


@ranks(2, 3)
def test_a_resident_bucket_is_reduced_where_it_lives():
    size, rank = dist.get_world_size(), dist.get_rank()
    for numel in (0, 1, 100, 500_001):
        bucket = group().resident(numel)
        assert bucket.tensor.eq(0).all()
        address = bucket.tensor.data_ptr()
        for op, expected in (("SUM", size * (size + 1) / 2), ("AVG", (size + 1) / 2)):
            bucket.tensor.fill_(rank + 1)
            bucket.all_reduce(getattr(ReduceOp.RedOpType, op), async_op=True).wait()
            assert bucket.tensor.eq(expected).all()
        bucket.tensor.copy_(noise(numel))
        mine = bucket.tensor.clone()
        bucket.all_reduce()
        dist.all_reduce(mine, group=group())
        assert torch.equal(bucket.tensor, mine)
        assert bucket.tensor.data_ptr() == address


def test_a_resident_bucket_is_reduced_when_the_call_returns_unless_it_is_asynchronous():
    begun, waited = [], []

    class Waited:
        def wait(self):
            waited.append(self)

    bucket = Resident(torch.zeros(1), lambda *how: begun.append(how) or Waited())
    assert bucket.all_reduce() is waited[0]
    assert len(waited) == 1
    bucket.all_reduce(ReduceOp.RedOpType.MAX, True)
    assert len(waited) == 1
    assert begun == [(ReduceOp.RedOpType.SUM, False), (ReduceOp.RedOpType.MAX, True)]


@ranks(2, 3)
def test_a_groups_own_methods_need_no_options():
    size, rank = dist.get_world_size(), dist.get_rank()
    own = group()
    every = torch.arange(float(size))

    def mine():
        return torch.full((2,), float(rank))

    def total(tensor):
        return tensor.tolist() == [every.sum().item()] * 2

    one, two = mine(), mine()
    own.allreduce([one]).wait()
    own.allreduce_coalesced([two]).wait()
    assert total(one)
    assert total(two)
    one, two = mine(), mine()
    own.reduce([one]).wait()
    assert rank != 0 or total(one)
    own.broadcast([two]).wait()
    assert two.tolist() == [0, 0]
    parts = [torch.empty(2) for _ in range(size)]
    own.allgather([parts], [mine()]).wait()
    assert torch.stack(parts)[:, 0].equal(every)
    for gather in (own.all_gather_single, own._allgather_base):
        whole = torch.empty(2 * size)
        gather(whole, mine()).wait()
        assert whole[::2].equal(every)
    wholes = [torch.empty(2 * size) for _ in range(2)]
    own.all_gather_single_coalesced(wholes, [mine(), 2 * mine()]).wait()
    assert wholes[1][::2].equal(2 * every)
    one = torch.empty(2)
    own.reduce_scatter([one], [[mine() for _ in range(size)]]).wait()
    assert total(one)
    for scatter in (own.reduce_scatter_single, own._reduce_scatter_base):
        one = torch.empty(2)
        scatter(one, mine().repeat(size)).wait()
        assert total(one)
    ones = [torch.empty(2), torch.empty(2)]
    own.reduce_scatter_single_coalesced(ones, [mine().repeat(size)] * 2).wait()
    assert all(map(total, ones))
    own.barrier().wait()


@ranks(2)
def test_a_resident_bucket_says_at_once_what_it_cannot_do():
    bucket = group().resident(10)
    with pytest.raises(ValueError, match="float32 cannot be reduced by BAND"):
        bucket.all_reduce(ReduceOp.RedOpType.BAND)
    bucket.all_reduce()


# All of torch.distributed works over it


@ranks(2)
def test_ddp_ends_where_ddp_over_gloo_ends():
    ends = []
    for which in (None, group()):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 5)
        )
        model = DistributedDataParallel(model, process_group=which, bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            inputs = torch.randn(
                8, 20, generator=torch.Generator().manual_seed(step + dist.get_rank())
            )
            model(inputs).square().mean().backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1])


@ranks(2)
def test_torchs_powersgd_hook_trains_over_it():
    """With one bucket as over Gloo; over Gloo several of them stand still."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    def trained(which, megabytes):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(30, 30) for _ in range(4)]
        model = DistributedDataParallel(
            torch.nn.Sequential(*layers), process_group=which, bucket_cap_mb=megabytes
        )
        state = powerSGD_hook.PowerSGDState(which, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(6):
            optimizer.zero_grad()
            torch.manual_seed(10 * step + dist.get_rank())
            model(torch.randn(8, 30)).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.testing.assert_close(trained(group(), 25), trained(None, 25))
    mine = trained(group(), 0.005)
    parts = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(parts, mine, group=group())
    assert torch.equal(*parts)


@ranks(2)
def test_a_compiled_ddp_model_trains_over_it():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4))
    ends = []
    for compiled in (False, True):
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group())
        run = torch.compile(ddp, backend="eager") if compiled else ddp
        for step in range(3):
            run(noise(6, 5) + step).square().mean().backward()
        ends.append(torch.cat([p.grad.flatten() for p in ddp.parameters()]))
    torch.testing.assert_close(*ends)


@ranks(2)
def test_fsdp2_trains_over_it():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    losses = []
    for which in (dist.group.WORLD, group()):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1)
        )
        mesh = DeviceMesh.from_group(which, "cpu")
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(noise(4, 16)).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1])


@ranks(2, 3)
def test_functional_collectives_objects_and_point_to_point_work():
    import torch.distributed._functional_collectives as functional

    size, rank = dist.get_world_size(), dist.get_rank()
    total = functional.all_reduce(torch.ones(4), "sum", group())
    assert total.tolist() == [size] * 4
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    assert gather(torch.tensor([rank]), 0, group()).tolist() == [*range(size)]
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group())
    assert objects == [{"rank": r} for r in range(size)]
    box = [{"from": rank}]
    dist.broadcast_object_list(box, size - 1, group=group())
    assert box == [{"from": size - 1}]
    taken = torch.empty(1)
    sent = dist.isend(torch.tensor([float(rank)]), (rank + 1) % size, group=group())
    dist.recv(taken, (rank - 1) % size, group=group())
    sent.wait()
    assert taken.item() == (rank - 1) % size
    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, torch.full((size,), float(rank)), group=group())
    assert swapped.tolist() == [*range(size)]


@ranks(2)
def test_derivatives_of_functional_collectives_work():
    """Autograd marks the output while the group's thread writes to it."""
    import torch.distributed._functional_collectives as functional

    scatter = (
        getattr(functional, "reduce_scatter_single_autograd", None)
        or functional.reduce_scatter_tensor_autograd
    )
    for _ in range(50):
        values = torch.randn(100_000, requires_grad=True)
        (scatter(values, "sum", 0, group()) * 3).sum().backward()
        assert values.grad.eq(3).all()


@ranks(2)
def test_compiled_collectives_work():
    import torch.distributed._functional_collectives as functional

    which = group()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(values):
        return functional.all_reduce(values * 2, "sum", which) + 1

    assert step(torch.ones(4)).tolist() == [5.0] * 4


@ranks(3)
def test_sub_groups_share_memory_too_and_name_the_ranks_of_the_job():
    mine = dist.new_group([1, 2], backend="instep")
    if dist.get_rank() == 0:
        return
    tensor = torch.tensor([dist.get_rank()])
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == 3
    sides = r"all_reduce SUM float32 \[1\] at .* on rank 1; .* float32 \[2\] at .* on rank 2"
    with pytest.raises(DisagreementError, match=sides):
        dist.all_reduce(torch.ones(dist.get_rank()), group=mine)


def test_every_method_of_torchs_trampoline_is_defined():
    header = "include/torch/csrc/distributed/c10d/PyProcessGroup.hpp"
    text = (Path(torch.__file__).parent / header).read_text()
    looked_up = set(
        re.findall(r"WORK_OVERRIDE\(\s*(?://.*\n\s*)?ProcessGroup,[^\n]*\n\s*(\w+),", text)
    )
    looked_up |= set(
        re.findall(r'get_override\(\s*static_cast<const ProcessGroup\*>\(this\), "(\w+)"', text)
    )
    assert {"allreduce", "broadcast", "send", "recv", "barrier"} <= looked_up
    for kind in (ProcessGroupOverGloo, InstepProcessGroup):
        missing = [name for name in looked_up if name not in dir_of_python(kind)]
        assert missing == []
        assert [name for name in looked_up if not callable(getattr(kind, name))] == []


def dir_of_python(kind):
    return {
        name for cls in kind.__mro__ if cls.__module__.startswith("instep") for name in vars(cls)
    }


def random_sequence(seed, which):
    """Mixed collectives and point-to-point, checked; the same sequence on every rank."""
    order = random.Random(seed)
    size, rank = dist.get_world_size(), dist.get_rank()
    kept = []
    for step in range(12):
        kind = order.choice(["reduce", "object", "gather", "send", "async", "barrier", "bcast"])
        numel = order.choice([1, 10, 3_000, 70_000])
        if kind == "reduce":
            tensor = torch.ones(numel)
            dist.all_reduce(tensor, group=which)
            assert tensor.eq(size).all()
        elif kind == "async":
            kept.append((torch.ones(numel), None))
            kept[-1] = (kept[-1][0], dist.all_reduce(kept[-1][0], group=which, async_op=True))
        elif kind == "object":
            box = [{"step": step}] if rank == seed % size else [None]
            dist.broadcast_object_list(box, seed % size, group=which)
            assert box == [{"step": step}]
        elif kind == "gather":
            objects = [None] * size
            dist.all_gather_object(objects, (rank, step), group=which)
            assert objects == [(r, step) for r in range(size)]
        elif kind == "send":
            tensor = torch.full((numel,), float(step))
            if rank == 0:
                dist.send(tensor, 1, group=which)
            elif rank == 1:
                dist.recv(tensor.zero_(), 0, group=which)
            assert tensor.eq(step).all()
        elif kind == "bcast":
            tensor = torch.full((numel,), rank)
            dist.broadcast(tensor, 1, group=which)
            assert tensor.eq(1).all()
        else:
            dist.barrier(group=which)
    for tensor, work in kept:
        work.wait()
        assert tensor.eq(size).all()


@ranks(2, 3)
def test_random_sequences_of_collectives_never_stall():
    for seed in range(40):
        random_sequence(seed, group())


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(10))
@ranks(2)
def test_a_thousand_random_sequences_never_stall(part):
    for seed in range(100 * part, 100 * part + 100):
        random_sequence(seed, group())


# Nobody hangs


def launch(folder, size, body, *args):
    """Run `body(*args)` on ranks of their own; what each said ("" for a killed one), by rank."""
    running = [
        forkserver.Process(target=live, args=(rank, size, str(folder), body, args))
        for rank in range(size)
    ]
    for process in running:
        process.start()
    try:
        for process in running:
            process.join()
    finally:
        for process in running:
            process.kill()
            process.join()
    said = [folder / f"rank{rank}" for rank in range(size)]
    return [path.read_text() if path.exists() else "" for path in said]


def live(rank, size, folder, body, args):
    gc.freeze()  # what is imported is not looked through
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with open(f"{folder}/stderr{rank}", "w") as stderr:
        os.dup2(stderr.fileno(), 2)
    faulthandler.enable()
    answer = body(rank, f"file://{folder}/store", size, *args)
    Path(folder, f"rank{rank}").write_text(str(answer))


def join(rank, store, size, **options):
    dist.init_process_group("instep", init_method=store, rank=rank, world_size=size, **options)


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def lose_rank_one(rank, store, size, numel, is_async):
    join(rank, store, size)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = lambda: dist.all_reduce(torch.ones(numel), async_op=is_async)  # noqa: E731
    first = error_of(lambda: work().wait() if is_async else work())
    return first + "\n" + error_of(lambda: dist.barrier())


@pytest.mark.parametrize(("numel", "is_async"), [(10, False), (10, True), (1_000_000, False)])
def test_a_killed_rank_is_named(tmp_path, numel, is_async):
    first, then = launch(tmp_path, 2, lose_rank_one, numel, is_async)[0].splitlines()
    assert re.fullmatch(
        rf"PeerDiedError: rank 1 \(pid \d+\) died; this rank was waiting for it in "
        rf"all_reduce\(SUM, float32, {numel} elements\). Its own output says why.",
        first,
    )
    assert then.startswith("BrokenGroupError: an earlier collective of this process group failed")


def lose_rank_one_in_ddp(rank, store, size):
    join(rank, store, size)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: model(torch.ones(1, 4)).sum().backward())


def test_a_killed_rank_is_named_by_ddp(tmp_path):
    said = launch(tmp_path, 2, lose_rank_one_in_ddp)[0]
    assert "rank 1" in said
    assert "died" in said


def disagree(rank, store, size, first, second):
    join(rank, store, size)
    kind, dtype, numel = (first, second)[rank]
    tensor = torch.ones(numel, dtype=getattr(torch, dtype))
    calls = {
        "sum": lambda: dist.all_reduce(tensor),
        "max": lambda: dist.all_reduce(tensor, ReduceOp.MAX),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "barrier": dist.barrier,
    }
    return error_of(calls[kind])


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (("sum", "float32", 1000), "all_reduce SUM float32 [1000]"),
        (("sum", "float64", 10), "all_reduce SUM float64 [10]"),
        (("max", "float32", 10), "all_reduce MAX float32 [10]"),
        (("broadcast", "float32", 10), "broadcast float32 [10] from rank 0"),
        (("barrier", "float32", 10), "barrier"),
    ],
)
def test_ranks_that_disagree_both_hear_both_sides(tmp_path, second, text):
    first_line = disagree.__code__.co_firstlineno + 5
    line = first_line + ("sum", "max", "broadcast", "barrier").index(second[0])
    place = f" at {__file__}:{line}" if second[0] != "barrier" else " at .*"
    for said in launch(tmp_path, 2, disagree, ("sum", "float32", 10), second):
        assert re.match(
            "DisagreementError: the ranks disagree about which collective comes next: "
            + re.escape(f"all_reduce SUM float32 [10] at {__file__}:{first_line} on rank 0; {text}")
            + re.escape(place).replace(r"\.\*", ".*")
            + " on rank 1.",
            said,
        )


def end_after_the_first_look(rank, store, size, waits, looked):
    """Rank 1 looks for rank 0's description before there is one, and again after rank 0 ended."""
    join(rank, store, size)
    wait, describe, ask = Signals._wait, Signals._disagreement, Peer.is_alive

    def tell_and_wait(signals, *args):
        Path(waits).write_text("rank 0 waits")
        wait(signals, *args)

    def describe_later(signals, *args):
        Path(looked).read_text()
        return describe(signals, *args)

    def is_alive_later(peer):
        if peer.rank == 0:
            Path(looked).write_text("rank 1 has looked")
            has_ended(os.pidfd_open(peer.pid), timeout=60)
        return ask(peer)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(Signals, "_wait", tell_and_wait)
            patch.setattr(Signals, "_disagreement", describe_later)
            return error_of(lambda: dist.all_reduce(torch.ones(10)))
        Path(waits).read_text()
        patch.setattr(Peer, "is_alive", is_alive_later)
        return error_of(lambda: dist.all_reduce(torch.ones(10), ReduceOp.MAX))


def test_a_rank_that_ended_after_it_described_its_collective_is_heard(tmp_path):
    fifos = [str(tmp_path / name) for name in ("waits", "looked")]
    for fifo in fifos:
        os.mkfifo(fifo)
    for said in launch(tmp_path, 2, end_after_the_first_look, *fifos):
        assert "all_reduce SUM float32 [10]" in said
        assert "all_reduce MAX float32 [10]" in said


def come_late(rank, store, size, fifo):
    join(rank, store, size, timeout=timedelta(seconds=1 if rank == 0 else 600))
    if rank == 0:
        said = error_of(lambda: dist.all_reduce(torch.ones(3)))
        Path(fifo).write_text("it is over")
        return said
    Path(fifo).read_text()
    dist.all_reduce(torch.ones(3))  # what rank 0 put in is still there
    return error_of(dist.barrier)


def test_a_rank_that_does_not_come_is_named_and_its_peers_hear_who_gave_up(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    early, late = launch(tmp_path, 2, come_late, str(tmp_path / "fifo"))
    assert re.match(
        r"CollectiveTimeoutError: rank 1 \(pid \d+\) did not come to all_reduce\(SUM, float32, "
        r"3 elements\) within 1 s, though every rank is alive",
        early,
    )
    assert (
        " timeout " in early
    )  # the word by which PyTorch's tests, and scripts, know such an error
    assert re.match(
        r"PeerGaveUpError: rank 0 \(pid \d+\) gave up; this rank was waiting for it in barrier. "
        r"It said: rank 1 .*did not come to all_reduce",
        late,
    )


def leave_early(rank, store, size, fifo):
    join(rank, store, size)
    if rank == 1:
        dist.destroy_process_group()
        Path(fifo).read_text()
        return None
    said = error_of(dist.barrier)
    Path(fifo).write_text("it is over")
    return said


def test_a_rank_that_destroyed_its_group_is_named(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    said = launch(tmp_path, 2, leave_early, str(tmp_path / "fifo"))[0]
    assert re.match(r"PeerLeftError: rank 1 \(pid \d+\) has ended, or destroyed its", said)


def test_what_goes_wrong_in_a_group_is_also_a_runtime_error():
    for kind in (PeerDiedError, PeerLeftError, PeerGaveUpError, CollectiveTimeoutError):
        assert issubclass(kind, BrokenGroupError)
    assert issubclass(BrokenGroupError, RuntimeError)


def use_loader_workers(rank, store, size):
    join(rank, store, size)
    bucket = dist.group.WORLD.resident(5)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    data = torch.utils.data.DataLoader(
        range(20), num_workers=2, worker_init_fn=try_to_talk, multiprocessing_context="fork"
    )
    seen = sum(len(batch) for batch in data)
    dist.all_reduce(torch.ones(3))
    bucket.all_reduce()
    return seen


def try_to_talk(_):
    for call in (dist.barrier, lambda: dist.all_reduce(torch.ones(1), async_op=True).wait()):
        with pytest.raises(ForkedChildError, match="forked from a rank"):
            call()
    dist.destroy_process_group()


def test_loader_workers_get_an_error_and_leave_the_group_alone(tmp_path):
    assert launch(tmp_path, 2, use_loader_workers) == ["20", "20"]


def add_up_in_a_crowd(rank, store, size):
    join(rank, store, size)
    for numel in [1, 100_000] * 20:
        tensor = torch.full((numel,), rank + 1)
        dist.all_reduce(tensor)
        assert tensor.eq(size * (size + 1) // 2).all()
    return "fine"


def test_more_ranks_than_cores_make_progress(tmp_path):
    size = 4 * len(os.sched_getaffinity(0))
    assert launch(tmp_path, size, add_up_in_a_crowd) == ["fine"] * size


# Nothing is left behind, and what cannot be had is not used


def join_without_memory(rank, store, size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    join(rank, store, size)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    bucket = dist.group.WORLD.resident(2)
    bucket.tensor.fill_(rank)
    bucket.all_reduce()
    for seed in range(5):
        random_sequence(seed, None)
    dist.barrier()
    dist.destroy_process_group()
    return tensor.tolist() + bucket.tensor.tolist()


def test_without_memory_the_group_talks_over_gloo_and_says_so_in_one_line(tmp_path):
    assert launch(tmp_path, 2, join_without_memory) == ["[2.0, 2.0, 2.0, 1.0, 1.0]"] * 2
    lines = (tmp_path / "stderr0").read_text().splitlines()
    assert [line for line in lines if line.startswith("instep")] == [
        "instep: no shared memory, Gloo instead: 4198400 bytes of memory are not to be had "
        "([Errno 27] File too large) [INS715]"
    ]
    assert "instep" not in (tmp_path / "stderr1").read_text()


@pytest.mark.parametrize(("cores", "spins"), [(1, False), (2, True), (3, True)])
def test_a_rank_spins_only_where_each_has_a_core(monkeypatch, cores, spins):
    own = {0: set(range(cores)), 1: set(range(2))}  # process 1 may have others
    monkeypatch.setattr(os, "sched_getaffinity", own.__getitem__)
    peers = [Peer(rank, os.getpid(), 0) for rank in range(2)]
    memory = memoryview(bytearray(2 * BYTES_PER_RANK))
    made = Signals(memory, 0, peers, lambda: timedelta(seconds=1))
    assert bool(made._spins) is spins
    assert made.ranks == [0, 1]


@pytest.mark.parametrize(
    ("end", "error"),
    [(Signals.leave, PeerLeftError), (lambda peer: peer.abort("boo"), PeerGaveUpError)],
)
def test_a_rank_that_left_and_died_while_it_was_looked_at_has_left(monkeypatch, end, error):
    memory, limit = memoryview(bytearray(2 * BYTES_PER_RANK)), timedelta(seconds=60)
    peers = [Peer(rank, os.getpid(), 0) for rank in range(2)]
    waiting, ending = (Signals(memory, rank, peers, lambda: limit) for rank in range(2))
    monkeypatch.setattr(Peer, "is_alive", lambda peer: end(ending))
    with pytest.raises(error, match="rank 1"):
        waiting.barrier(signature_of("barrier"))


def test_a_peer_counts_as_alive_while_no_file_can_be_opened():
    own, (limit, most) = Peer.of_this_process(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    try:
        alive = own.is_alive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    assert alive


def test_no_memory_is_shared_on_a_machine_that_does_not_keep_the_order_of_writes(monkeypatch):
    monkeypatch.setattr(joining, "obstacle", lambda: "it needs another processor")
    with pytest.raises(joining.CannotShareMemory, match="it needs another processor"):
        joining.join(dist.HashStore(), 0, [0], lambda: timedelta(seconds=1))


def test_a_group_of_one_rank_has_its_host_for_itself_and_still_its_memory():
    alone = {"rank": 0, "pid": 5, "started": 7}
    assert group_by_host([("", "a host", alone)]) == [[alone]]
    assert group_by_host([("", "a host", alone), ("", "another", alone)]) == ""


def test_other_users_may_not_open_the_shared_memory():
    with create_memory(5000) as place:
        made = os.fstat(place.descriptor)
        assert (place.pid, made.st_size, made.st_mode & 0o777) == (os.getpid(), 5000, 0o600)
        with pytest.raises(PermissionError):
            os.ftruncate(place.descriptor, 1)  # whoever touched the rest would get SIGBUS
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(place.descriptor)


def test_another_processor_or_host_is_a_reason_for_gloo():
    assert obstacle("linux", "x86_64") == ""
    refusal = obstacle("linux", "aarch64")
    assert refusal == "it needs linux on x86_64, this is linux on aarch64"
    assert group_by_host([("", "here", {}), (refusal, "", {})]) == refusal


def of_hosts(hosts):
    return group_by_host([("", host, {"rank": rank}) for rank, host in enumerate(hosts)])


def test_the_ranks_of_each_host_share_memory_where_they_are_consecutive():
    first, second, third = ({"rank": rank} for rank in range(3))
    assert of_hosts("aaa") == [[first, second, third]]
    assert of_hosts("aabb") == [[first, second], [third, {"rank": 3}]]
    assert of_hosts("ab") == ""  # nobody to share it with: no word about it
    assert of_hosts("aab") == [[first, second], [third]]
    for apart in ("abab", "abba"):
        assert "not one after the other" in of_hosts(apart)


def too_large_a_bucket(rank, store, size):
    join(rank, store, size)
    limit = 1 << 20 if rank == 0 else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    said = error_of(lambda: dist.group.WORLD.resident(1 << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    return said


def test_a_bucket_that_does_not_fit_is_refused_on_all_ranks_and_the_group_goes_on(tmp_path):
    for said in launch(tmp_path, 2, too_large_a_bucket):
        assert said.startswith("SharedMemoryError: 2 ranks cannot map 8388608 bytes")


def look_for_files(rank, store, size):
    before = set(os.listdir("/dev/shm"))
    join(rank, store, size)
    assert dist.group.WORLD.shares_memory()
    bucket = dist.group.WORLD.resident(1000)
    dist.barrier()
    named = [f for f in set(os.listdir("/dev/shm")) - before if "instep" in f]
    open_files = [
        os.readlink(f.path)
        for f in os.scandir("/proc/self/fd")
        if f.is_symlink() and os.path.lexists(f.path)
    ]
    mapped = Path("/proc/self/maps").read_text().count("memfd:instep")
    bucket.all_reduce()
    return named, [f for f in open_files if "instep" in f], mapped


def test_the_mapping_has_no_name_and_no_open_descriptor(tmp_path):
    assert launch(tmp_path, 2, look_for_files) == ["([], [], 2)"] * 2


def belongings():
    """Descriptors, mappings of the backend, threads, and resident memory in KiB."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:instep"),
        "threads": int(re.search(r"Threads:\s+(\d+)", status)[1]),
        "memory": int(re.search(r"RssAnon:\s+(\d+)", status)[1]),
    }


def make_and_destroy(rank, store, size, rounds):
    seen = []
    for k in range(rounds + 10):
        join(rank, f"{store}{k}", size)
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(10), async_op=True).wait()
        bucket = dist.group.WORLD.resident(100_000)
        bucket.all_reduce()
        del bucket
        dist.barrier()
        dist.destroy_process_group()
        if k in (9, rounds + 9):
            seen.append(belongings())
    return [after - before for before, after in zip(*(s.values() for s in seen), strict=True)]


def many_small_ones(rank, store, size, rounds):
    join(rank, store, size)
    tensor = torch.zeros(10)
    seen = []
    for chunk in range(11):
        for _ in range(rounds // 10):
            dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        if chunk in (0, 10):
            seen.append(belongings())
    return [after - before for before, after in zip(*(s.values() for s in seen), strict=True)]


@pytest.mark.parametrize(
    ("body", "rounds"),
    [
        (make_and_destroy, 20),
        (many_small_ones, 5_000),
        pytest.param(
            make_and_destroy, 1_000, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]
        ),
        pytest.param(many_small_ones, 10**6, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]),
    ],
)
def test_groups_and_collectives_leak_nothing(tmp_path, body, rounds):
    for said in launch(tmp_path, 2, body, rounds):
        descriptors, mappings, threads, kib = map(int, re.findall(r"-?\d+", said))
        assert descriptors <= 0
        assert mappings <= 0
        assert threads <= 0
        assert kib < 4096


def join_by_device(rank, store, size):
    dist.init_process_group("cpu:instep", init_method=store, rank=rank, world_size=size)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return dist.group.WORLD.shares_memory(), tensor.tolist()


def test_it_can_be_asked_for_by_device(tmp_path):
    assert launch(tmp_path, 2, join_by_device) == ["(True, [2.0, 2.0])"] * 2


def test_a_rank_whose_core_another_process_takes_sleeps_for_a_while(monkeypatch):
    memory = memoryview(bytearray(2 * BYTES_PER_RANK))
    peers = [Peer.of_this_process(rank) for rank in range(2)]
    first, second = (Signals(memory, r, peers, lambda: timedelta(seconds=30)) for r in range(2))
    now, waited = 100.0, ""

    def sleep(seconds):
        nonlocal now, waited
        now, waited = now + seconds, waited + "s"
        if waited.endswith("sss"):
            second.barrier(signature_of("barrier"))

    def give_away_a_slice():
        nonlocal now, waited
        now, waited = now + 0.001, waited + "y"

    monkeypatch.setattr(os, "sched_yield", give_away_a_slice)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for milliseconds in (0, 15, 10, 30, 15, 500, 15, 10):
        now += milliseconds / 1000
        first.barrier(signature_of("barrier"))
        waited += " "
    # For 20 milliseconds; as it is soon lost again, for 40, then 80; after a while for 20 again.
    assert waited == "ysss sss ysss sss ysss ysss sss ysss "
