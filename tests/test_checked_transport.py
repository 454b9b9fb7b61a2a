"""Something that may fail on some ranks only is tried so that no rank is left waiting."""

import contextlib
import re

import pytest
import torch

import instep
from instep.distributed.communication.objects import broadcast_object
from instep.distributed.communication.transport import get_transport
from instep.errors import ShardedCallError
from instep.unedited.sharded_call.compare.checked_transport import attempt
from pool import ranks, run

BRANCH = re.compile(
    r"it takes another branch on rank 1, which (calls|has).*, than on rank 0, which"
)


def talk(transport):
    """A bit of everything; returns what this rank got."""
    mine = torch.arange(3.0) + instep.rank
    total = mine.clone()
    transport.all_reduce_each([total], "sum")
    last = instep.world_size - 1
    got = [
        total,
        instep.all_reduce(mine, "max"),
        instep.reduce(mine, root=last),
        instep.broadcast(mine, last),
        *instep.all_gather(mine),
        *instep.all_to_all(mine),
    ]
    if instep.rank == 0:
        instep.send(mine, last)
        transport.send_object("an object", last)
    elif instep.rank == last:
        got.append(instep.recv(0))
        got.append(torch.tensor(len(transport.recv_object(0))))
    objects = [instep.all_gather_object(instep.rank), broadcast_object(instep.rank, last)]
    return [tensor.tolist() for tensor in got], objects


@ranks(2, 3)
def test_every_collective_is_itself_in_a_trial():
    assert attempt(talk, get_transport()) == (talk(get_transport()), "")
    tried = []
    attempt(tried.append, get_transport())
    assert talk(tried[0]) == talk(get_transport()), (
        "once it has ended, a trial is a plain transport"
    )


class CountingTransport:
    """A transport whose other rank always does the same, and that counts what is gathered."""

    rank, size, control_device = 0, 2, torch.device("cpu")

    def __init__(self):
        self.gathered = 0

    def all_gather(self, tensor):
        self.gathered += 1
        return [tensor, tensor]

    def all_gather_object(self, value):
        return [value, value]


def test_once_it_has_ended_a_trial_costs_no_messages_of_its_own():
    transport, tried = CountingTransport(), []
    assert attempt(tried.append, transport) == (None, "")
    ended = transport.gathered
    assert ended > 0
    assert tried[0].all_gather_object(5) == [5, 5]
    assert transport.gathered == ended
    tried[0].all_gather(torch.ones(1))
    assert transport.gathered == ended + 1


def different(step):
    """Rank 1 does something else than the others; nobody waits for ever."""
    one = torch.ones(2)
    steps = {
        "all_reduce": lambda transport, odd: transport.all_reduce(one, "max" if odd else "sum"),
        "all_reduce_each": lambda transport, odd: transport.all_reduce_each(
            [one] * (1 + odd), "sum"
        ),
        "all_reduce_each by op": lambda transport, odd: transport.all_reduce_each(
            [one], "sum" if odd else "max"
        ),
        "reduce": lambda transport, odd: transport.reduce(one, "sum", int(odd)),
        "broadcast": lambda transport, odd: transport.broadcast(one, int(odd)),
        "broadcast of another shape": lambda transport, odd: transport.broadcast(
            torch.ones(2 + odd), 0
        ),
        "all_gather": lambda transport, odd: transport.all_gather(torch.ones(2 + odd)),
        "all_to_all": lambda transport, odd: (
            transport.all_gather(one) if odd else transport.all_to_all([one], [2])
        ),
        "all_gather_object": lambda transport, odd: odd or transport.all_gather_object(1),
        "broadcast_object": lambda transport, odd: transport.broadcast_object(1, int(odd)),
    }
    odd = instep.rank == 1
    result, why = attempt(
        lambda transport: (steps[step](transport, odd), "something")[1], get_transport()
    )
    return result, why


def caught():
    def action(transport):
        with contextlib.suppress(Exception):
            instep.all_reduce(torch.ones(2 + instep.rank))

    return attempt(action, get_transport())


def test_a_mismatch_that_the_script_catches_is_one_all_the_same():
    for result, why in run(2, caught):
        assert result is None
        assert why == (
            "it takes another branch on rank 1, which calls all_reduce of ((3, 'float32'), 'sum'), "
            "than on rank 0, which calls all_reduce of ((2, 'float32'), 'sum')"
        )


STEPS = [
    *("all_reduce", "all_reduce_each", "all_reduce_each by op", "reduce", "broadcast"),
    *("broadcast of another shape", "all_gather", "all_to_all", "all_gather_object"),
    "broadcast_object",
]


@pytest.mark.parametrize("step", STEPS)
def test_ranks_that_take_another_step_all_stop(step):
    for result, why in run(3, different, step):
        assert result is None
        assert BRANCH.match(why)


def fail_on_rank_1(error):
    def action(transport):
        if instep.rank == 1:
            raise error
        return instep.all_reduce(torch.ones(1))

    return attempt(action, get_transport())


def test_a_rank_that_fails_says_why_and_the_others_go_on():
    failure = "it cannot be computed for some of its rows (ValueError: so it is)"
    assert run(3, fail_on_rank_1, ValueError("so it is.")) == [
        (None, f"on rank 1 {failure}"),
        (None, failure),
        (None, f"on rank 1 {failure}"),
    ]
    assert run(3, fail_on_rank_1, ShardedCallError("it has reasons"))[1] == (None, "it has reasons")
