"""Sparse tensors of the simulated accelerator: their indices and values are dense ones of its own.

Every operation is computed by the CPU's kernel on the same indices and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import simulated

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)
_OF_PARTS = (
    *("_indices", "_values", "_nnz", "sparse_dim", "dense_dim", "is_coalesced", "_coalesced_"),
    *("indices", "values", "_dimI", "_dimV", "copy_", "copy_sparse_to_sparse_"),
    *("_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors"),
    *("sparse_resize_", "sparse_resize_and_clear_"),
)
"""What looks at the two parts only, and is right for any device."""


def install(library: Any) -> None:
    """Bring them to torch; `library`: the fallbacks of all operations."""
    library.fallback(_fallback, f"Sparse{simulated.KEY}")
    kernels = torch.library.Library("aten", "IMPL")
    for name in _OF_PARTS:
        op = getattr(torch.ops.aten, name).default
        kernels.impl(
            name,
            lambda *args, op=op, **kwargs: op.redispatch(_CPU_KEYS, *args, **kwargs),
            f"Sparse{simulated.KEY}",
        )
    _kept.append(kernels)


_kept: list[Any] = []


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute any operation by the CPU's kernel; one in place may change values alone."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if simulated.is_sim(leaf)]
    parts = [part for leaf in leaves for part in _parts(leaf)]
    simulated.start(op, parts, parts if op._schema.is_mutable else ())
    if torch.Tag.dynamic_output_shape in op.tags or "coalesce" in str(op):
        simulated.read_back(op)
    given: dict[int, Tensor] = {}

    def enter(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not simulated.is_sim(value):
            return value
        same = _on_cpu(value)
        given[id(same)] = value
        return same

    inside = tree_map(enter, (args, kwargs))  # while it runs, an id means one tensor
    computed = op(*inside[0], **inside[1])
    for same, own in ((leaf, given[id(leaf)]) for leaf in tree_leaves(inside) if id(leaf) in given):
        if own.is_sparse and same._nnz() != own._nnz():
            raise NotImplementedError(f"sim: {op} changes the indices of a sparse tensor in place")

    def leave(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return given[id(value)] if id(value) in given else _from_cpu(value)

    return tree_map(leave, computed)


def _parts(tensor: Tensor) -> list[Tensor]:
    return [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]


def _on_cpu(tensor: Tensor) -> Tensor:
    if not tensor.is_sparse:
        return simulated.on_cpu(tensor)
    indices, values = map(simulated.on_cpu, _parts(tensor))
    return _joined(indices, values, tensor)


def _from_cpu(tensor: Tensor) -> Tensor:
    if not tensor.is_sparse:
        return simulated.from_cpu(tensor)
    indices, values = map(simulated.from_cpu, _parts(tensor))
    return _joined(indices, values, tensor)


def _joined(indices: Tensor, values: Tensor, like: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, values, like.shape, is_coalesced=like.is_coalesced(), check_invariants=False
    )
