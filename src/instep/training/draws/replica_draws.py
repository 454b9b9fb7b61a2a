"""The draws of a replica: for the whole batch, and found again when something is computed again."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from instep.distributed.communication.transport import get_transport
from instep.process.torch_private.autograd import VMAP, current_graph_task_id, interpreter_stack
from instep.training import forward_calls
from instep.training.batches import progress
from instep.training.batches.registry import may_be_skipped
from instep.training.blocks import Block
from instep.training.forward_calls import ForwardCall
from instep.training.random_streams import derive_seed

_MAX_DRAWS = 4096
_random = torch.Tensor.random_
"""As it is before it is replaced in replicas."""


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
