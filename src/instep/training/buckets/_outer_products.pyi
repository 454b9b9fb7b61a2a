"""outer_products.c: tensors of float32 are given by the address of their values."""

def add_products(
    left: int, stride: int, right: int, terms: int, width: int, rows: int, out: int, /
) -> None:
    """Write the sum, over so many terms, of the outer products of what is in `left`, where terms
    are `stride` apart, and `right` (terms, width) to `out` (rows, width)."""
