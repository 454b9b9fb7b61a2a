"""Sums over the ranks of sparse gradients, which do not travel in buckets."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from instep.distributed.communication.objects import all_gather_object
from instep.distributed.communication.tensors import make_sparse


def find_tables(module: nn.Module) -> Iterator[Tensor]:
    """The parameters whose gradients are sparse, on ranks that have rows for them."""
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            yield part.weight


def all_reduce_sparse(grad: Tensor) -> Tensor:
    """The sum over ranks of a sparse gradient. Collective.

    It is dense where any rank's is: that of a table which a dense layer uses, too.
    """
    mine = grad.coalesce() if grad.is_sparse else grad.to_sparse(1).coalesce()
    # Pickled on a GPU, they would arrive on the GPU of that number, which is another rank's.
    parts = all_gather_object((mine.indices().cpu(), mine.values().to("cpu"), grad.is_sparse))
    indices, values, are_sparse = zip(*parts, strict=True)
    total = make_sparse(
        torch.cat(indices, dim=1).to(grad.device), torch.cat(values).to(grad.device), grad.shape
    ).coalesce()
    return total if all(are_sparse) else total.to_dense()


def sum_table(grad: Tensor | None, table: Tensor) -> Tensor:
    """As `all_reduce_sparse`, of the gradient of `table`; None from a rank without one."""
    if grad is None:
        indices = torch.zeros(1, 0, dtype=torch.int64, device=table.device)
        grad = make_sparse(indices, table.new_zeros(0, *table.shape[1:]), table.shape)
    return all_reduce_sparse(grad)
