# ruff: noqa: N999  (scripts import it by Apex's name of the module)
"""LARC: a learning rate for each parameter (You, Gitman, Ginsburg 2017, arXiv:1708.03888)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LARC:
    """An optimizer whose gradients are rescaled before each step, parameter by parameter.

    The local rate is trust_coefficient |p| / (|g| + weight_decay |p| + eps). With `clip` the
    parameter's rate is the group's times min(local / lr, 1), without it the group's times the local
    one. The group's weight decay is added to the gradient here, not by the optimizer.

    All other attributes are the wrapped optimizer's: `param_groups`, `state`, `state_dict`...
    """

    optim: Any

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    def step(self) -> None:
        """Rescale the gradients in place, then let the optimizer step without weight decay."""
        decays = [group.get("weight_decay", 0) for group in self.optim.param_groups]
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            group["weight_decay"] = 0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._rescale(parameter, group["lr"], decay)
        try:
            self.optim.step()
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    @torch.no_grad()
    def _rescale(self, parameter: Tensor, rate: float, decay: float) -> None:
        grad = parameter.grad
        assert grad is not None
        norm, grad_norm = parameter.norm(), grad.norm()
        local = self.trust_coefficient * norm / (grad_norm + norm * decay + self.eps)
        if self.clip:
            local = torch.clamp(local / rate, max=1)
        # The gradient stays if either norm is zero. An `if` would wait for the GPU.
        unchanged, zero = (norm == 0) | (grad_norm == 0), torch.zeros_like(norm)
        grad.addcmul_(parameter, torch.where(unchanged, zero, decay))
        grad.mul_(torch.where(unchanged, zero + 1, local))
