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
from torch import Tensor

from instep.distributed.communication.transport import Transport
from instep.process import settings
from instep.training.buckets.codec import BucketCodec, as_real
from instep.training.buckets.layout import BucketLayout


@dataclass(frozen=True)
class PowerSGD:
    """`instep.replicate(model, compression=instep.PowerSGD(rank=4))`.

    A gradient of shape (n, ...), seen as a matrix of n rows and m columns, is sent as two matrices
    of n x rank and m x rank, whose product is as near to it as one step of the power method brings
    it; what is missing is kept and added to the next gradient (T. Vogels, S. P. Karimireddy,
    M. Jaggi: PowerSGD, NeurIPS 2019). Gradients of one dimension, complex ones, and those that
    would not become smaller travel whole.

    `.grad` is an approximation. It has the same bits on all ranks with the same kind of processor
    and the same number of threads. The error that is kept takes as much memory as the gradients.
    It is in no checkpoint: a training that resumes begins with nothing kept. It is kept for the
    last two sets of parameters that were trained together. Where a loss is scaled, the error has
    the scale of its own step; after a gradient that is not finite it is dropped. Each backward
    sends two messages for each bucket, the second when the first has arrived.

    Args:
        rank: columns of the thin matrices: more are nearer to the gradient, and longer messages.
        warm_up: how many backwards send whole gradients first, when these change fastest; of each
            set of parameters that are trained together.

    Raises ValueError for numbers out of range.
    """

    rank: int = 4
    warm_up: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1 or self.warm_up < 0:
            raise ValueError(f"rank is at least 1 and warm_up at least 0, not {self}.")


Compression = Literal["fp16", "bf16"] | PowerSGD | None
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def check_compression(compression: object) -> None:
    """Raise ValueError unless `instep.replicate` takes this."""
    if not (compression is None or isinstance(compression, PowerSGD) or compression in _DTYPES):
        raise ValueError(
            f"compression is None, 'fp16', 'bf16' or an instep.PowerSGD, not {compression!r}."
        )


def compression_setting() -> Compression:
    """What INSTEP_COMPRESSION asks for, in scripts that do not call `instep.replicate`."""
    value = str(settings.COMPRESSION)
    settable: dict[str, Compression] = {"fp16": "fp16", "bf16": "bf16", "powersgd": PowerSGD()}
    return settable.get(value)


def make_codec(
    layout: BucketLayout, parameters: Mapping[int, Tensor], compression: Compression
) -> BucketCodec | None:
    """What compresses a bucket of these parameters; None if it travels as it is."""
    if isinstance(compression, PowerSGD):
        compressible = any(
            _is_compressible(parameters[slot.index], compression.rank) for slot in layout.slots
        )
        return _PowerSGDCodec(layout, parameters, compression) if compressible else None
    first = parameters[layout.slots[0].index]
    if compression is None or as_real(first.detach()).itemsize <= 2:
        return None
    return _HalfPrecisionCodec(_DTYPES[compression])


class _HalfPrecisionCodec(BucketCodec):
    """Sends 16 bits for each number. The sum is rounded to 16 bits too."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def start(self, flat: Tensor, transport: Transport) -> None:
        self._pending = transport.sum_rounded(as_real(flat), self._dtype)


class _LowRankMatrix:
    """One gradient as a matrix, and PowerSGD's state for it.

    Whether a sum is finite, and whether any rank has the gradient, is decided on the device of the
    tensors, so that nothing waits for a GPU.
    """

    def __init__(self, like: Tensor, options: PowerSGD, seed: int) -> None:
        self.rows, self.rank = like.shape[0], options.rank
        self.columns = like.numel() // self.rows
        dtype = torch.promote_types(like.dtype, torch.float32)
        generator = torch.Generator().manual_seed(seed)  # all ranks begin with the same factor
        initial = torch.randn(
            self.columns, self.rank, generator=generator, dtype=dtype, device="cpu"
        )
        self._right = initial.to(like.device)
        self._left = self._own_right = self._right
        self._error = torch.zeros(self.rows, self.columns, dtype=dtype, device=like.device)
        """This rank's part of what was never sent; during a step, plus its part of the gradient."""
        self._in_step = False

    def to_left(self, gradient: Tensor) -> Tensor:
        """This rank's part of the left factor, rows x rank."""
        self._in_step = True
        self._error += gradient.view_as(self._error)
        with self._no_autocast():
            return self._error @ self._right

    def to_right(self, left: Tensor) -> Tensor:
        """This rank's part of the right factor, columns x rank, from the sum of the left ones."""
        self._left = torch.linalg.qr(left.view(self.rows, self.rank)).Q
        with self._no_autocast():
            self._own_right = self._error.T @ self._left
        return self._own_right

    def reconstruct(self, right: Tensor, flag: Tensor) -> Tensor:
        """The gradient, flat, from the sum of the right factors.

        If no rank has a gradient (`flag` is 0), the state stays as it was.
        """
        right = right.view(self.columns, self.rank)
        finite = right.isfinite().all()
        sent = torch.where(flag > 0, self._own_right, 0)
        with self._no_autocast():
            self._error.addmm_(self._left, sent.T, alpha=-1)
            product = self._left @ right.T
        self._error.masked_fill_(~finite, 0)
        self._right = torch.where(finite & (flag > 0), right, self._right)
        self._in_step = False
        return product.view(-1)

    def reset(self) -> None:
        """Drop the gradient of a backward that was interrupted, and the error with it."""
        if self._in_step:
            self._error.zero_()
            self._in_step = False

    def _no_autocast(self) -> torch.autocast:
        """Backward may be called where autocast is on, which would round the factors."""
        return torch.autocast(self._error.device.type, enabled=False)


class _PowerSGDCodec(BucketCodec):
    """Sends matrices as two factors, one after the other; all else goes with the first."""

    def __init__(
        self, layout: BucketLayout, parameters: Mapping[int, Tensor], options: PowerSGD
    ) -> None:
        matrices = [
            slot for slot in layout.slots if _is_compressible(parameters[slot.index], options.rank)
        ]
        self._matrices = [
            _LowRankMatrix(parameters[slot.index], options, seed=slot.index) for slot in matrices
        ]
        self._slices = [slice(slot.start, slot.stop) for slot in matrices]
        self._flags = [layout.numel + layout.slots.index(slot) for slot in matrices]
        others = [slice(slot.start, slot.stop) for slot in layout.slots if slot not in matrices]
        self._others = [*others, slice(layout.numel, None)]
        self._warm_up = options.warm_up
        self._is_warming_up = False
        self._factors = torch.empty(0, device="cpu")

    def start(self, flat: Tensor, transport: Transport) -> None:
        self._is_warming_up = self._warm_up > 0
        if self._is_warming_up:
            self._warm_up -= 1
            super().start(flat, transport)
            return
        pairs = zip(self._matrices, self._slices, strict=True)
        lefts = [matrix.to_left(flat[place]) for matrix, place in pairs]
        self._send([*lefts, *(flat[other] for other in self._others)], transport)

    def start_second_phase(self, flat: Tensor, transport: Transport) -> None:
        if self._is_warming_up:
            return
        others = [flat[other] for other in self._others]
        lengths = [matrix.rows * matrix.rank for matrix in self._matrices]
        sums = self._wait_for([*lengths, *map(len, others)])
        for other, total in zip(others, sums[len(lengths) :], strict=True):
            other.copy_(total)
        pairs = zip(self._matrices, sums, strict=False)
        self._send([matrix.to_right(left) for matrix, left in pairs], transport)

    def wait(self, flat: Tensor) -> None:
        if self._is_warming_up:
            super().wait(flat)
            return
        rights = self._wait_for([matrix.columns * matrix.rank for matrix in self._matrices])
        for matrix, right, place, flag in zip(
            self._matrices, rights, self._slices, self._flags, strict=True
        ):
            flat[place] = matrix.reconstruct(right, flat[flag])

    def reset(self) -> None:
        super().reset()
        for matrix in self._matrices:
            matrix.reset()

    def _send(self, parts: Sequence[Tensor], transport: Transport) -> None:
        self._factors = torch.cat([part.reshape(-1) for part in parts])
        super().start(self._factors, transport)

    def _wait_for(self, lengths: Sequence[int]) -> list[Tensor]:
        super().wait(self._factors)
        return list(torch.split(self._factors, list(lengths)))


def _is_compressible(parameter: Tensor, rank: int) -> bool:
    """Whether two factors are smaller than the gradient."""
    if parameter.dim() < 2 or parameter.is_complex() or parameter.numel() == 0:
        return False
    rows = parameter.shape[0]
    return (rows + parameter.numel() // rows) * rank < parameter.numel()
