"""Gradients that torch's DistributedDataParallel averages, where `instep.shard` divides batches.

DDP gives each rank's gradient the same weight, though ranks may have unequal numbers of rows. So
backward weights them, as it does for Horovod's optimizers.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from instep.distributed.communication.transport import get_transport
from instep.process.patching import Function, Patch, PatchHandle
from instep.process.torch_private.distributed import DDP_BEFORE_FORWARD
from instep.training import gradients
from instep.training.losses import averages
from instep.training.losses.averages import (
    GradientAverage,
    externally_averaged,
    zero_if_placeholder,
)

_weighted: WeakSet[DistributedDataParallel] = WeakSet()


def weight_ddp_averages() -> None:
    """From now on, DDP's gradients are those of the global batch."""
    if get_transport().size > 1:
        _patch()


@functools.cache
def _patch() -> None:
    before_forward = Patch(
        DistributedDataParallel, DDP_BEFORE_FORWARD, _before_forward, compile="skip"
    )
    PatchHandle([gradients.PATCH, before_forward])


def _before_forward(
    original: Function, model: DistributedDataParallel, *args: Any, **kwargs: Any
) -> Any:
    if model not in _weighted and model.process_group is dist.group.WORLD:
        _weighted.add(model)
        average = GradientAverage()  # what holds the parameters would keep them for ever
        for parameter in filter(lambda each: each.requires_grad, model.module.parameters()):
            externally_averaged[parameter] = average
            parameter.register_hook(zero_if_placeholder)
    if model in _weighted:
        averages.note_forward((args, kwargs))
    return original(model, *args, **kwargs)
