"""The common part of Horovod's and Apex's SyncBatchNorm: batch statistics of several ranks."""

from __future__ import annotations

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from instep.training import batchnorm


def normalize(module: _BatchNorm, x: Tensor, transport: batchnorm.ReduceTransport) -> Tensor:
    """The forward of torch's `_BatchNorm`, by statistics of the rows of all ranks. Collective."""
    momentum = 0.0 if module.momentum is None else module.momentum
    if module.training and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            momentum = 1.0 / float(module.num_batches_tracked)
    return batchnorm.batch_norm(
        x,
        module.running_mean if module.training else None,
        module.running_var if module.training else None,
        module.weight,
        module.bias,
        True,
        momentum,
        module.eps,
        transport=transport,
    )
