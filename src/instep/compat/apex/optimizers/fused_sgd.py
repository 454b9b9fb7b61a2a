"""`apex.optimizers.FusedSGD`."""

from __future__ import annotations

from typing import Any

import torch

from instep.compat.apex.optimizers.arguments import (
    ZeroGradByDefault,
    group_parameters,
    refuse,
)


class FusedSGD(ZeroGradByDefault, torch.optim.SGD):
    """SGD with momentum, as Apex's FusedSGD.

    `materialize_master_grads` changes nothing: `amp` of instep always makes them. Raises ValueError
    for wd_after_momentum.
    """

    updates_by = "element"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        refuse("FusedSGD", wd_after_momentum=wd_after_momentum)
        groups, _ = group_parameters(params)
        super().__init__(groups, lr, momentum, dampening, weight_decay, nesterov)
        self.set_grad_none = set_grad_none
