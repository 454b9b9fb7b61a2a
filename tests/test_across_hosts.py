"""Hosts of several ranks each: reduced on the host, then between the hosts.

In the pool two or three "hosts" are successive ranks of this one, which share what ranks of one
host would share; real ones, apart in network and process numbers, are in test_hosts.py.
"""

import functools
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, ReduceOp

from instep.distributed.rendezvous import bootstrap
from instep.distributed.shm import across_hosts
from instep.distributed.shm.across_hosts import ProcessGroupAcrossHosts
from instep.distributed.shm.joining import join, obstacle, place_of
from instep.distributed.shm.memory.reduction import buffer_count, find_reduction, reduce_into
from instep.errors import BrokenGroupError, DisagreementError
from pool import ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "none"),
]

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64]
OPS = [
    *("SUM", "AVG", "MAX", "BXOR"),
    *(pytest.param(op, marks=pytest.mark.nightly) for op in ("PRODUCT", "MIN", "BAND", "BOR")),
]
SIZES = [0, 1, 3, 40_000, 700_001]  # none, fewer than ranks, a part, several segments


def group(near, name, seconds=50):
    """As if each `near` successive ranks had a host of their own; or the hosts have so many. Its
    collectives may take `seconds`, once it is made."""
    across_hosts._SEGMENT_BYTES = 1 << 20
    rank, size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore(f"{name}{near}/", bootstrap.store())
    timeout = timedelta(seconds=50)
    limits = [timeout]
    gloo = ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout)
    gloo._set_sequence_number_for_group()
    sizes = [near] * (size // near) if isinstance(near, int) else near
    host, host_rank = place_of(rank, sizes)
    first = rank - host_rank
    here = PrefixStore(f"host{host}/", store)
    exchange, _ = join(here, host_rank, range(first, first + sizes[host]), lambda: limits[0])
    members = ProcessGroupAcrossHosts(store, gloo, f"{name}{near}", exchange, sizes)
    if seconds != 50:
        dist.barrier()
        limits[0] = timedelta(seconds=seconds)
    return members


kept = functools.cache(group)


def over(members, tensor, op=ReduceOp.SUM):
    opts = dist.AllreduceOptions()
    opts.reduceOp = op
    return members.allreduce([tensor], opts)


def values(numel, dtype, rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 4, (numel,), generator=generator).to(dtype)


@pytest.mark.parametrize("op", OPS)
@ranks(4)
def test_it_gives_what_gloo_gives(op):
    kinds = INTEGERS if op.startswith("B") else FLOATS if op == "AVG" else FLOATS + INTEGERS
    for dtype in kinds:
        for numel in SIZES if dtype is torch.float32 else SIZES[:-1]:
            ours, theirs = (values(numel, dtype, dist.get_rank()) for _ in range(2))
            over(kept(2, "kept"), ours, getattr(ReduceOp, op)).wait()
            dist.all_reduce(theirs, getattr(ReduceOp, op))
            torch.testing.assert_close(ours, theirs, msg=f"{dtype} {numel}")


@pytest.mark.parametrize("numel", SIZES)
@ranks(4)
def test_sums_of_two_hosts_follow_the_tree_of_one(numel):
    parts = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    expected = torch.empty(numel)
    scratch = [torch.empty(numel) for _ in range(buffer_count(4))]
    reduce_into(expected, parts, find_reduction(ReduceOp.SUM, torch.float32), scratch)
    mine = parts[dist.get_rank()]
    over(kept(2, "kept"), mine).wait()
    assert torch.equal(mine, expected)


@ranks(6)
def test_three_hosts_have_the_same_bits_everywhere():
    for near, sizes in ((2, SIZES), (3, SIZES[:-1])):
        for numel in sizes:
            mine = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
            parts = [torch.empty(numel) for _ in range(6)]
            dist.all_gather(parts, mine)
            over(kept(near, "kept"), mine).wait()
            torch.testing.assert_close(mine, torch.stack(parts).sum(0), atol=1e-5, rtol=1e-5)
            dist.all_gather(parts, mine)
            assert all(torch.equal(part, mine) for part in parts)


@pytest.mark.parametrize("near", [1, 3, (1, 2, 3)], ids=str)
@pytest.mark.parametrize("numel", [1, 2_500])  # all ranks' values between hosts, or none's
@ranks(6)
def test_small_sums_follow_the_tree_of_one_host(near, numel):
    """`near` 1: six hosts, of which each hears in three rounds of all others."""
    parts = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(6)]
    expected = torch.empty(numel)
    scratch = [torch.empty(numel) for _ in range(buffer_count(6))]
    reduce_into(expected, parts, find_reduction(ReduceOp.SUM, torch.float32), scratch)
    mine = parts[dist.get_rank()]
    over(kept(near, "kept"), mine).wait()
    assert torch.equal(mine, expected)


@pytest.mark.parametrize("near", [2, (3, 1)], ids=str)
@pytest.mark.parametrize("numel", [1, 300, 5_000, 700_001])  # small ones are not
@ranks(4)
def test_only_what_is_sent_between_hosts_is_rounded(near, numel):
    parts = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    first = near if isinstance(near, int) else near[0]
    by_host = [sum(parts[:first]), sum(parts[first:])]
    mine = parts[dist.get_rank()].clone()
    kept(near, "kept").sum_rounded(mine, torch.bfloat16).wait()
    expected = sum(host.bfloat16() for host in by_host).float()
    assert torch.equal(mine, expected) == (numel * 4 > 16 << 10)
    torch.testing.assert_close(mine, sum(by_host), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize(
    "op",
    [
        *("SUM", "MAX"),
        *(
            pytest.param(op, marks=pytest.mark.nightly)
            for op in ("AVG", "BXOR", "PRODUCT", "MIN", "BAND", "BOR")
        ),
    ],
)
@pytest.mark.parametrize("near", [(3, 1), (1, 2, 1)], ids=str)
@ranks(4)
def test_hosts_of_unequal_size_give_what_gloo_gives(near, op):
    kinds = INTEGERS if op.startswith("B") else FLOATS if op == "AVG" else FLOATS + INTEGERS
    for dtype in kinds:
        for numel in SIZES if dtype is torch.float32 else SIZES[:-1]:
            ours, theirs = (values(numel, dtype, dist.get_rank()) for _ in range(2))
            over(kept(near, "kept"), ours, getattr(ReduceOp, op)).wait()
            dist.all_reduce(theirs, getattr(ReduceOp, op))
            torch.testing.assert_close(ours, theirs, msg=f"{dtype} {numel}")


@ranks(4)
def test_hosts_of_unequal_size_have_the_same_bits_everywhere():
    for numel in SIZES:
        mine = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
        parts = [torch.empty(numel) for _ in range(4)]
        over(kept((3, 1), "kept"), mine).wait()
        dist.all_gather(parts, mine)
        assert all(torch.equal(part, mine) for part in parts)


@ranks(4)
def test_works_end_in_order_and_only_the_elements_of_a_strided_tensor_change():
    memory = torch.zeros(4, 6)
    strided = memory[:, ::2].t().fill_(1.0)
    works = [over(kept(2, "kept"), strided) for _ in range(3)]
    works[-1].wait()
    assert all(work.is_completed() for work in works)
    assert memory[:, ::2].eq(4**3).all()
    assert memory[:, 1::2].eq(0).all()


@ranks(4)
def test_who_does_not_come_is_named_on_its_host_and_on_the_other():
    members = group(2, "late", seconds=1)
    if dist.get_rank() != 3:
        with pytest.raises(RuntimeError) as first:
            over(members, torch.ones(10)).wait()
        said = str(first.value)
        late = r"rank 3 .* did not come to all_reduce\(SUM, float32, 10 elements\) within 1 s"
        assert re.search(late, said), said
        others = re.findall(r"rank \d \S+ \S+ gave up", said)
        assert len(others) == {0: 1, 1: 2, 2: 0}[dist.get_rank()], said
        with pytest.raises(BrokenGroupError):
            over(members, torch.ones(10)).wait()
    dist.barrier()
    members.shutdown()


@ranks(4)
def test_who_leaves_is_not_waited_for():
    members = group(2, "left")
    if dist.get_rank() == 1:
        members.shutdown()
    if dist.get_rank() == 0:
        with pytest.raises(BrokenGroupError, match=r"rank 1 .* destroyed its process group"):
            over(members, torch.ones(10)).wait()
    dist.barrier()
    members.shutdown()


@ranks(4)
def test_hosts_that_disagree_say_so():
    """Before a tag was sent along, the bytes of one reduction could be taken for another's."""
    members = group(2, "differing")
    rank = dist.get_rank()
    with pytest.raises(BrokenGroupError if rank % 2 else DisagreementError) as error:
        over(members, torch.ones(3 if rank < 2 else 5)).wait()
    if rank % 2 == 0:
        assert f"another one on rank {2 - rank}" in str(error.value)
    dist.barrier()
    members.shutdown()


@ranks(4)
def test_a_host_that_leaves_is_not_waited_for():
    members = group(2, "host-left")
    if dist.get_rank() >= 2:
        members.shutdown()
    else:
        with pytest.raises(BrokenGroupError) as error:
            over(members, torch.ones(10)).wait()
        if dist.get_rank() == 0:
            assert re.match(r"rank 2 on \S+ has ended, or destroyed its ", str(error.value))
    dist.barrier()
    members.shutdown()
