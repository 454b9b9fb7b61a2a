"""`apex.optimizers.FusedLAMB`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from instep.compat.apex.optimizers.arguments import StepByParameter, norm
from instep.training.drift.optimizers import parameters_of


class FusedLAMB(StepByParameter):
    """LAMB (Y. You et al., Large Batch Optimization for Deep Learning, ICLR 2020) as Apex has it.

    All gradients are divided by max(1, norm / max_grad_norm), with the norm over all groups. For
    each parameter, with the moments m and v of Adam (without bias correction if asked so; with
    `grad_averaging=False` m adds the whole gradient),

        update = m / (sqrt(v) + eps) + weight_decay * p
        p -= lr * (norm(p) / norm(update)) * update

    The ratio is 1 where a norm is 0, and where weight_decay is 0 unless `use_nvlamb`. With
    `adam_w_mode=False` the decay is added to the gradient instead.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLAMB does not support the AMSGrad variant.")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
        self.use_nvlamb = use_nvlamb

    def _prepare(self) -> None:
        grads = [each.grad for each in parameters_of(self) if each.grad is not None]
        norms = [norm(grad).to(grads[0].device) for grad in grads]
        total = torch.stack(norms).norm() if norms else torch.zeros(())
        self._clip = torch.clamp(total / self.defaults["max_grad_norm"], min=1.0)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        self._change(parameter, grad, self.state[parameter], group)

    def _change(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """One step of `parameter`, whose moments are in `state`, in place."""
        grad = grad / self._clip.to(grad.device)
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        if not self.adam_w_mode:
            grad = grad.add(parameter, alpha=decay)
        share = 1 - beta1 if group["grad_averaging"] else 1.0
        moment = state["exp_avg"].mul_(beta1).add_(grad, alpha=share)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if group["bias_correction"]:
            moment = moment / (1 - beta1 ** group["step"])
            second = second / (1 - beta2 ** group["step"])
        update = moment / (second.sqrt() + group["eps"])
        if self.adam_w_mode:
            update.add_(parameter, alpha=decay)
        if self.use_nvlamb or decay:
            own, change = norm(parameter), norm(update)
            update *= torch.where((own > 0) & (change > 0), own / change, 1.0)
        parameter.sub_(update, alpha=group["lr"])
