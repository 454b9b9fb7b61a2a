"""How far a call is from itself when its parameters are one rounding error away.

Layers that divide by the spread of nearly equal numbers, and units that are on for one rounding and
off for another, make much of rounding: as much in one process as in a divided call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

OF_ITS_NOISE = 10.0
"""A divided call may be this many times as far from the whole one as that is from itself."""
AT_MOST = 1e-2
"""Where outputs and buffers are farther apart, it is not called rounding."""
GRADIENT_AT_MOST = 1e-1


@contextmanager
def shaken(module: nn.Module) -> Iterator[None]:
    """Inside, the module's parameters are one rounding error away; the same on all ranks.

    Autograd does not see it: what it has saved before is in order again afterwards.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = [p for p in module.parameters() if p.is_floating_point()]
    kept = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.data.mul_(1 + noise.double() * torch.finfo(parameter.dtype).eps)
    try:
        yield
    finally:
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.data.copy_(value)


def allowed(tolerance: float, noise: float, at_most: float) -> float:
    """How far apart two forwards may be, where one is this far from itself."""
    return max(tolerance, min(OF_ITS_NOISE * noise, at_most))
