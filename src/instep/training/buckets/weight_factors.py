"""Gradients of the weights of linear layers, as two factors that are smaller than their product.

The gradient is the sum, over the rows of the whole batch, of an output gradient times an input.
Where the rows are few, the ranks of a host send each other these, and each multiplies its share of
the sums once, with the rows of all ranks: nobody has a gradient of its own rows, which would be
written, read by another rank, and added. (Sufficient factor broadcasting: Xie et al., UAI 2016.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from instep.distributed.communication.transport import Transport

_FEWEST_ELEMENTS = 128 << 10
"""Of a weight: below, the calls of Python take longer than what is saved."""
_LEAST_RATIO = 4
"""Of the elements of a weight to those of all ranks' factors."""
_MOST_ROWS = 64
"""Of all ranks, up to which outer_products.c is faster than torch's product."""
_DTYPES = {torch.float32, torch.float64}


class Factors(NamedTuple):
    """Their product, the sum over the rows, is the gradient of a weight (out, in)."""

    output_grads: Tensor
    """(rows, out)"""
    inputs: Tensor
    """(rows, in)"""

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.inputs)

    def product(self) -> Tensor:
        """The gradient, as autograd computes it."""
        return self.output_grads.t().mm(self.inputs)


def may_be_factored(weight: Tensor) -> bool:
    """Whether gradients of this weight may be factors; the same on all ranks."""
    return weight.dim() == 2 and weight.numel() >= _FEWEST_ELEMENTS and weight.dtype in _DTYPES


def are_small_for(rows: int, weight: Tensor, ranks: int) -> bool:
    """Whether factors with so many rows on each rank are much smaller than the weight."""
    return rows * ranks * sum(weight.shape) * _LEAST_RATIO <= weight.numel()


def no_factors(weight: Tensor) -> Factors:
    """Those of a rank without rows."""
    return Factors(*(weight.new_empty(0, features) for features in weight.shape))


def gather_factors(
    own: Mapping[int, Factors], rows: Mapping[int, Sequence[int]], transport: Transport
) -> dict[int, Factors]:
    """The factors of the rows of all ranks, for each weight in `rows`, which tells how many rows
    each rank has. Collective."""
    gathered: dict[int, Factors] = {}
    parts: list[list[Tensor]] = [[] for _ in range(transport.size)]
    for key, of_ranks in rows.items():
        of_all = [each.new_empty(sum(of_ranks), each.shape[1]) for each in own[key]]
        for mine, each in zip(own[key], of_all, strict=True):
            pieces = each.split(list(of_ranks))
            pieces[transport.rank].copy_(mine)
            for part, piece in zip(parts, pieces, strict=True):
                part.append(piece.view(-1))
        gathered[key] = Factors(*of_all)
    if gathered:
        transport.all_gather_each(parts)
    return gathered


def multiply_shares(
    factors: Mapping[int, Factors], sums: Mapping[int, Tensor], transport: Transport
) -> None:
    """Write this rank's share of the products to these (out, in)."""
    shares = _shares([sums[key] for key in factors], transport.size)[transport.rank]
    for (key, each), rows in zip(factors.items(), shares, strict=True):
        if rows.start < rows.stop:
            _multiply(each, rows, sums[key][rows])


def _multiply(factors: Factors, rows: slice, out: Tensor) -> None:
    """Write these rows of the product to `out`."""
    output_grads, inputs = factors.output_grads[:, rows], factors.inputs
    compiled = _compiled()
    if (
        compiled is None
        or inputs.dtype != torch.float32
        or factors.rows > _MOST_ROWS
        or torch.get_num_threads() > 1
    ):
        torch.mm(output_grads.t(), inputs, out=out)
        return
    left, right = output_grads.data_ptr(), inputs.data_ptr()
    sizes = factors.rows, inputs.shape[1], len(out)
    compiled.add_products(left, output_grads.stride(0), right, *sizes, out.data_ptr())


@cache
def _compiled() -> ModuleType | None:
    """outer_products.c; None where setup.py has built none."""
    try:
        from instep.training.buckets import _outer_products
    except ImportError:  # or built for another machine
        return None
    return _outer_products


def multiply_and_gather(
    factors: Mapping[int, Factors], like: Mapping[int, Tensor], transport: Transport
) -> dict[int, Tensor]:
    """The products, in memory of each rank: multiplied by shares. Collective."""
    products = {key: torch.empty_like(like[key]) for key in factors}
    multiply_shares(factors, products, transport)
    if products:
        shares = _shares([*products.values()], transport.size)
        transport.all_gather_each(
            [
                [total[rows].view(-1) for total, rows in zip(products.values(), each, strict=True)]
                for each in shares
            ]
        )
    return products


def _shares(sums: Sequence[Tensor], ranks: int) -> list[list[slice]]:
    """For each rank, which rows of each of these it multiplies: as many elements as the others."""
    ends = list(accumulate(map(Tensor.numel, sums)))
    shares: list[list[slice]] = [[] for _ in range(ranks)]
    for total, end in zip(sums, ends, strict=True):
        rows, width = total.shape
        begin = end - total.numel()
        edges = (-(-(ends[-1] * rank // ranks - begin) // width) for rank in range(ranks))
        cuts = [*(min(max(edge, 0), rows) for edge in edges), rows]
        for share, cut in zip(shares, pairwise(cuts), strict=True):
            share.append(slice(*cut))
    return shares
