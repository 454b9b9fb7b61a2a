"""`apex.optimizers.FusedNovoGrad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from instep.compat.apex.optimizers.arguments import StepByParameter, norm


class FusedNovoGrad(StepByParameter):
    """NovoGrad (B. Ginsburg et al., Stochastic Gradient Methods with Layer-wise Adaptive Moments,
    2019) as Apex has it.

    For each parameter, with n the norm of its gradient (2, or 0 for the largest element):

        v = sqrt(beta2 * v**2 + (1 - beta2) * n**2)     for the largest element: beta2 * v + ...
        m = beta1 * m + (1 - beta1) * grad              without `grad_averaging`: + grad
        p -= lr * (m / (1 - beta1**t) / (v / sqrt(1 - beta2**t) + eps) + weight_decay * p)

    v begins with the first norm, or with 0 if `init_zero`. With `reg_inside_moment` m sums
    `grad / v + weight_decay * p`.
    """

    updates_by = "parameter"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedNovoGrad does not support the AMSGrad variant.")
        if norm_type not in (0, 2):
            raise RuntimeError("FusedNovoGrad only supports the norms 2 and 0 (infinity).")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults)
        self.reg_inside_moment = reg_inside_moment
        self.set_grad_none = set_grad_none

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        is_largest = group["norm_type"] == 0
        size = norm(grad, float("inf") if is_largest else 2)
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(size) if group["init_zero"] else size.clone()
        before = state["exp_avg_sq"]
        if is_largest:
            blended = beta2 * before + (1 - beta2) * size
        else:
            blended = (beta2 * before**2 + (1 - beta2) * size**2).sqrt()
        state["exp_avg_sq"] = blended
        correction1 = correction2 = 1.0
        if group["bias_correction"]:
            correction1 = 1 - beta1 ** group["step"]
            correction2 = (1 - beta2 ** group["step"]) ** 0.5
        scale = blended / correction2 + group["eps"]
        decay = group["weight_decay"]
        if self.reg_inside_moment:
            grad = (grad / scale).add(parameter, alpha=decay)
        share = 1 - beta1 if group["grad_averaging"] else 1.0
        update = state["exp_avg"].mul_(beta1).add_(grad, alpha=share) / correction1
        if not self.reg_inside_moment:
            update = (update / scale).add(parameter, alpha=decay)
        parameter.sub_(update, alpha=group["lr"])
