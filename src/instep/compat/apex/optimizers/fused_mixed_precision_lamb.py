"""`apex.optimizers.FusedMixedPrecisionLamb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from instep.compat.apex.optimizers.arguments import refuse
from instep.compat.apex.optimizers.fused_lamb import FusedLAMB
from instep.training.drift.optimizers import parameters_of


class FusedMixedPrecisionLamb(FusedLAMB):
    """FusedLAMB with float32 copies of the parameters in `reduced_precision_dtype`, which are made
    in the first step and are part of the state, as float32 moments are.

    `step` is the number of steps that were made before. `lr` and the steps are numbers, and not
    tensors as Apex's. With a GradScaler call `scaler.step(optimizer)`: it divides by the scale.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
        )
        self.reduced_precision_dtype = reduced_precision_dtype
        for group in self.param_groups:
            group["step"] = int(step)

    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: object = None) -> Any:
        """Update the parameters that have a gradient. Raises ValueError for a grad_scaler."""
        refuse("FusedMixedPrecisionLamb.step", grad_scaler=grad_scaler)
        return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in the dtypes in which it was saved."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters_of(self), strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[parameter][name] = value.to(parameter.device, copy=True)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if parameter.dtype is not self.reduced_precision_dtype:
            super()._update(parameter, grad, group)
            return
        state = self.state[parameter]
        now = parameter.float()
        before = state.setdefault("full_precision", now)
        is_kept = before.to(parameter.dtype) == parameter  # else something else has written it
        full = state["full_precision"] = torch.where(is_kept, before, now)
        self._change(full, grad.float(), state, group)
        parameter.copy_(full)
