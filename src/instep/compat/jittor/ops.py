"""`jittor_mpi_core.ops`: collectives with Jittor's names, results and gradients.

The loss that is differentiated is the sum of all ranks' losses, as in Jittor; every rank must run
the backward. In a job of one process each is the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from instep.distributed.communication.collectives import all_reduce, broadcast, reduce
from instep.distributed.communication.errors import UnknownOpError
from instep.distributed.rendezvous import bootstrap

_OPS = {"add": "sum", "sum": "sum", "mean": "mean"}


def mpi_all_reduce(x: Tensor, op: str = "add") -> Tensor:
    """The sum ("add", "sum") or mean of all ranks' tensors, on every rank.

    Args:
        x: any shape and dtype (a mean: floating point), the same on all ranks.

    The gradient is the sum, or mean, of the incoming ones. Raises UnknownOpError. Collective.
    """
    return all_reduce(x, _op(op))


def mpi_reduce(x: Tensor, op: str = "add", root: int = 0) -> Tensor:
    """The sum or mean of all ranks' tensors at `root`, zeros elsewhere.

    The gradient is root's, on every rank (divided by the number of ranks for a mean). Raises
    UnknownOpError, and ValueError for a root that does not exist. Collective.
    """
    reduced = reduce(x, _op(op), _root(root))
    if reduced.shape == x.shape:
        return reduced
    # `reduced` is empty here; its sum keeps the graph.
    return torch.zeros_like(x) + reduced.sum(dtype=x.dtype)


def mpi_broadcast(x: Tensor, root: int = 0) -> Tensor:
    """Root's tensor, on every rank.

    The gradient is the sum of all ranks' at root, zero elsewhere. Raises ValueError for a root
    that does not exist. Collective.
    """
    return broadcast(x, _root(root))


def _op(op: str) -> str:
    if op not in _OPS:
        raise UnknownOpError(op, _OPS)
    return _OPS[op]


def _root(root: int) -> int:
    """In a world of one every root is this process."""
    return root if bootstrap.current().parallel else 0
