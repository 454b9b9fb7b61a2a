"""Random operations of torch, in two tables: what each draws, for the whole batch.

In a replica (`instep.replicate`) some functions of torch.nn.functional are replaced: which units
are dropped depends on a sample's position in the global batch, never on the rank that holds it. On
the CPU the mask of row i is words [i*w, (i+1)*w) of one Philox stream (Salmon et al. 2011), which
is counter-based: a rank jumps to its own rows and draws nothing else. On a GPU the mask of the
whole batch is drawn and sliced, which is cheap there.

In an unedited script operations draw from torch's generators what one process would draw. `Draws`
tells which of their arguments must be those of the whole batch.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import zip_longest
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.distributed.communication.transport import get_transport
from instep.process.patching import Function
from instep.process.torch_private.autograd import VMAP, current_graph_task_id, interpreter_stack
from instep.training import forward_calls
from instep.training.batches import progress
from instep.training.batches.registry import may_be_skipped
from instep.training.blocks import Block
from instep.training.forward_calls import ForwardCall
from instep.training.random_streams import derive_seed

Shape = tuple[int, ...]
MaskShape = Callable[[Tensor], Shape | None]
"""The shape of the mask for an input; None for an input of which torch draws the mask itself."""

_WORDS_PER_STEP = 8
"""32-bit words that a Philox4x64 gives for each step of its counter."""
_MAX_DRAWS = 4096
_random = torch.Tensor.random_
_rand = torch.rand
"""As it is before it is replaced in replicas."""
_SELU_FLOOR = -1.7580993408473766
"""-lambda * alpha of SELU, what a dropped unit of alpha dropout becomes (Klambauer et al. 2017)."""


# ------------------------------------------------------------------------------ the tables


class Draws(Enum):
    """What decides how many numbers an operation draws, and which."""

    SIZE = auto()
    """A size among its arguments, as in torch.rand."""
    SHAPE = auto()
    """The shape of its first tensor, as in torch.rand_like and Tensor.uniform_."""
    MASK = auto()
    """The shape of its first tensor; it returns the tensor times a mask, and the mask."""
    VALUES = auto()
    """The numbers in its tensors, as in torch.bernoulli."""


_DRAWS = {
    "rand": Draws.SIZE,
    "randn": Draws.SIZE,
    "randint": Draws.SIZE,
    "native_dropout": Draws.MASK,
}
"""By names in torch.ops.aten: of operations whose name alone misleads (see `draws_of`)."""


def draws_nothing(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call of an operation that may draw does not: attention, or a recurrent layer,
    without dropout, or attention's choice of a kernel."""
    if func._schema.name == "aten::_fused_sdp_choice":
        return True
    for argument, given in zip_longest(func._schema.arguments, args):
        if argument.name in ("dropout_p", "dropout"):
            value = kwargs.get(argument.name, argument.default_value) if given is None else given
            return bool(value == 0)
    return False


def draws_of(aten: str) -> Draws:
    """How an operation of torch.ops.aten draws."""
    by_name = Draws.SHAPE if aten.endswith(("_", "_like")) else Draws.VALUES
    return _DRAWS.get(aten, by_name)


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


# -------------------------------------------------------------------------- draws of replicas


@dataclass(eq=False)
class BatchDraw:
    """One draw of a replica, for the whole batch: a mask of dropout, or noise."""

    seed: int
    block: Block | None
    dims: dict[int, Any] = field(default_factory=dict)
    """The dimension of the rows in what its k-th operation draws; None where there is none, "by
    data" where this rank draws its own."""


_drawn: OrderedDict[int, BatchDraw] = OrderedDict()
"""Draws by a number that torch's generator gave when they were made. Gradient checkpointing sets
the generator back and computes again: it must find the same ones."""


def next_draw(*, is_noise: bool) -> tuple[BatchDraw | None, ForwardCall | None]:
    """This draw and the call to which it belongs; None for what torch draws itself."""
    if current_graph_task_id() != -1:  # gradient checkpointing computes again
        return (_recomputed_draw() if _drawn else None), forward_calls.current()
    if any(transform.key() == VMAP for transform in interpreter_stack() or ()):
        return None, None  # vmap's argument randomness says what is drawn for each sample
    call = forward_calls.current() or _call_of_method()
    if call is not None and call.thread != threading.get_ident():
        return None, None
    if call is not None and call.trial is not None:
        call.draws += 1
        seed = derive_seed(call.seed, call.draws - 1)
        return (BatchDraw(seed, Block(0, 2, 2)) if is_noise else None), call
    if call is None or call.dropout == "rank":
        return None, call
    in_training = bool(call.saved_rng_states)
    block = call.block if in_training else call.batch.resolve_on_this_rank()
    if block is None and (is_noise or not in_training):
        return None, call
    if in_training:
        own = () if block is not None else (get_transport().rank,)
        token, seed = draw_token(), derive_seed(call.seed, call.draws, *own)
    else:
        assert block is not None
        token, seed = _draw_of_script(call, block)
    draw = BatchDraw(seed, block)
    call.draws += 1
    in_method = forward_calls.current() is None
    if torch.is_grad_enabled() or call.needs_gradients or in_method:
        _remember(token, draw)  # it may be computed again; reentrant checkpoints begin without grad
    return draw, call


def _draw_of_script(call: ForwardCall, block: Block) -> tuple[int, int]:
    """The token and the seed of a draw of which the script's own generator decides, which is in
    step on all ranks."""
    state = torch.get_rng_state()
    token = draw_token()
    if not may_be_skipped(block):
        return token, derive_seed(token, call.draws)
    torch.set_rng_state(state)  # ranks without rows do not draw
    return token, derive_seed(token, "skipped", progress.current.next_draw_position()[-1])


def _remember(token: int, draw: BatchDraw) -> None:
    _drawn[token] = draw
    if len(_drawn) > _MAX_DRAWS:
        _drawn.popitem(last=False)


def _call_of_method() -> ForwardCall | None:
    """A call for what is drawn in another method of a replica than its forward."""
    frame: FrameType | None = sys._getframe(2) if forward_calls.replica_of_part else None
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                replica = forward_calls.replica_of_part.get(module)
                return None if replica is None else replica.call_of_method()
        frame = frame.f_back
    return None


def _recomputed_draw() -> BatchDraw | None:
    """What was drawn at this state of torch's generator, in a replica.

    Without one the generator stays as it is, so that torch draws what its own forward drew again.
    """
    state = torch.get_rng_state()
    draw = _drawn.get(draw_token())
    if draw is None:
        torch.set_rng_state(state)
    return draw


def draw_token(generator: torch.Generator | None = None) -> int:
    """A number by which a draw is found again."""
    return int(_random(torch.empty((), dtype=torch.int64, device="cpu"), generator=generator))


# -------------------------------------------------------------------------- masks of dropout


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
        forward_calls.note_shape(call, shape, dim)
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
