"""Dropout masks of the global batch: what is dropped depends on a sample's position in the batch,
never on the rank that holds it.

On the CPU the mask of row i is words [i*w, (i+1)*w) of one Philox stream (Salmon et al. 2011),
which is counter-based: a rank jumps to its own rows and draws nothing else. On a GPU the mask of
the whole batch is drawn and cut, which is cheap there.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from instep.distributed.communication.transport import get_transport
from instep.process.patching import Function
from instep.training import forward_calls
from instep.training.blocks import Block
from instep.training.random_streams import derive_seed

Shape = tuple[int, ...]

_WORDS_PER_STEP = 8
"""32-bit words that a Philox4x64 gives for each step of its counter."""
_REMEMBERED = 4096
_SELU_FLOOR = -1.7580993408473766
"""-lambda * alpha of SELU, what a dropped unit of alpha dropout becomes (Klambauer et al. 2017)."""


@dataclass(frozen=True)
class Draw:
    """One mask of one call."""

    key: int
    block: Block | None


_drawn: OrderedDict[int, Draw] = OrderedDict()
"""Masks by what torch's generator said when they were drawn. Gradient checkpointing sets the
generator back and computes again: it must find the same masks."""


def _every_unit(x: Tensor) -> Shape:
    return tuple(x.shape)


def _feature_maps(batched: Container[int], x: Tensor) -> Shape | None:
    """One number for each sample and channel; None for an input that is no batch of maps."""
    return tuple(x.shape[:2]) if x.dim() in batched else None


def _dropout(
    mask_shape: Callable[[Tensor], Shape | None],
    original: Function,
    input: Tensor,  # noqa: A002  (torch's name)
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    kept = _mask(mask_shape, input, p, training)
    if kept is None:
        output: Tensor = original(input, p, training, inplace)
        return output
    factor = kept.div_(1 - p)
    return input.mul_(factor) if inplace else input * factor


def _alpha_dropout(
    mask_shape: Callable[[Tensor], Shape | None],
    original: Function,
    input: Tensor,  # noqa: A002  (torch's name)
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    kept = _mask(mask_shape, input, p, training)
    if kept is None:
        output: Tensor = original(input, p, training, inplace)
        return output
    scale = 1 / math.sqrt((1 - p) * (1 + p * _SELU_FLOOR**2))
    shift = scale * _SELU_FLOOR * (1 - kept - p)
    factor = kept.mul_(scale)
    return input.mul_(factor).add_(shift) if inplace else input * factor + shift


SEAMS: dict[str, Function] = {
    "dropout": partial(_dropout, _every_unit),
    "dropout1d": partial(_dropout, partial(_feature_maps, (3,))),
    "dropout2d": partial(_dropout, partial(_feature_maps, (3, 4))),
    "dropout3d": partial(_dropout, partial(_feature_maps, (5,))),
    "alpha_dropout": partial(_alpha_dropout, _every_unit),
    "feature_alpha_dropout": partial(_alpha_dropout, partial(_feature_maps, range(2, 9))),
}
"""Every dropout function of torch.nn.functional that is stepped into, with what answers."""


def _mask(
    mask_shape: Callable[[Tensor], Shape | None], x: Tensor, p: float, training: bool
) -> Tensor | None:
    """Ones and zeros that broadcast over x; None where torch shall do it."""
    shape = mask_shape(x) if training and 0 < p < 1 else None
    draw = _next_draw() if shape is not None else None
    if shape is None or draw is None:
        return None
    return (
        _kept(draw, shape, p, x.device).to(x.dtype).reshape(shape + (1,) * (x.dim() - len(shape)))
    )


def _next_draw() -> Draw | None:
    """The mask of the call of dropout that is made now; None where it is not ours."""
    if torch._C._current_graph_task_id() != -1:  # gradient checkpointing computes again
        return _drawn.get(_token()) if _drawn else None
    call = forward_calls.current()
    if call is None or call.dropout == "rank":
        return None
    whose = () if call.block is not None else (get_transport().rank,)
    draw = _drawn[_token()] = Draw(derive_seed(call.stream, call.draws, *whose), call.block)
    call.draws += 1
    if len(_drawn) > _REMEMBERED:
        _drawn.popitem(last=False)
    return draw


def _token() -> int:
    return int(torch.empty((), dtype=torch.int64).random_())


def _kept(draw: Draw, shape: Shape, p: float, device: torch.device) -> Tensor:
    """A boolean mask, true with probability 1 - p."""
    block = draw.block
    rows = 1 if block is None else max(block.count, 1)
    if block is not None and shape[:1] != (rows,) and shape[1:2] == (rows,):
        swapped = (shape[1], shape[0], *shape[2:])  # (time, batch, ...)
        return _kept(draw, swapped, p, device).transpose(0, 1)
    if block is None or not shape or shape[0] % rows:
        first, total = 0, math.prod(shape)
    else:
        width = math.prod(shape) // rows
        first, total = block.start * width, block.total * width
    count = math.prod(shape)
    if device.type == "cpu":
        return _philox_kept(draw.key, first, count, p).view(shape)
    generator = torch.Generator(device).manual_seed(draw.key)
    uniform = torch.rand(total, device=device, generator=generator)
    return (uniform[first : first + count] >= p).view(shape)


def _philox_kept(key: int, first: int, count: int, p: float) -> Tensor:
    """Elements [first, first + count) of the stream `key`, each true with probability 1 - p."""
    steps, skipped = divmod(first, _WORDS_PER_STEP)
    generator = np.random.Philox(key=key)
    generator.advance(steps)
    words = generator.random_raw((skipped + count + 1) // 2).view(np.uint32)
    return torch.from_numpy(words[skipped : skipped + count] >= np.uint32(int(p * 2**32)))
