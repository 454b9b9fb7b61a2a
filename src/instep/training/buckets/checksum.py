"""Do all ranks sum the same gradients? What travels behind a sum to tell.

A mark is 32 zeros and ones, and their opposites. Where all ranks mean the same, the sum over ranks
of each of these, or of its opposite, is zero; where any two differ, there is one of which neither
is. That holds at any number of ranks and in any dtype on the way: in 16 bits a sum of larger
numbers would be rounded.
"""

from __future__ import annotations

from functools import cache
from operator import mul
from zlib import crc32

import torch
from torch import Tensor

from instep.training.errors import MixedSumsError

LENGTH = 64
"""Of a mark."""


def mark(like: Tensor, *meant: int) -> Tensor:
    """What is to travel behind a sum that means these numbers, as `like` in dtype and device.

    Other numbers have another mark, but for one pair in four thousand million.
    """
    return _mark(meant, like.dtype, like.device)


def all_present(count: int, mark: Tensor) -> Tensor:
    """What travels behind `count` gradients where a rank has them all: a one for each, the mark."""
    return torch.cat([mark.new_ones(count), mark])


@cache  # for a GPU would be waited for
def _mark(meant: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    number = crc32(repr(meant).encode())
    bits = [number >> place & 1 for place in range(LENGTH // 2)]
    return torch.tensor([*bits, *(1 - bit for bit in bits)], dtype=dtype, device=device)


def check(total: Tensor, otherwise: MixedSumsError) -> None:
    """Raise `otherwise` on every rank, unless all ranks have added the same mark to `total`.

    On a GPU nobody waits for the answer: the device asserts it by itself. Then CUDA's error comes
    with the next thing that the script asks of the device, and these words with the device's own
    message; nothing that was computed from the sum, or will be, can be read any more.
    """
    if total.is_cuda:
        mixed = torch.dot(*total.real.chunk(2))
        torch._assert_async(mixed == 0, str(otherwise)[:250])  # it takes no more than 254
        return
    bits = total.real.tolist()
    if any(map(mul, bits[: LENGTH // 2], bits[LENGTH // 2 :])):
        raise otherwise
