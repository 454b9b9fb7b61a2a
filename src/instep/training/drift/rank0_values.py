"""What every rank has computed by itself becomes rank 0's.

Kernels of several threads may add in another order each time (an accumulating `index_put_`). Ranks
that have made the same steps, each by itself, then differ by rounding, which further steps amplify.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from zlib import crc32

import torch
from torch import Tensor

from instep.distributed.communication.collectives import broadcast_coalesced
from instep.distributed.communication.transport import Transport
from instep.training.drift.bit_sums import bit_sums, combine, is_comparable
from instep.training.drift.comparison import compared_models
from instep.training.drift.optimizers import parameters_of, stepped_optimizers
from instep.training.pytree import find_tensors


def take_rank0_values(transport: Transport) -> None:
    """If the ranks differ, overwrite with rank 0's what the models hold that are compared, and the
    optimizers that have stepped: parameters, their gradients, buffers and states. Collective.

    Nothing is overwritten where the ranks have other tensors; the next comparison reports that.
    """
    found = {id(each): each for each in _all_tensors() if is_comparable(each)}
    tensors = [each for each in found.values() if not each.is_inference()]
    layout = crc32(repr([(each.shape, each.dtype) for each in tensors]).encode())
    mine = torch.tensor([layout, combine(bit_sums(tensors))], device="cpu")
    messages = transport.all_gather(mine.to(transport.control_device))
    layouts, sums = zip(*map(Tensor.tolist, messages), strict=True)
    if len({*layouts}) == 1 < len({*sums}):
        broadcast_coalesced(tensors)  # all: in one of them, two roundings may have equal sums


def _all_tensors() -> Iterator[Tensor]:
    for model in compared_models():
        yield from _with_gradients(model.parameters())
        yield from model.buffers()
    for optimizer in stepped_optimizers():
        parameters = parameters_of(optimizer)
        yield from _with_gradients(parameters)
        yield from find_tensors([optimizer.state.get(each) for each in parameters])


def _with_gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    for parameter in parameters:
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
