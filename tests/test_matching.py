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


def heard(ledger: MessageTable, *said: tuple[int, Request]) -> list[Response]:
    return [verdict for rank, wish in said for verdict in ledger.hear(rank, wish, 0.0)]


def faults(*wishes: Request) -> str:
    (verdict,) = heard(MessageTable(3), *enumerate(wishes))
    return str(verdict.fault)


@given(st.data())
def test_every_rank_may_come_in_an_order_of_its_own(data):
    names = ["a", "b", "c", "d"]
    orders = [data.draw(st.permutations(named(*names))) for _ in ALL]
    turns = data.draw(st.permutations([rank for rank in ALL for _ in names]))
    ledger = MessageTable(3)
    verdicts = heard(ledger, *((rank, orders[rank].pop(0)) for rank in turns))
    assert sorted(verdict.wish.name for verdict in verdicts) == names
    assert all(verdict.fault is None for verdict in verdicts)
    assert ledger.empty


def test_a_group_waits_for_its_members_only():
    pair = replace(LOSS, members=(0, 2))
    ledger = MessageTable(3)
    assert heard(ledger, (0, pair), (1, LOSS), (0, LOSS)) == []
    assert heard(ledger, (2, pair)) == [Response(pair)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "allgather"}, "the kind of loss: allreduce on ranks 0, 2; allgather on rank 1"),
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
    assert words in faults(LOSS, replace(LOSS, **change), LOSS)


def test_gathered_rows_may_differ_and_are_told_to_all():
    wishes = [
        Request("x", "allgather", ALL, "float32", "cpu", ((rows, 5), (1,))) for rows in (2, 0, 3)
    ]
    (verdict,) = heard(MessageTable(3), *enumerate(wishes))
    assert (verdict.fault, verdict.rows) == (None, ((2, 1), (0, 1), (3, 1)))
    assert "(any, 5), (any) on ranks 0, 2; (any, 6)" in faults(
        wishes[0], replace(wishes[1], shapes=((0, 6), (1,))), wishes[2]
    )


def test_a_rank_that_joined_is_not_waited_for_in_a_sum():
    ledger, join = MessageTable(3), Request(JOIN, JOIN, ALL)
    assert heard(ledger, (0, LOSS), (1, join)) == []
    assert heard(ledger, (2, LOSS)) == [Response(LOSS)]
    assert heard(ledger, (2, LOSS), (2, join)) == []
    assert heard(ledger, (0, join)) == [Response(LOSS), Response(join, last=0)]
    assert heard(ledger, (0, LOSS), (1, LOSS)) == [], "after that, all are waited for again"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"kind": "broadcast", "op": ""},
            "is of the kind broadcast, and rank 1 already called join()",
        ),
        (
            {"kind": "allgather", "op": ""},
            "is of the kind allgather, and rank 1 already called join()",
        ),
        ({"op": "max"}, "is of the kind allreduce (max), and rank 1 already called join()"),
    ],
)
def test_a_rank_that_joined_cannot_take_part_in_what_is_no_sum(change, words):
    wish = replace(LOSS, **change)
    verdicts = heard(MessageTable(3), (1, Request(JOIN, JOIN, ALL)), (0, wish), (2, wish))
    assert words in str(verdicts[0].fault)
    assert "train.py:7" in str(verdicts[0].fault)


def test_who_waits_for_whom_is_said_once():
    ledger = MessageTable(3)
    ledger.hear(2, LOSS, 10.0)
    ledger.hear(0, LOSS, 11.0)
    assert ledger.new_delays(69.0, 60.0) == []
    (delay,) = ledger.new_delays(70.0, 60.0)
    assert str(delay) == "ranks 0, 2 submitted loss 60 s ago at train.py:7; rank 1 did not yet."
    assert ledger.new_delays(90.0, 60.0) == []
    assert len(ledger.delays(90.0, 60.0)) == 1
    ledger.hear(1, LOSS, 91.0)
    assert ledger.delays(200.0, 60.0) == []
    ledger.hear(1, LOSS, 200.0)
    assert len(ledger.new_delays(261.0, 60.0)) == 1
