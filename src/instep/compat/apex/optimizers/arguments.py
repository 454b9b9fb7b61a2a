"""What Apex's optimizers have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_ROW = 4096


def refuse(optimizer: str, **given: object) -> None:
    """Raise ValueError for arguments that are set and that these optimizers do not have."""
    for name, value in given.items():
        if value:
            raise ValueError(
                f"{optimizer} of instep has no {name}={value!r}: PyTorch has no optimizer like it. "
                "Leave it out, or write the step as an optimizer of your own."
            )


class ZeroGradByDefault(Optimizer):
    """An optimizer whose `zero_grad()` does what `set_grad_none` of its constructor said."""

    set_grad_none = True

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set gradients to None, or to zeros."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class StepByParameter(ZeroGradByDefault):
    """An optimizer that updates one parameter after the other, and counts steps by group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _prepare(self) -> None:
        """Look at all gradients before the first update."""

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter in place."""
        raise NotImplementedError


def norm(tensor: Tensor, order: float = 2) -> Tensor:
    """The norm of all elements, at least in float32.

    By rows of 4,096: of a large tensor PyTorch's kernel for CPUs adds the squares in long rows, and
    loses a thousandth at 30 million elements.
    """
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    flat = tensor.reshape(-1)
    if tensor.device.type == "cpu" and flat.numel() > _ROW:
        whole = flat.numel() // _ROW * _ROW
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), order, 1, dtype=dtype)
        flat = torch.cat([rows, flat[whole:].to(dtype)])
    result: Tensor = torch.linalg.vector_norm(flat, order, dtype=dtype)
    return result


def fused(parameters: Iterable[Tensor], kinds: tuple[str, ...]) -> bool | None:
    """Whether PyTorch's fused kernel takes all parameters; None leaves the choice to PyTorch."""
    takes_all = all(p.device.type in kinds and torch.is_floating_point(p) for p in parameters)
    return True if takes_all else None


def group_parameters(params: Any) -> tuple[list[Any], list[Tensor]]:
    """What an optimizer's constructor is given, as a list, and all parameters in it."""
    groups = list(params)
    flat: list[Tensor] = []
    for group in groups:
        if not isinstance(group, dict):
            flat.append(group[1] if isinstance(group, tuple) else group)
        elif isinstance(group["params"], Tensor):
            flat.append(group["params"])
        else:
            group["params"] = list(group["params"])
            flat += group["params"]
    return groups, flat
