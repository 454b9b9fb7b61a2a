"""`jittor.optim`: PyTorch's optimizers with Jittor's arguments, and with `step(loss)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from instep.distributed.rendezvous import bootstrap
from instep.training.buckets.reducer import reducer_of
from instep.training.drift.optimizers import parameters_of
from instep.training.errors import CannotShardError

__all__ = ["SGD", "Adam", "AdamW"]


class _LossSteps(torch.optim.Optimizer):
    """`step(loss)` computes the gradients, steps, and sets the gradients to zero.

    The gradients are those of the global batch: the parameters are a replicated model's.
    """

    _step: Callable[..., Any]
    """torch's step, with its hooks."""

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Add the gradients of a loss to `.grad`, until the next step. Collective.

        Raises CannotShardError for parameters that no rank sums.
        """
        if bootstrap.current().parallel:
            for parameter in self._trained():
                if parameter not in reducer_of:
                    raise CannotShardError(
                        f"a parameter of shape {tuple(parameter.shape)} is in no replicated model, "
                        "so the ranks' gradients of it differ. Call instep.replicate(model) first."
                    )
        loss.backward(retain_graph=retain_graph)

    def step(self, loss: Tensor | None = None, retain_graph: bool = False) -> None:  # type: ignore[override]
        """The gradients of `loss`, one step with them and those of earlier `backward`s, and zeros.

        Collective with a loss. Raises CannotShardError.
        """
        if loss is not None:
            self.backward(loss, retain_graph)
        type(self)._step(self)
        self.zero_grad()

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps it otherwise: hooks would run twice

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2) -> None:
        """Scale the gradients of all parameters to a norm of at most `max_norm`; after backward."""
        clip_grad_norm_(self._trained(), max_norm, norm_type)

    def _trained(self) -> list[Tensor]:
        return [each for each in parameters_of(self) if each.requires_grad]


def _hooked_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    step = kind.step
    return step if getattr(step, "hooked", False) else kind.profile_hook_step(step)


class SGD(_LossSteps, torch.optim.SGD):
    """torch.optim.SGD. `dampening` must be 0: PyTorch's first step differs from Jittor's there."""

    _step = _hooked_step(torch.optim.SGD)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0,
        weight_decay: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
    ) -> None:
        if dampening:
            raise ValueError(
                "dampening is 0 here: PyTorch leaves it out of the first step, and Jittor does "
                "not. Take torch.optim.SGD."
            )
        super().__init__(params, lr, momentum, weight_decay=weight_decay, nesterov=nesterov)


class _AdamArguments(_LossSteps):
    """The arguments of Adam and AdamW in Jittor's order; `weight_decay` is 0 by default."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        eps: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)  # type: ignore[arg-type, call-arg]


class Adam(_AdamArguments, torch.optim.Adam):
    """torch.optim.Adam."""

    _step = _hooked_step(torch.optim.Adam)


class AdamW(_AdamArguments, torch.optim.AdamW):
    """torch.optim.AdamW."""

    _step = _hooked_step(torch.optim.AdamW)
