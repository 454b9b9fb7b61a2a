"""Names of nodes of the autograd graph: what a script prints of a result, such as
`grad_fn=<AddmmBackward0>`, is what one process prints, whatever has joined the shards' results."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.tensors import apply

AutogradFunction = type[torch.autograd.Function]


def named_like(function: AutogradFunction, tensor: Tensor) -> AutogradFunction:
    """This function, with nodes of the name that the tensor's has."""
    node = tensor.grad_fn
    return function if node is None else _named(function, node.name().rpartition("::")[2])


def named_as_mean(mean: Tensor, sums: Tensor) -> Tensor:
    """This mean, with the node of an operation that gives it at once; its sums are given."""
    if sums.grad_fn is None or not mean.requires_grad:
        return mean
    name = sums.grad_fn.name().replace("SumBackward", "MeanBackward")
    same: Tensor = apply(_named(_Same, name), mean)
    return same


@cache
def _named(function: AutogradFunction, name: str) -> AutogradFunction:
    metaclass: Any = type(function)
    named: Any = metaclass(function.__name__, (function,), {})
    named._backward_cls.__name__ = name
    return named  # type: ignore[no-any-return]


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()  # a script may change it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
