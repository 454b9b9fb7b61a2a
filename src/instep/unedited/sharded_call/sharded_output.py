"""A large output of a divided call, whose rows stay on their ranks until somebody looks.

Logits of a language model or of a segmentation are often looked at by nobody but a loss, and a loss
that adds up over rows can be computed from each rank's own. To everything else this is a tensor
like any other: the first operation on it gathers the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from instep.distributed.communication.tensors import apply
from instep.distributed.communication.transport import Transport
from instep.training.blocks import Block
from instep.unedited.sharded_call.mappings import gathered, own_rows

LARGE = 2**20
"""Bytes of a whole output from which on gathering it costs more than the two messages that a loss
over rows needs."""


class Rows(Tensor):
    """All ranks' rows (dimension 0), of which this one holds its own."""

    own: Tensor
    """(this rank's rows, ...): part of the autograd graph inside of the call."""
    block: Block
    way: Transport
    whole: Tensor | None
    """All rows, an ordinary tensor, once somebody has looked."""

    @staticmethod
    def of(own: Tensor, block: Block, way: Transport) -> Rows:
        """The rows of all ranks, to be gathered when they are looked at."""
        rows: Rows = apply(_Rows, own, block, way)
        rows.own = own
        return rows

    def look(self) -> Tensor:
        """All rows. Collective, the first time."""
        if self.whole is None:
            with torch.set_grad_enabled(self.requires_grad):
                self.whole = apply(_Look, self)
        return self.whole

    def stays_with(self, other: Rows) -> bool:
        """Whether both are still on their ranks, row by row."""
        if self.whole is not None or other.whole is not None:
            return False
        return self.block == other.block and self.shape[0] == other.shape[0]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Rows can be described and reshaped where they are; for everything else they are looked
        at."""
        if func in _RESHAPING and not kwargs and isinstance(args[0], Rows):
            reshaped = _reshaped(func, *args)
            if reshaped is not None:
                return reshaped
        if func not in _DESCRIBING:
            args, kwargs = tree_map_only(Rows, cls.look, (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What did not come by there, such as an autograd function of the script's."""
        args, kwargs = tree_map_only(Rows, lambda rows: rows.look().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, block: Block, way: Transport) -> Rows:
        ctx.block, ctx.way = block, way
        per_sample = own.shape[0] // block.count
        rows: Rows = Tensor._make_wrapper_subclass(
            Rows,
            (block.total * per_sample, *own.shape[1:]),
            dtype=own.dtype,
            device=own.device,
        )
        rows.own, rows.block, rows.way, rows.whole = own, block, way, None
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return own_rows(grads[0], ctx.block, 0, ctx.way), None, None


class _Look(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows) -> Tensor:
        return gathered(rows.own, rows.block, 0, rows.way)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


_RESHAPING = (Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten, torch.reshape)

_DESCRIBING = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement),
        *(Tensor.stride, Tensor.is_contiguous, Tensor.element_size, Tensor.__len__),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device),
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "requires_grad", "grad_fn", "layout")
        ),
        *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_leaf", "is_sparse")),
    )
)


def _reshaped(func: Callable[..., Any], rows: Rows, *args: Any) -> Rows | None:
    """The same rows in another shape, where they remain each rank's own; else None."""
    if rows.whole is not None:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        shape = func(torch.empty(rows.shape, device="meta"), *args).shape
    if not shape or shape[0] % rows.block.total or rows.shape[0] % rows.block.total:
        return None
    per_sample = shape[0] // rows.block.total
    return Rows.of(
        rows.own.reshape(rows.block.count * per_sample, *shape[1:]), rows.block, rows.way
    )
