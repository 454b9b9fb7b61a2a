"""A checksum that travels behind each sum and tells whether all ranks summed the same gradients.

A checksum is 32 zeros and ones, followed by their complements. If all ranks have the same one, then
for each bit either the sum over ranks or the sum of its complement is zero. If two ranks differ in
a bit, neither is. This holds at any number of ranks and in any dtype: in 16 bits a sum of larger
numbers would be rounded.
"""

from __future__ import annotations

from functools import cache
from operator import mul
from zlib import crc32

import torch
from torch import Tensor

from instep.distributed.identity.torch_devices import has_kernel
from instep.process.torch_private.tensors import assert_async
from instep.training.errors import MixedSumsError

LENGTH = 64
"""The number of elements of a checksum."""
STEPS = 64
"""So many checksums a bucket may have."""


def bucket_checksum(like: Tensor, *ids: int, step: int = 0) -> Tensor:
    """The checksum of these ids and a step, which is below STEPS, with the dtype and device of
    `like`.

    Distinct ids collide with probability 2**-32.
    """
    return _checksums(ids, like.dtype, like.device)[step]


def flags_and_checksum(count: int, checksum: Tensor) -> Tensor:
    """What travels behind `count` gradients if this rank has all of them: a one for each of them,
    then the checksum."""
    return torch.cat([checksum.new_ones(count), checksum])


@cache  # to make one on a GPU would wait for the GPU; so those of all steps are made at once
def _checksums(ids: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    rows = []
    for step in range(STEPS):
        number = crc32(repr((*ids, step)).encode())
        bits = [number >> place & 1 for place in range(LENGTH // 2)]
        rows.append([*bits, *(1 - bit for bit in bits)])
    return torch.tensor(rows, dtype=dtype, device=device)


def verify_checksum(total: Tensor, error: MixedSumsError) -> None:
    """Raise `error` on every rank, unless all ranks have added the same checksum to `total`.

    On a GPU, and wherever torch can do that, this does not wait for the result: the device itself
    asserts it. Then CUDA's error is raised by the next operation of the script on that device, and
    `error`'s message is printed with the device's own. Nothing that was or will be computed from
    the sum can be read any more.
    """
    if not total.is_cpu and has_kernel("aten::_assert_async.msg", total.device.type):
        mixed = torch.dot(*total.real.chunk(2))
        assert_async(mixed == 0, str(error)[:250])  # it takes no more than 254
        return
    bits = total.real.tolist()
    if any(map(mul, bits[: LENGTH // 2], bits[LENGTH // 2 :])):
        raise error
