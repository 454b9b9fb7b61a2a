"""Draws of zeros and ones, of which a rank compares only those that it needs.

For each element ATen's kernel for CPUs (`bernoulli_distribution`) draws 64 bits, of which it takes
53 as a number between 0 and 1, and compares this with p. The bits must be drawn for the whole
batch, one after the other; the rest is done here for the own rows alone. That takes two thirds of
the kernel's time.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

_BITS = 53


def can_compare(out: Tensor, p: Any) -> bool:
    """Whether `out.bernoulli_(p)` is what `draw_bits` and `compare` give."""
    is_probability = isinstance(p, float | int) and 0 <= p <= 1
    return is_probability and out.device.type == "cpu" and _draws_and_compares()


def draw_bits(out: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """64 random bits for each element of `out` (int64), in the order of its memory."""
    return out.random_(-(2**63), None, generator=generator)


def compare(bits: Tensor, p: float, out: Tensor) -> Tensor:
    """Ones in `out` (any dtype) with probability p, by the bits of as many elements."""
    return torch.lt(bits.bitwise_and(2**_BITS - 1), math.ceil(p * 2**_BITS), out=out)


@cache
def _draws_and_compares() -> bool:
    """Whether torch draws so: not where MKL does it, on Intel's processors."""
    by_torch, by_us = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    expected = torch.empty(1000).bernoulli_(0.7, generator=by_torch)
    bits = draw_bits(torch.empty(1000, dtype=torch.int64), by_us)
    same = torch.equal(compare(bits, 0.7, torch.empty(1000)), expected)
    return same and torch.equal(by_torch.get_state(), by_us.get_state())
