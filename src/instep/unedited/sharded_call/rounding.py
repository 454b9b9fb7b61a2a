"""When two forwards, or the gradients that they give, are the same up to rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from instep.unedited.sharded_call.plan import Call

GRADIENT = 1e-2
"""How far gradients may differ: what is not summed, or summed twice, is far beyond; a unit that
flips by rounding is not."""
HALF_GRADIENT = 1e-1
"""The same where half precision is computed in, whose rounding alone comes near the other."""

_ROUNDING = {
    torch.float64: 1e-11,
    torch.complex128: 1e-11,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
"""How far two forwards may be apart, by what they compute in: relative, in the norm."""


def tolerance(dtype: torch.dtype, device: str = "cpu") -> float:
    """How far two forwards may be apart that differ by rounding: relative, in the norm."""
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    elif device == "cuda" and dtype in (torch.float32, torch.complex64) and _may_be_tf32():
        dtype = torch.float16  # of as many bits
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return _ROUNDING[dtype]


def _may_be_tf32() -> bool:
    """Whether convolutions or matrix products of float32 may compute in TF32 on a GPU: where an
    algorithm does, which is chosen by the batch's shape too. PyTorch lets convolutions."""
    cudnn: Any = torch.backends.cudnn  # torch's stub does not know `conv`
    return "tf32" in (cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision)


def tolerance_of(output: Tensor) -> float:
    """How far two forwards may be apart in this output."""
    return tolerance(output.dtype, output.device.type)


@dataclass(frozen=True)
class Pull:
    """Gradients at some outputs, and what they become at the parameters and inputs."""

    which: tuple[int, ...]
    """Which of the outputs require a gradient."""
    directions: list[Tensor]
    targets: list[Tensor]

    @classmethod
    def of(cls, call: Call, outputs: Sequence[Any]) -> Pull:
        """Any gradient will do: every rank draws the same."""
        which = tuple(
            k for k, out in enumerate(outputs) if isinstance(out, Tensor) and out.requires_grad
        )
        generator = torch.Generator().manual_seed(0)
        directions = [
            torch.randn(outputs[k].shape, generator=generator).to(outputs[k]) for k in which
        ]
        parameters = [p for p in call.module.parameters() if p.requires_grad]
        inputs = [x for x in call.leaves if isinstance(x, Tensor) and x.requires_grad]
        return cls(which, directions, list({id(t): t for t in (*parameters, *inputs)}.values()))

    def through(self, outputs: Sequence[Any]) -> list[Tensor | None]:
        """The gradients that these outputs give; their graph is kept."""
        if not self.which:
            return []
        roots = [outputs[k] for k in self.which]
        found = torch.autograd.grad(
            roots, self.targets, self.directions, retain_graph=True, allow_unused=True
        )
        return [None if grad is None else grad.to_dense() for grad in found]


def gradient_tolerance(outputs: Sequence[Any]) -> float:
    """How far the gradients that these outputs give may differ."""
    allowed = [tolerance(x.dtype, x.device.type) for x in outputs if isinstance(x, Tensor)]
    return HALF_GRADIENT if max(allowed, default=0.0) > GRADIENT else GRADIENT


def gradients_apart(want: Sequence[Tensor | None], have: Sequence[Tensor | None]) -> list[float]:
    """How far each gradient is off, relative to its norm or a part of all norms together."""
    total = sum(float(grad.norm()) ** 2 for grad in want if grad is not None) ** 0.5
    return [_apart(theirs, ours, GRADIENT * total) for theirs, ours in zip(want, have, strict=True)]


def _apart(theirs: Tensor | None, ours: Tensor | None, least: float) -> float:
    if theirs is None or ours is None:
        return 0.0 if theirs is ours else math.inf
    difference, size = float((ours - theirs).norm()), max(float(theirs.norm()), least)
    return (difference / size if size else math.inf) if difference else 0.0
