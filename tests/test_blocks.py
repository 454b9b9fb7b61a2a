"""Blocks of batches. Pure."""

from hypothesis import given
from hypothesis import strategies as st

from instep.training.blocks import Block

sizes = st.integers(1, 9)


@given(total=st.integers(0, 50), size=sizes)
def test_blocks_cover_every_sample_once_in_order(total, size):
    blocks = [Block(rank, size, total) for rank in range(size)]
    covered = [i for block in blocks for i in range(block.start, block.stop)]
    assert covered == list(range(total))
    assert max(b.count for b in blocks) - min(b.count for b in blocks) <= 1


@given(total=st.integers(1, 50), size=sizes)
def test_shares_add_up_to_one(total, size):
    assert abs(sum(Block(0, size, total).fractions()) - 1) < 1e-12


@given(total=st.integers(1, 20), size=sizes)
def test_an_empty_block_has_one_ghost_sample(total, size):
    batch = list(range(total))
    for rank in range(size):
        block = Block(rank, size, total)
        assert block.slice(batch) == (batch[block.start : block.stop] or [0])
        assert block.is_empty == (block.count == 0)
