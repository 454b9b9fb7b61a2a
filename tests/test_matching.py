"""What is ready on each rank in, one agreed order out: no process is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.distributed.negotiation.message_table import JOIN, MessageTable, Request, Response

ALL = (0, 1, 2)
LOSS = Request("loss", "allreduce", ALL, "float32", "cpu", ((3,),), op="sum", line="train.py:7")


def named(*names: str) -> list[Request]:
    return [replace(LOSS, name=name) for name in names]


def respond(table: MessageTable, *said: tuple[int, Request]) -> list[Response]:
    return [response for rank, request in said for response in table.add(rank, request, 0.0)]


def errors(*requests: Request) -> str:
    (response,) = respond(MessageTable(3), *enumerate(requests))
    return str(response.error)


@given(st.data())
def test_every_rank_may_come_in_an_order_of_its_own(data):
    names = ["a", "b", "c", "d"]
    orders = [data.draw(st.permutations(named(*names))) for _ in ALL]
    turns = data.draw(st.permutations([rank for rank in ALL for _ in names]))
    table = MessageTable(3)
    responses = respond(table, *((rank, orders[rank].pop(0)) for rank in turns))
    assert sorted(response.request.name for response in responses) == names
    assert all(response.error is None for response in responses)
    assert table.is_empty


def test_a_group_waits_for_its_members_only():
    pair = replace(LOSS, members=(0, 2))
    table = MessageTable(3)
    assert respond(table, (0, pair), (1, LOSS), (0, LOSS)) == []
    assert respond(table, (2, pair)) == [Response(pair)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"collective": "allgather"},
            "the collective of loss: allreduce on ranks 0, 2; allgather on rank 1",
        ),
        ({"dtype": "int32"}, "the dtype of loss: float32 on ranks 0, 2; int32 on rank 1"),
        ({"device": "cuda"}, "the device of loss: cpu on ranks 0, 2; cuda on rank 1"),
        ({"op": "min"}, "the reduction of loss: sum on ranks 0, 2; min on rank 1"),
        ({"root": 1}, "the root of loss: root None on ranks 0, 2; root 1 on rank 1"),
        ({"shapes": ((3,), (4,))}, "the number of tensors of loss: 1 tensors on ranks 0, 2; 2"),
        ({"shapes": ((4,),)}, "the shape of loss: (3) on ranks 0, 2; (4) on rank 1"),
        ({"scales": (0.5, 1.0)}, "postscale 1 on ranks 0, 2; prescale 0.5 and postscale 1 on"),
    ],
)
def test_ranks_that_mean_different_things_by_a_name_all_get_the_same_error(change, words):
    assert words in errors(LOSS, replace(LOSS, **change), LOSS)


def test_gathered_rows_may_differ_and_are_told_to_all():
    requests = [
        Request("x", "allgather", ALL, "float32", "cpu", ((rows, 5), (1,))) for rows in (2, 0, 3)
    ]
    (response,) = respond(MessageTable(3), *enumerate(requests))
    assert (response.error, response.rows) == (None, ((2, 1), (0, 1), (3, 1)))
    assert "(any, 5), (any) on ranks 0, 2; (any, 6)" in errors(
        requests[0], replace(requests[1], shapes=((0, 6), (1,))), requests[2]
    )


def test_a_rank_that_joined_is_not_waited_for_in_a_sum():
    table, join = MessageTable(3), Request(JOIN, JOIN, ALL)
    assert respond(table, (0, LOSS), (1, join)) == []
    assert respond(table, (2, LOSS)) == [Response(LOSS)]
    assert respond(table, (2, LOSS), (2, join)) == []
    assert respond(table, (0, join)) == [Response(LOSS), Response(join, last=0)]
    assert respond(table, (0, LOSS), (1, LOSS)) == [], "after that, all are waited for again"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"collective": "broadcast", "op": ""},
            "is the collective broadcast, and rank 1 already called join()",
        ),
        (
            {"collective": "allgather", "op": ""},
            "is the collective allgather, and rank 1 already called join()",
        ),
        ({"op": "max"}, "is the collective allreduce (max), and rank 1 already called join()"),
    ],
)
def test_a_rank_that_joined_cannot_take_part_in_what_is_no_sum(change, words):
    request = replace(LOSS, **change)
    responses = respond(MessageTable(3), (1, Request(JOIN, JOIN, ALL)), (0, request), (2, request))
    assert words in str(responses[0].error)
    assert "train.py:7" in str(responses[0].error)


def test_who_waits_for_whom_is_said_once():
    table = MessageTable(3)
    table.add(2, LOSS, 10.0)
    table.add(0, LOSS, 11.0)
    assert table.find_stalled(69.0, 60.0) == []
    (delay,) = table.find_stalled(70.0, 60.0)
    assert str(delay) == "ranks 0, 2 submitted loss 60 s ago at train.py:7; rank 1 did not yet."
    assert table.find_stalled(90.0, 60.0) == []
    assert len(table.stalled(90.0, 60.0)) == 1
    table.add(1, LOSS, 91.0)
    assert table.stalled(200.0, 60.0) == []
    table.add(1, LOSS, 200.0)
    assert len(table.find_stalled(261.0, 60.0)) == 1
