"""Gradients in fewer bits while they travel, for a loss of accuracy.

A bucket travels either in 16 bits, or each of its matrices as a product of two thin ones. Both
are sums over ranks as before: weights, `no_sync`, ranks without rows or without a gradient
mean what they mean without compression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from instep.distributed.communication.transport import Pending, Transport
from instep.training.buckets.grad_buckets import Whole, Wire, real
from instep.training.buckets.layout import Bucket


@dataclass(frozen=True)
class PowerSGD:
    """`instep.replicate(model, compression=instep.PowerSGD(rank=4))`.

    A gradient of shape (n, ...), seen as a matrix of n rows and m columns, is sent as two matrices
    of n x rank and m x rank, whose product is as near to it as one step of the power method brings
    it; what is missing is kept and added to the next gradient (T. Vogels, S. P. Karimireddy,
    M. Jaggi: PowerSGD, NeurIPS 2019). Gradients of one dimension, complex ones, and those that
    would not become smaller travel whole.

    `.grad` is an approximation, the same bits on all ranks of one kind (processor, threads). What
    is kept takes as much memory as the gradients, and is in no checkpoint: a training that resumes
    begins with nothing kept. Of sets of parameters that are trained together it is kept for the
    last two. Where a loss is scaled it is in the unit of its own step; after a
    gradient that is not finite it is dropped. Each backward sends two messages for each bucket,
    the second when the first has come.

    Raises ValueError for numbers out of range.
    """

    rank: int = 4
    """Columns of the thin matrices: more are nearer to the gradient, and longer messages."""
    warm_up: int = 0
    """How many backwards send whole gradients first, when these change fastest; of each set of
    parameters that are trained together."""

    def __post_init__(self) -> None:
        if self.rank < 1 or self.warm_up < 0:
            raise ValueError(f"rank is at least 1 and warm_up at least 0, not {self}.")


Compression = Literal["fp16", "bf16"] | PowerSGD | None
_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def check_compression(compression: object) -> None:
    """Raise ValueError for what `instep.replicate` does not know."""
    if not (compression is None or isinstance(compression, PowerSGD) or compression in _NARROW):
        raise ValueError(
            f"compression is None, 'fp16', 'bf16' or an instep.PowerSGD, not {compression!r}."
        )


def wire(
    plan: Bucket, parameters: Mapping[int, nn.Parameter], compression: Compression
) -> Wire | None:
    """How a bucket travels, whose indices are those of `parameters`; None for as it is."""
    like = parameters[plan.slots[0].index]
    if isinstance(compression, PowerSGD):
        matrices = any(_pays(parameters[slot.index], compression.rank) for slot in plan.slots)
        return _LowRank(plan, parameters, compression) if matrices else None
    if compression is None or real(like.detach()).itemsize <= 2:
        return None
    return _Narrow(_NARROW[compression])


class _Narrow:
    """Travels in 16 bits, and is added up so."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._narrow = torch.empty(0)
        self._pending: Pending | None = None

    def launch(self, flat: Tensor, way: Transport) -> None:
        self._narrow = real(flat).to(self._dtype)
        self._pending = way.all_reduce(self._narrow, "sum")

    def follow(self, flat: Tensor, way: Transport) -> None:
        return None

    def arrive(self, flat: Tensor) -> None:
        assert self._pending is not None
        self._pending.wait()
        real(flat).copy_(self._narrow)

    def reset(self) -> None:
        self._pending = None


class _Matrix:
    """One gradient as a matrix, and what PowerSGD remembers of it.

    Whether a sum is finite, and whether any rank has the gradient, is decided where the tensors
    are: nobody waits for a GPU.
    """

    def __init__(self, like: nn.Parameter, options: PowerSGD, seed: int) -> None:
        self.rows, self.rank = like.shape[0], options.rank
        self.columns = like.numel() // self.rows
        kind = torch.promote_types(like.dtype, torch.float32)
        generator = torch.Generator().manual_seed(seed)  # all ranks begin with the same
        begin = torch.randn(self.columns, self.rank, generator=generator, dtype=kind)
        self._right = begin.to(like.device)
        self._left = self._part = self._right
        self._rest = torch.zeros(self.rows, self.columns, dtype=kind, device=like.device)
        """This rank's part of what was never sent; under way, with its part of the gradient."""
        self._under_way = False

    def left(self, gradient: Tensor) -> Tensor:
        """This rank's part of the left factor, rows x rank."""
        self._under_way = True
        self._rest += gradient.view_as(self._rest)
        with self._exactly():
            return self._rest @ self._right

    def right(self, left: Tensor) -> Tensor:
        """This rank's part of the right factor, columns x rank, by the sum of the left ones."""
        self._left = torch.linalg.qr(left.view(self.rows, self.rank)).Q
        with self._exactly():
            self._part = self._rest.T @ self._left
        return self._part

    def product(self, right: Tensor, has: Tensor) -> Tensor:
        """The gradient, flat, by the sum of the right factors.

        Where no rank `has` one, nothing is remembered of it.
        """
        right = right.view(self.columns, self.rank)
        fine = right.isfinite().all()
        sent = torch.where(has > 0, self._part, 0)
        with self._exactly():
            self._rest.addmm_(self._left, sent.T, alpha=-1)
            product = self._left @ right.T
        self._rest.masked_fill_(~fine, 0)
        self._right = torch.where(fine & (has > 0), right, self._right)
        self._under_way = False
        return product.view(-1)

    def reset(self) -> None:
        """Forget what a backward that was interrupted has added."""
        if self._under_way:
            self._rest.zero_()
            self._under_way = False

    def _exactly(self) -> torch.autocast:
        """Backward may be called where autocast is on, which would round the factors."""
        return torch.autocast(self._rest.device.type, enabled=False)


class _LowRank:
    """Matrices travel as two factors, one after the other; all else goes with the first."""

    def __init__(
        self, plan: Bucket, parameters: Mapping[int, nn.Parameter], options: PowerSGD
    ) -> None:
        matrices = [slot for slot in plan.slots if _pays(parameters[slot.index], options.rank)]
        self._matrices = [
            _Matrix(parameters[slot.index], options, seed=slot.index) for slot in matrices
        ]
        self._places = [slice(slot.start, slot.stop) for slot in matrices]
        self._flags = [plan.numel + plan.slots.index(slot) for slot in matrices]
        others = [slice(slot.start, slot.stop) for slot in plan.slots if slot not in matrices]
        self._others = [*others, slice(plan.numel, None)]
        self._warm_up = options.warm_up
        self._whole: Whole | None = None
        self._factors = torch.empty(0)
        self._pending: Pending | None = None

    def launch(self, flat: Tensor, way: Transport) -> None:
        if self._warm_up > 0:
            self._warm_up -= 1
            self._whole = Whole()
            self._whole.launch(flat, way)
            return
        placed = zip(self._matrices, self._places, strict=True)
        lefts = [matrix.left(flat[place]) for matrix, place in placed]
        self._send([*lefts, *(flat[other] for other in self._others)], way)

    def follow(self, flat: Tensor, way: Transport) -> None:
        if self._whole is not None:
            return
        others = [flat[other] for other in self._others]
        lengths = [matrix.rows * matrix.rank for matrix in self._matrices]
        parts = self._sums([*lengths, *map(len, others)])
        for other, total in zip(others, parts[len(lengths) :], strict=True):
            other.copy_(total)
        self._send([m.right(left) for m, left in zip(self._matrices, parts, strict=False)], way)

    def arrive(self, flat: Tensor) -> None:
        if self._whole is not None:
            self._whole.arrive(flat)
            return
        rights = self._sums([matrix.columns * matrix.rank for matrix in self._matrices])
        for matrix, right, place, flag in zip(
            self._matrices, rights, self._places, self._flags, strict=True
        ):
            flat[place] = matrix.product(right, flat[flag])

    def reset(self) -> None:
        self._whole = self._pending = None
        for matrix in self._matrices:
            matrix.reset()

    def _send(self, parts: Sequence[Tensor], way: Transport) -> None:
        self._factors = torch.cat([part.reshape(-1) for part in parts])
        self._pending = way.all_reduce(self._factors, "sum")

    def _sums(self, lengths: Sequence[int]) -> list[Tensor]:
        assert self._pending is not None
        self._pending.wait()
        return list(torch.split(self._factors, list(lengths)))


def _pays(parameter: nn.Parameter, rank: int) -> bool:
    """Whether two factors are smaller than the gradient."""
    if parameter.dim() < 2 or parameter.is_complex() or parameter.numel() == 0:
        return False
    rows = parameter.shape[0]
    return (rows + parameter.numel() // rows) * rank < parameter.numel()
