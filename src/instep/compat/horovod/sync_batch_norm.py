"""SyncBatchNorm: batch statistics of all ranks, on the CPU too."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.nn.modules import batchnorm as torch_batchnorm

from instep.compat.horovod.basics import after_init, is_initialized, size
from instep.compat.horovod.collectives.gather_broadcast import allgather
from instep.compat.horovod.collectives.handles import Handle
from instep.compat.horovod.collectives.reductions import allreduce_async_
from instep.compat.horovod.ops import Sum
from instep.process.patching import Function, Patch, PatchHandle
from instep.process.torch_private.modules import BatchNorm
from instep.training.forward_calls import replica_of_part
from instep.training.normalization.batchnorm import normalize


class SyncBatchNorm(BatchNorm):
    """Batch normalisation whose statistics in training are those of all ranks' rows.

    Args as torch.nn.BatchNorm2d's; inputs are (rows, channels, ...). Ranks may have different
    numbers of rows. Weight and bias get this rank's gradients, which DistributedOptimizer averages.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes (rows, channels, ...), not {input.dim()}D.")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """As torch's batch normalisation. In training collective, and its backward too."""
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        return normalize(self, input, _NegotiatedTransport())


class _NegotiatedTransport:
    """Collectives by name, so that ranks which have joined take part with zeros.

    One name is enough for all layers, since each of them waits for its collective.
    """

    @property
    def size(self) -> int:
        """The number of ranks."""
        return size()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor."""
        return list(allgather(tensor.detach()[None], "sync_batch_norm.statistics"))

    def all_reduce(self, tensor: Tensor, op: str) -> Handle:
        """The sum, in place."""
        return allreduce_async_(tensor, name="sync_batch_norm.sums", op=Sum)


def _of_all_ranks(original: Function, module: BatchNorm, x: Tensor) -> Any:
    """nn.SyncBatchNorm on the CPU, where torch refuses it in a process group: Horovod has none."""
    is_ours = x.is_cpu and is_initialized() and module not in replica_of_part
    if not is_ours or not (module.training or not module.track_running_stats) or size() == 1:
        return original(module, x)
    return normalize(module, x, _NegotiatedTransport())


@functools.cache
def _follow_torch() -> None:
    PatchHandle([Patch(torch_batchnorm.SyncBatchNorm, "forward", _of_all_ranks, compile="skip")])


after_init.append(_follow_torch)
