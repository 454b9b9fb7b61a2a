"""Blocks of batches, and which batch a forward belongs to. Pure."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.training.blocks import Block, Deliveries, block_of, deliver

sizes = st.integers(1, 9)


@given(total=st.integers(0, 50), size=sizes)
def test_blocks_cover_every_sample_once_in_order(total, size):
    blocks = [Block(rank, size, total) for rank in range(size)]
    covered = [i for block in blocks for i in range(block.start, block.stop)]
    assert covered == list(range(total))
    assert max(b.count for b in blocks) - min(b.count for b in blocks) <= 1


@given(total=st.integers(1, 50), size=sizes)
def test_shares_add_up_to_one(total, size):
    assert abs(sum(Block(0, size, total).shares()) - 1) < 1e-12


@given(total=st.integers(1, 20), size=sizes)
def test_an_empty_block_has_one_ghost_sample(total, size):
    batch = list(range(total))
    for rank in range(size):
        block = Block(rank, size, total)
        assert block.rows(batch) == (batch[block.start : block.stop] or [0])
        assert block.empty == (block.count == 0)


@given(totals=st.lists(st.integers(1, 9), min_size=1, max_size=9), ahead=st.integers(0, 3))
def test_a_loop_that_fetches_ahead_works_on_the_batches_in_order(totals, ahead):
    blocks = [Block(0, 2, total) for total in totals]
    deliveries = Deliveries()
    source = iter(blocks)

    def take():
        block = next(source, None)
        deliveries.take(block)
        return block

    queue = [take() for _ in range(ahead + 1)]
    worked_on = []
    while (block := queue.pop(0)) is not None:
        assert deliveries.of_next_forward() == block
        assert deliveries.of_next_forward() == block  # a second model on the same batch
        worked_on.append(block)
        queue.append(take())
        if len(totals) <= ahead:
            return  # the data ended before the loop's rhythm could be seen
    assert worked_on == blocks


def test_the_batchs_own_tensors_and_their_views_are_recognised():
    deliveries = Deliveries()
    first, second = torch.ones(4, 3), torch.ones(5, 3)
    deliver({"x": first}, Block(0, 2, 8), deliveries)
    deliver([second], Block(0, 2, 11), deliveries)
    assert block_of((first.view(12),)) == Block(0, 2, 8)
    assert block_of({"input": second}) == Block(0, 2, 11)
