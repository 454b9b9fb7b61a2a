"""mersenne_twister.c: tensors are given by the address of their values."""

def draw_ones(state: int, passed: int, count: int, limit: int, out: int, /) -> None:
    """Pass over some elements, then draw `count`: 1.0 where 53 random bits are less than `limit`.

    `state`: of torch.Generator.get_state(), which goes on. Raises ValueError if it is none.
    """
