"""Batch normalisation over the rows of several ranks, on any device."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import relu

from instep.distributed.communication.groups import Group, group
from instep.distributed.communication.transport import get_transport
from instep.distributed.rendezvous import bootstrap
from instep.process.torch_private.modules import BatchNorm
from instep.training.normalization.batchnorm import normalize

Ranks = Group | dist.ProcessGroup | None


class SyncBatchNorm(BatchNorm):
    """BatchNorm1d, 2d or 3d whose statistics in training are those of all ranks' rows.

    Rows are counted: ranks may hold different numbers of them, or none (a placeholder).

    Args:
        process_group: the ranks that share statistics, of `create_syncbn_process_group` or of
            torch; all by default.
        channel_last: whether the channels are the last dimension of the input.
        fuse_relu: apply a ReLU at the end.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Ranks = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:  # noqa: A002 (torch's)
        """Normalise `input`; `z` is added before the ReLU."""
        swap = self.channel_last and input.dim() > 2
        output = self._normalize(input.movedim(-1, 1) if swap else input)
        if swap:
            output = output.movedim(1, -1)
        if z is not None:
            output = output + z
        return relu(output) if self.fuse_relu else output

    def _normalize(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        return normalize(self, x, get_transport(_as_group(self.process_group)))

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  (torch's)
        """Any number of dimensions from 2 up."""


def convert_syncbn_model(
    module: nn.Module, process_group: Ranks = None, channel_last: bool = False
) -> nn.Module:
    """`module` with every batch normalisation replaced by a SyncBatchNorm of the same state.

    Parameters and buffers stay the same objects, so the optimizer may be made before.
    """
    if isinstance(module, BatchNorm) and not isinstance(module, SyncBatchNorm):
        synced = SyncBatchNorm(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            process_group,
            channel_last,
        )
        synced.train(module.training)
        synced._parameters.update(module._parameters)
        synced._buffers.update(module._buffers)
        return synced
    for name, child in module.named_children():
        setattr(module, name, convert_syncbn_model(child, process_group, channel_last))
    return module


def create_syncbn_process_group(group_size: int) -> Group | None:
    """The ranks that share batch statistics with this one, `group_size` of them in a row.

    0 means all ranks (None is returned). Collective. Raises ValueError unless `group_size` divides
    the number of ranks.
    """
    if group_size == 0:
        return None
    world = bootstrap.init()
    if group_size < 0 or world.size % group_size:
        raise ValueError(
            f"groups of {group_size} do not divide {world.size} ranks; choose a divisor, or 0."
        )
    starts = range(0, world.size, group_size)
    groups = [group(range(start, start + group_size)) for start in starts]
    return groups[world.rank // group_size]


def _as_group(ranks: Ranks) -> Group | None:
    if isinstance(ranks, dist.ProcessGroup):
        return Group(tuple(dist.get_process_group_ranks(ranks)), ranks)
    return ranks
