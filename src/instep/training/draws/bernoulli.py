"""Draws of zeros and ones, of which a rank compares only those that it needs.

For each element ATen's kernel for CPUs (`bernoulli_distribution`) draws 64 bits, of which it takes
53 as a number between 0 and 1, and compares this with p. The bits must be drawn for the whole
batch, one after the other; the rest is done here for the own rows alone. That takes two thirds of
the kernel's time, and a fifth in C, which passes over the bits of other rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_BITS = 53
_STATE_BYTES = 5056


def can_compare(out: Tensor, p: Any) -> bool:
    """Whether `out.bernoulli_(p)` is what `draw_bits` and `compare` give."""
    is_probability = isinstance(p, float | int) and 0 <= p <= 1
    return is_probability and out.device.type == "cpu" and _draws_and_compares()


def draw_bits(out: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """64 random bits for each element of `out` (int64), in the order of its memory."""
    return out.random_(-(2**63), None, generator=generator)


def compare(bits: Tensor, p: float, out: Tensor) -> Tensor:
    """Ones in `out` (any dtype) with probability p, by the bits of as many elements."""
    return torch.lt(bits.bitwise_and(2**_BITS - 1), _limit(p), out=out)


def can_pass_over(outs: Sequence[Tensor]) -> bool:
    """Whether `draw_ones` can draw into these tensors, for which `can_compare` is true."""
    return _compiled() is not None and all(
        out.dtype is torch.float32 and type(out) is Tensor and out.is_contiguous() for out in outs
    )


def draw_ones(
    outs: Sequence[Tensor], before: int, after: int, p: float, generator: torch.Generator | None
) -> None:
    """Draw `outs`, parts of a larger tensor that lie one after the other in its memory.

    The generator goes on as if the whole tensor was drawn.

    Args:
        before: how many elements the larger tensor has before the first part.
        after: how many after the last.
    """
    _draw(_compiled(), outs, before, after, p, generator or torch.default_generator)


def _limit(p: float) -> int:
    return math.ceil(p * (1 << _BITS))


@cache
def _draws_and_compares() -> bool:
    """Whether torch draws so: not where MKL does it, on Intel's processors."""
    by_torch, by_us = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    expected = torch.empty(1000).bernoulli_(0.7, generator=by_torch)
    bits = draw_bits(torch.empty(1000, dtype=torch.int64), by_us)
    same = torch.equal(compare(bits, 0.7, torch.empty(1000)), expected)
    return same and torch.equal(by_torch.get_state(), by_us.get_state())


@cache
def _compiled() -> ModuleType | None:
    """mersenne_twister.c; None where setup.py has built none, or torch's generator is another."""
    try:
        from instep.training.draws import _mersenne_twister
    except ImportError:  # or built for another machine
        return None
    by_torch, by_us = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    if len(by_us.get_state()) != _STATE_BYTES:
        return None
    expected, out = torch.empty(1000).bernoulli_(0.7, generator=by_torch), torch.empty(500)
    _draw(_mersenne_twister, [out], 300, 200, 0.7, by_us)
    same = torch.equal(out, expected[300:800])
    same = same and torch.equal(by_torch.get_state(), by_us.get_state())
    return _mersenne_twister if same else None


def _draw(
    compiled: Any,
    outs: Sequence[Tensor],
    before: int,
    after: int,
    p: float,
    generator: torch.Generator,
) -> None:
    state = generator.get_state()
    for out in outs:
        compiled.draw_ones(state.data_ptr(), before, out.numel(), _limit(p), out.data_ptr())
        before = 0
    compiled.draw_ones(state.data_ptr(), after, 0, 0, 0)
    generator.set_state(state)
