"""`apex.optimizers.FusedAdam`."""

from __future__ import annotations

from typing import Any

import torch

from instep.compat.apex.optimizers.arguments import (
    ZeroGradByDefault,
    fused,
    group_parameters,
    refuse,
)


class FusedAdam(ZeroGradByDefault, torch.optim.Adam):
    """Adam, by default with decoupled weight decay (AdamW), as Apex's FusedAdam.

    Raises ValueError for what PyTorch's Adam has not: bias_correction=False, master_weights; and
    RuntimeError, as Apex, for amsgrad.
    """

    updates_by = "element"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if not bias_correction:
            refuse("FusedAdam", bias_correction="False")
        refuse("FusedAdam", master_weights=master_weights)
        groups, parameters = group_parameters(params)
        super().__init__(
            groups,
            lr,
            betas,
            eps,
            weight_decay,
            capturable=capturable,
            fused=fused(parameters, ("cpu", "cuda", "xpu")),
            decoupled_weight_decay=adam_w_mode,
        )
        self.set_grad_none = set_grad_none
