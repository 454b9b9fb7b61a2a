"""What a collective of the shared-memory backend hands back, and what it leaves to Gloo."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BroadcastOptions,
    ReduceOp,
    distributed_c10d,
)

from instep.distributed.communication.tensors import make_sparse
from instep.errors import CollectiveTimeoutError
from pool import ranks
from test_shm import all_gather_single, group

pytestmark = pytest.mark.slow


@ranks(2, 3)
def test_a_blocking_collective_is_over_when_it_returns():
    options = AllreduceOptions()
    options.asyncOp = False
    x = torch.ones(3)
    work = group().allreduce([x], options)
    total = [dist.get_world_size()] * 3
    assert x.tolist() == total
    assert work.is_completed()
    assert work.is_success()
    assert work.wait()
    assert work.result()[0] is x
    assert work.get_future().wait()[0] is x


@ranks(2, 3)
def test_a_profiler_sees_the_collectives():
    blocking = AllreduceOptions()
    blocking.asyncOp = False
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        group().allreduce([torch.ones(3)], blocking)
        group().broadcast([torch.ones(3)]).wait()
    events = [event.name for event in profiler.events() if event.name.startswith("instep:")]
    assert events == ["instep:all_reduce", "instep:broadcast"]


@ranks(2, 3)
def test_bytes_are_gathered_after_what_was_issued_before():
    rank, n = dist.get_rank(), dist.get_world_size()
    for k in range(100):
        x = torch.full((3,), float(rank + k))
        work = group().allreduce([x])
        assert group().all_gather_bytes_now(bytes([rank, k] * 4)) == b"".join(
            bytes([r, k] * 4) for r in range(n)
        )
        work.wait()
        assert x.tolist() == [sum(range(n)) + n * k] * 3


@ranks(2, 3)
def test_a_collective_under_way_can_be_asked_how_it_does():
    rank, n, store = dist.get_rank(), dist.get_world_size(), distributed_c10d._get_default_store()
    x = torch.ones(3) + rank
    if rank == n - 1:
        store.wait(["the others have asked"])
    work = group().allreduce([x])
    if rank != n - 1:
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        with pytest.raises(CollectiveTimeoutError, match="all_reduce"):
            work.wait(timedelta(milliseconds=1))
        if store.add("asked", 1) == n - 1:
            store.set("the others have asked", "1")
    future = work.get_future()
    assert work.wait(timedelta(seconds=40))
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is x
    assert torch.equal(future.wait()[0], x)
    assert x.tolist() == [n * (n + 1) / 2] * 3
    group().barrier().wait()
    if rank == 0:
        for key in ("asked", "the others have asked"):
            store.delete_key(key)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG], ids=str)
@ranks(2, 3)
def test_several_tensors_may_be_reduced_in_one_call(op):
    options = AllreduceCoalescedOptions()
    options.reduceOp = op
    rank, n = dist.get_rank(), dist.get_world_size()
    one, other = torch.full((3,), float(rank)), torch.arange(4.0).view(2, 2) * rank
    group().allreduce_coalesced([one, other], options).wait()
    whole = {ReduceOp.SUM: n * (n - 1) / 2, ReduceOp.MAX: n - 1, ReduceOp.AVG: (n - 1) / 2}[op]
    assert one.tolist() == [whole] * 3
    assert other.tolist() == [[0, whole], [2 * whole, 3 * whole]]
    again = [torch.ones(1), torch.ones(2)]
    group().allreduce_coalesced(again).wait()
    assert torch.cat(again).tolist() == [n] * 3


@ranks(2, 3)
def test_all_ranks_pass_a_monitored_barrier_among_collectives_that_are_under_way():
    n, x = dist.get_world_size(), torch.ones(3)
    work = dist.all_reduce(x, group=group(), async_op=True)
    dist.monitored_barrier(group(), timedelta(seconds=30))
    dist.monitored_barrier(group(), 30.0, wait_all_ranks=True)
    dist.all_reduce(x, group=group())
    work.wait()
    assert x.tolist() == [n * n] * 3
    dist.monitored_barrier(timeout=timedelta(seconds=30))  # the pool's own world talks over Gloo


@ranks(3)
def test_a_monitored_barrier_names_the_ranks_that_do_not_come():
    for milliseconds, wait_all_ranks, said in (
        (100, True, "Ranks 1, 2 failed to pass monitoredBarrier in 100 ms"),
        (100, False, "Rank 1 failed to pass monitoredBarrier in 100 ms"),
        (0, False, "Rank 0 timed out in monitoredBarrier after 0 ms"),
    ):
        others = dist.new_group(backend="instep")
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=said):
                dist.monitored_barrier(others, timedelta(milliseconds=milliseconds), wait_all_ranks)
        total = torch.ones(1)
        dist.all_reduce(total, group=others)
        assert total.item() == 3, "shared memory goes on"
        dist.destroy_process_group(others)


@ranks(2, 3)
def test_joined_ddp_divides_by_the_ranks_that_still_have_inputs():
    rank, n = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(1, 1, bias=False)
    ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group())
    grads = []
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(n - rank):  # the last rank ends first
            model.zero_grad()
            ddp(torch.full((1, 1), float(10**step * (rank + 1)))).sum().backward()
            grads.append(model.weight.grad.item())
    active = [range(n - step) for step in range(n - rank)]
    means = [10**step * sum(r + 1 for r in each) / len(each) for step, each in enumerate(active)]
    assert grads == pytest.approx(means)


@ranks(2)
def test_what_it_does_not_know_is_answered_by_gloo():
    rank = dist.get_rank()
    sparse = torch.eye(3).to_sparse() * (rank + 1)
    dist.all_reduce(sparse, group=group())
    assert torch.equal(sparse.to_dense(), torch.eye(3) * 3)
    with pytest.raises((RuntimeError, ValueError)):
        group().allreduce_coalesced([torch.ones(1), torch.ones(1).double()]).wait()
    with pytest.raises((RuntimeError, ValueError)):
        group().allgather([[torch.ones(1)] * 2], [torch.ones(1).double()]).wait()
    with pytest.raises((RuntimeError, ValueError)):
        all_gather_single(torch.ones(3), torch.ones(2), group=group())
    total = torch.ones(1)
    dist.all_reduce(total, group=group())
    assert total.item() == 2, "the group goes on"


@ranks(2, 3)
def test_methods_of_a_group_take_one_tensor_as_gloos_do():
    rank, n = dist.get_rank(), dist.get_world_size()
    each = [torch.full((2,), float(r)) for r in range(n)]
    x = each[rank].clone()
    assert group().allreduce(x, op=ReduceOp.MAX).get_future().wait()[0] is x
    assert x.tolist() == [n - 1] * 2
    x = each[rank].clone()
    group().broadcast(x, root=n - 1).wait()
    assert x.tolist() == [n - 1] * 2
    x = each[rank].clone()
    group().reduce(x, 1, ReduceOp.SUM).wait()
    assert x.tolist() == ([n * (n - 1) / 2] * 2 if rank == 1 else [rank] * 2)
    found = [torch.empty(2) for _ in each]
    group().allgather(found, each[rank]).wait()
    assert torch.equal(torch.stack(found), torch.stack(each))
    found = [torch.empty(2) for _ in each] if rank == 0 else []
    group().gather(found, each[rank], root=0).wait()
    assert rank != 0 or torch.equal(torch.stack(found), torch.stack(each))
    group().scatter(x, each if rank == 1 else [], root=1).wait()
    assert torch.equal(x, each[rank])
    group().reduce_scatter(x, each, op=ReduceOp.SUM).wait()
    assert torch.equal(x, n * each[rank])
    assert group().barrier(timeout=timedelta(seconds=40)).wait()
    group().reduce_scatter(input=each, output=x).wait()
    assert torch.equal(x, n * each[rank])
    for wrong in ({"tensors": [x], "roots": 1}, {}):
        with pytest.raises(TypeError, match=r"allreduce\(\) does not take"):
            group().allreduce(**wrong)


@pytest.mark.parametrize("method", ["allreduce", "allreduce_coalesced", "broadcast", "reduce"])
@ranks(2)
def test_an_empty_list_of_tensors_is_refused_and_the_group_goes_on(method):
    with pytest.raises(RuntimeError, match=r"invalid root tensor|non-empty|single-element"):
        getattr(group(), method)([])
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2


@ranks(2)
def test_sparse_tensors_in_a_list_are_refused_in_gloos_words():
    sparse = make_sparse(torch.tensor([[0]]), torch.tensor([1.0]), (1,))
    with pytest.raises(RuntimeError, match="unsupported layout"):
        group().allreduce_coalesced([sparse, sparse.clone()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@ranks(3, 4)
def test_sums_of_half_precision_are_rounded_once(dtype):
    n, rank = dist.get_world_size(), dist.get_rank()
    rows = torch.randn(n, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        x = rows[rank].clone()
        dist.all_reduce(x, op)
        exact = rows.float().sum(0) / (n if op == ReduceOp.AVG else 1)
        assert torch.equal(x, exact.to(dtype))


@ranks(2, 3)
def test_a_mean_in_half_precision_does_not_overflow():
    x = torch.full((5,), 40000.0, dtype=torch.float16)
    dist.all_reduce(x, ReduceOp.AVG)
    assert x.tolist() == [40000.0] * 5


@ranks(2)
def test_a_root_tensor_that_is_not_there_is_refused():
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 1
    with pytest.raises(RuntimeError, match="invalid root tensor"):
        group().broadcast([torch.ones(1)], options)
