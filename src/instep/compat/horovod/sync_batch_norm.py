"""SyncBatchNorm: batch statistics of all ranks, on the CPU too."""

from __future__ import annotations

from torch import Tensor

from instep.compat.horovod.basics import size
from instep.compat.horovod.gather_broadcast import allgather
from instep.compat.horovod.handles import Handle
from instep.compat.horovod.ops import Sum
from instep.compat.horovod.reductions import allreduce_async_
from instep.process.torch_private import BatchNorm
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

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor."""
        return list(allgather(tensor.detach()[None], "sync_batch_norm.statistics"))

    def all_reduce(self, tensor: Tensor, op: str) -> Handle:
        """The sum, in place."""
        return allreduce_async_(tensor, name="sync_batch_norm.sums", op=Sum)
