"""`apex.optimizers.FusedAdagrad`."""

from __future__ import annotations

from typing import Any

import torch

from instep.compat.apex.optimizers.arguments import (
    ZeroGradByDefault,
    fused,
    group_parameters,
    refuse,
)


class FusedAdagrad(ZeroGradByDefault, torch.optim.Adagrad):
    """Adagrad, as Apex's FusedAdagrad. Raises ValueError for adagrad_w_mode."""

    updates_by = "element"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        refuse("FusedAdagrad", adagrad_w_mode=adagrad_w_mode)
        groups, parameters = group_parameters(params)
        super().__init__(
            groups, lr, weight_decay=weight_decay, eps=eps, fused=fused(parameters, ("cpu",))
        )
        self.set_grad_none = set_grad_none
