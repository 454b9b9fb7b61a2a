"""Loss scales, and whether the gradients of any rank have overflowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from instep.distributed.communication.transport import get_transport
from instep.process.torch_private.tensors import check_finite_and_unscale_

WINDOW = 2000
"""Good steps after which a dynamic scale doubles, unless a scaler has another `window`."""


class LossScaler:
    """The scale of one loss: fixed, or dynamic.

    A dynamic scale begins at 2^16, is halved by an overflow (not below `least`) and doubled after
    `window` good steps in a row (not above `most`); a fixed one never changes.
    """

    def __init__(
        self,
        scale: float | Literal["dynamic"],
        least: float | None = None,
        most: float = 2.0**24,
    ) -> None:
        self.dynamic = scale == "dynamic"
        self.scale = min(most, 2.0**16) if scale == "dynamic" else scale
        self.good = 0
        """Steps without an overflow since the scale last changed."""
        self.overflowed = False
        """Whether the last backward has overflowed."""
        self.least = least or 0.0
        self.most = most
        self.window = WINDOW

    def update(self, overflowed: bool) -> bool:
        """Adapt the scale after a backward; returns whether the step must be skipped."""
        self.overflowed = overflowed
        skip = self.dynamic and overflowed
        if skip:
            self.scale = max(self.least, self.scale / 2)
            self.good = 0
        else:
            self.good += 1
        if self.dynamic and self.good >= self.window:
            self.scale = min(self.most, self.scale * 2)
            self.good = 0
        return skip


def unscale(grads: Iterable[Tensor], scale: float) -> list[Tensor]:
    """Divide gradients by `scale`, in place.

    Returns for each dtype and device a float32 tensor of one element: 1 where an inf or a NaN was
    among them, else 0.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for grad in grads:
        values = grad._values() if grad.is_sparse else grad
        real = torch.view_as_real(values) if values.is_complex() else values
        groups.setdefault((real.dtype, real.device), []).append(real)
    found = []
    for (_, device), group in groups.items():
        flag = torch.zeros(1, device=device)
        inverse = torch.full((1,), 1.0 / scale, device=device)  # a copy to a GPU is waited for
        check_finite_and_unscale_(group, flag, inverse)
        found.append(flag)
    return found


def any_rank_found(found: Iterable[Tensor], device: torch.device) -> bool:
    """Whether a flag is set on any rank; `device` is where this rank's parameters are. Collective.

    Gradients that were summed over ranks agree by themselves; parameters that no rank sums do not.
    """
    flag = torch.zeros(1, device=device)
    for each in found:
        flag = torch.maximum(flag, each.to(device))
    get_transport().all_reduce(flag, "max").wait()
    return bool(flag)
