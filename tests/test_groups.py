"""Groups of ranks: only members talk, roots stay ranks of the world."""

import gc
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import instep
from instep.distributed.communication.groups import Group, destroy_group
from instep.distributed.communication.transport import get_transport
from instep.distributed.identity import torch_devices
from instep.distributed.rendezvous import bootstrap
from instep.errors import DisagreementError, NotAMemberError, RendezvousError
from pool import ranks, talking_over


@ranks(3)
def test_every_collective_takes_a_group():
    pair = instep.group([2, 0])
    assert pair.ranks == (0, 2)
    if instep.rank not in pair:
        return
    r = instep.rank
    mine = torch.tensor([float(r), 1.0])
    own = pair.ranks.index(r)
    at_two = r == 2
    assert instep.all_reduce(mine, group=pair).tolist() == [2, 2]
    assert instep.all_reduce(mine, "mean", group=pair).tolist() == [1, 1]
    assert instep.all_reduce(mine + 1, "product", group=pair).tolist() == [3, 4]
    assert instep.reduce(mine, root=2, group=pair).tolist() == ([2, 2] if at_two else [])
    assert instep.reduce_scatter(mine, group=pair).tolist() == [2]
    assert instep.broadcast(mine, root=2, group=pair).tolist() == [2, 1]
    assert [p.tolist() for p in instep.all_gather(mine, group=pair)] == [[0, 1], [2, 1]]
    gathered = instep.gather(mine, root=2, group=pair)
    assert [p.tolist() for p in gathered] == ([[0, 1], [2, 1]] if at_two else [[], []])
    parts = [torch.tensor(7), torch.tensor(8)] if at_two else None
    assert instep.scatter(parts, root=2, group=pair).item() == 7 + own
    assert [p.tolist() for p in instep.all_to_all(mine, group=pair)] == [
        [[0, 1][own]],
        [[2, 1][own]],
    ]
    if at_two:
        assert instep.recv(0, group=pair).tolist() == [0, 1]
    else:
        instep.send(mine, to=2, group=pair)
    assert instep.all_gather_object(r, group=pair) == [0, 2]
    assert instep.broadcast_object(r, root=2, group=pair) == 2
    assert instep.gather_object(r, root=2, group=pair) == ([0, 2] if at_two else None)
    instep.barrier(group=pair)


@ranks(3)
def test_a_rank_that_is_no_member_is_told_so():
    pair = instep.group([0, 2])
    if instep.rank == 1:
        with pytest.raises(NotAMemberError, match=r"the group of ranks 0, 2, but is no member"):
            instep.all_reduce(torch.ones(1), group=pair)
    else:
        with pytest.raises(ValueError, match=r"rank 1 is not in the group of ranks 0, 2"):
            instep.broadcast(torch.ones(1), root=1, group=pair)


@ranks(1, 2, 3)
def test_a_group_of_one_talks_to_itself():
    r = instep.rank
    mine = instep.group([r])
    assert instep.all_reduce(torch.tensor([3.0]), group=mine).tolist() == [3]
    assert instep.broadcast(torch.tensor(r), r, group=mine).item() == r


@ranks(1, 2)
def test_a_group_of_impossible_ranks_is_refused():
    with pytest.raises(ValueError, match="ranks 0, 9 does not exist: the ranks are 0 to"):
        instep.group([0, 9])
    for ranks_ in ([], [0, 0]):
        with pytest.raises(ValueError, match="each of its ranks once, and at least one"):
            instep.group(ranks_)


@ranks(3)
def test_groups_that_overlap_do_not_mix_their_numbers():
    everyone, pair = instep.group(range(3)), instep.group([0, 1])
    for _ in range(5):
        assert instep.all_reduce(torch.ones(()), group=everyone).item() == 3
        if instep.rank in pair:
            assert instep.all_reduce(torch.ones(()), group=pair).item() == 2


@ranks(2)
def test_a_group_waits_as_long_as_init_was_told():
    told = timedelta(seconds=77)
    with mock.patch.object(bootstrap, "default_timeout", return_value=told):
        pair = instep.group([0, 1])
    backend = pair.handle._get_backend(torch.device("cpu"))
    assert backend.options._timeout == told
    backend._set_default_timeout(timedelta(seconds=1))
    if instep.rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            instep.all_reduce(torch.ones(1), group=pair)
    instep.barrier()


@ranks(2)
def test_what_instep_itself_says_travels_where_the_group_can():
    instep.barrier()
    both, of_gpus = dist.new_group(backend="gloo"), dist.new_group(backend="cuda:gloo")
    there_is = mock.patch.object(torch_devices, "accelerator_type", return_value="cuda")
    with there_is, mock.patch("torch.accelerator.current_device_index", return_value=1):
        ways = [get_transport(Group((0, 1), group)) for group in (both, of_gpus)]
    assert [way.control_device for way in ways] == [torch.device("cpu"), torch.device("cuda", 1)]
    assert get_transport().control_device == torch.device("cpu")


@ranks(3)
def test_a_disagreement_in_a_group_names_the_ranks_of_the_world():
    pair = instep.group([1, 2])
    if instep.rank:
        with pytest.raises(DisagreementError, match=r"4\).* on rank 1\D.*5\).* on rank 2\D"):
            instep.all_gather(torch.ones(1, 3 + instep.rank), group=pair)


@ranks(2)
def a_group_comes_to_its_end():
    pair = instep.group([0, 1])
    way = get_transport(pair)
    assert way.all_gather(torch.ones(1)) == [torch.ones(1)] * 2
    destroy_group(pair)
    del pair
    gc.collect()
    for use in (way.all_gather, lambda x: way.all_reduce(x, "sum"), lambda x: way.broadcast(x, 0)):
        with pytest.raises(RendezvousError, match="the ranks have parted"):
            use(torch.ones(1))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_group_that_was_released_is_not_held_and_says_so(backend):
    with talking_over(backend):
        a_group_comes_to_its_end()


@ranks(2)
def test_a_group_has_its_members_and_no_others():
    pair, own = instep.group([0, 1]), instep.group([instep.rank])
    assert [rank in pair for rank in range(3)] == [True, True, False]
    assert [rank in own for rank in range(2)] == [instep.rank == 0, instep.rank == 1]
