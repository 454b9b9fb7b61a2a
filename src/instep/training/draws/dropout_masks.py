"""Dropout in replicas: the functions in place of those of torch.nn.functional, and their masks.

Which units are dropped depends on a sample's position in the global batch, never on the rank that
holds it. On the CPU the mask of row i is words [i*w, (i+1)*w) of one Philox stream (Salmon et al.
2011), which is counter-based: a rank jumps to its own rows and draws nothing else. On a GPU the
mask of the whole batch is drawn and sliced, which is cheap there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from instep.process.patching import Function, Patch
from instep.training.draws.batch_dims import Shape
from instep.training.draws.replica_draws import BatchDraw, next_draw
from instep.training.forward_calls import ForwardCall, note_shape
from instep.training.random_streams import derive_seed

MaskShape = Callable[[Tensor], Shape | None]
"""The shape of the mask for an input; None for an input of which torch draws the mask itself."""

_WORDS_PER_STEP = 8
"""32-bit words that a Philox4x64 gives for each step of its counter."""
_rand = torch.rand
"""As it is before it is replaced in replicas."""
_SELU_FLOOR = -1.7580993408473766
"""-lambda * alpha of SELU, what a dropped unit of alpha dropout becomes (Klambauer et al. 2017)."""


def _every_unit(x: Tensor) -> Shape:
    return tuple(x.shape)


def _feature_maps(batched: Container[int], x: Tensor) -> Shape | None:
    """One number for each sample and channel; None for an input that is no batch of maps."""
    return tuple(x.shape[:2]) if x.dim() in batched else None


def _dropout(
    mask_shape: MaskShape,
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
    mask_shape: MaskShape,
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


REPLACED_FUNCTIONS: dict[str, Function] = {
    "dropout": partial(_dropout, _every_unit),
    "dropout1d": partial(_dropout, partial(_feature_maps, (3,))),
    "dropout2d": partial(_dropout, partial(_feature_maps, (3, 4))),
    "dropout3d": partial(_dropout, partial(_feature_maps, (5,))),
    "alpha_dropout": partial(_alpha_dropout, _every_unit),
    "feature_alpha_dropout": partial(_alpha_dropout, partial(_feature_maps, range(2, 9))),
}
"""The replacements in replicas, by names in torch.nn.functional; called as
`replacement(original, *args, **kwargs)`."""
PATCHES = [Patch(nn.functional, *row, compile="skip") for row in REPLACED_FUNCTIONS.items()]
"""For replicas."""


# -------------------------------------------------------------------------- masks


def _mask(mask_shape: MaskShape, x: Tensor, p: float, training: bool) -> Tensor | None:
    """Ones and zeros that broadcast over x; None if torch draws the mask itself."""
    shape = mask_shape(x) if training and 0 < p < 1 else None
    draw, call = next_draw(is_noise=False) if shape is not None else (None, None)
    if shape is None or (draw is None and (call is None or call.trial is None)):
        return None
    if draw is None:
        assert call is not None
        call.batch_dims.find(shape, 1, call)  # notes it
        return None
    kept = _kept(draw, shape, p, x.device, _row_dim(draw, shape, call, x)).to(x.dtype)
    return kept.reshape(shape + (1,) * (x.dim() - len(shape)))


def _row_dim(draw: BatchDraw, shape: Shape, call: ForwardCall | None, x: Tensor) -> int | None:
    """The dimension of the rows in a mask."""
    block = draw.block
    if block is None or isinstance(x, nn.Parameter):  # the weights of a layer
        return None
    if 0 in draw.dims:
        known: int | None = draw.dims[0]
        return known
    found: int | str | None = 0 if shape and shape[0] % max(block.count, 1) == 0 else None
    if call is not None and call.batch_dims is not None:
        found = call.batch_dims.find_in_mask(shape, block, call)
    if found == "by data" and block.size > 1:
        draw.seed = derive_seed(draw.seed, block.rank)
    dim = draw.dims[0] = None if isinstance(found, str) else found
    if dim is not None:
        note_shape(call, shape, dim)
    return dim


def _kept(draw: BatchDraw, shape: Shape, p: float, device: torch.device, dim: int | None) -> Tensor:
    """A boolean mask, true with probability 1 - p."""
    block = draw.block
    if dim:
        swapped = (shape[dim], *shape[1:dim], shape[0], *shape[dim + 1 :])
        return _kept(draw, swapped, p, device, 0).transpose(0, dim)
    if block is None or dim is None:
        first, total = 0, math.prod(shape)
    else:
        width = math.prod(shape) // max(block.count, 1)  # a row may have several entries
        first, total = block.start * width, block.total * width
    count = math.prod(shape)
    if device.type == "cpu":
        return _philox_kept(draw.seed, first, count, p).view(shape)
    generator = torch.Generator(device).manual_seed(draw.seed)
    uniform = _rand(total, device=device, generator=generator)
    return (uniform[first : first + count] >= p).view(shape)


def _philox_kept(seed: int, first: int, count: int, p: float) -> Tensor:
    """Elements [first, first + count) of the stream `seed`, each true with probability 1 - p."""
    steps, skipped = divmod(first, _WORDS_PER_STEP)
    generator = np.random.Philox(key=seed)
    generator.advance(steps)
    words = generator.random_raw((skipped + count + 1) // 2).view(np.uint32)
    return torch.from_numpy(words[skipped : skipped + count] >= np.uint32(int(p * 2**32)))
