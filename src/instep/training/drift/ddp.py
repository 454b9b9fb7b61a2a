"""Drift of models that the script has put into DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from instep.distributed.communication.transport import get_transport
from instep.process.patching import Function
from instep.training.drift.comparison import DriftCheck
from instep.training.drift.distributed_batches import count_batches, follow_loaders


def follow(original: Function, model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    """DistributedDataParallel.__init__, after which the ranks compare the model now and then.

    They do so at the beginning of a forward in training, of which each rank makes as many. Buffers
    are DDP's affair. Only models of the world are compared.
    """
    original(model, *args, **kwargs)
    if model.process_group is dist.group.WORLD and dist.get_world_size() > 1:
        follow_loaders()
        check = DriftCheck(model.module, get_transport(), buffers="rank")
        model.register_forward_pre_hook(_ForwardCount(check))


class _ForwardCount:
    """Before each forward of a step but the first one, a step has ended."""

    def __init__(self, check: DriftCheck) -> None:
        self._check = check
        self._has_begun = False

    def __call__(self, model: Any, args: object) -> None:
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        joins = model._join_config.enable  # ranks without data take part in DDP's collectives only
        if joins or not model.require_backward_grad_sync:
            return
        if self._has_begun:
            self._check.end_backward(count_batches())
        self._has_begun = True
