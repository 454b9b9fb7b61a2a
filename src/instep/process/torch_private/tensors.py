"""PyTorch's private names of tensors: their storages, lists of them, and nested values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree

Function = Callable[..., Any]

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
"""Makes a tensor of a subclass that has a shape and no memory of its own."""
set_version_counter = torch._C._autograd._unsafe_set_version_counter
"""Gives tensors their versions back after their values were put back."""
flatten_dense_tensors: Function = torch._utils._flatten_dense_tensors
unflatten_dense_tensors: Function = torch._utils._unflatten_dense_tensors
"""One flat tensor of several, and back."""
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""How many references a storage has, by the address in its `_cdata`."""


def untyped_storage_of(storage: Any) -> torch.UntypedStorage:
    """The storage that a typed one wraps, without the warning of its public method."""
    untyped: torch.UntypedStorage = getattr(storage, "_untyped_storage", storage)
    return untyped


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """A typed storage that wraps this one, without a warning."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


neg_view = torch._neg_view
assert_async = torch._assert_async
"""An assertion on a device, for which the host does not wait."""
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
check_finite_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
"""Operations on lists of tensors."""
tree_flatten = torch.utils._pytree.tree_flatten
tree_leaves = torch.utils._pytree.tree_leaves
tree_map = torch.utils._pytree.tree_map
tree_map_only = torch.utils._pytree.tree_map_only
tree_unflatten = torch.utils._pytree.tree_unflatten
"""Nested values, in torch's own order of leaves."""
