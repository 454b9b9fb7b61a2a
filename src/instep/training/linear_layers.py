"""Linear layers of replicas: their weights' gradients as factors (`buckets.weight_factors`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from instep.process.patching import Function, Patch
from instep.process.torch_private.autograd import (
    accumulates_in,
    interpreter_stack,
    is_in_forward_ad,
)
from instep.training.buckets.reducer import Reducer, reducer_of
from instep.training.buckets.weight_factors import Factors, may_be_factored


def _linear(
    original: Function,
    input: Tensor,  # noqa: A002  (torch's name)
    weight: Tensor,
    bias: Tensor | None = None,
) -> Any:
    """torch.nn.functional.linear."""
    if torch.compiler.is_compiling() or type(weight) is not nn.Parameter:
        return original(input, weight, bias)
    if may_be_factored(weight) and _may_give(input, weight):
        return _Linear.apply(original, input, weight, bias)  # type: ignore[no-untyped-call]
    return original(input, weight, bias)


def _may_give(rows: Tensor, weight: nn.Parameter) -> bool:
    """Whether the backward of this call may give factors."""
    reducer: Reducer | None = reducer_of.get(weight)
    return (
        reducer is not None
        and weight.requires_grad
        and torch.is_grad_enabled()
        and type(rows) in (Tensor, nn.Parameter)
        and rows.dtype == weight.dtype
        and rows.is_cpu
        and rows.shape[-1:] == weight.shape[1:]
        and reducer.takes_factors(weight, rows.numel() // rows.shape[-1])
        and not torch.is_autocast_enabled("cpu")
        and not (torch.jit.is_tracing() or interpreter_stack() or is_in_forward_ad())
    )


class _Linear(torch.autograd.Function):
    """As the node of torch, with the same numbers; but the gradient of the weight goes to its
    reducer as factors, where that takes them."""

    @staticmethod
    def forward(
        ctx: Any, original: Function, rows: Tensor, weight: nn.Parameter, bias: Tensor | None
    ) -> Any:
        ctx.weight = weight
        ctx.save_for_backward(rows, weight if rows.requires_grad else None)
        return original(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        _, needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        factors = Factors(grad.reshape(-1, grad.shape[-1]), rows.reshape(-1, rows.shape[-1]))
        of_input = of_weight = of_bias = None
        if needs_input:
            of_input = factors.output_grads.mm(weight).view_as(rows)
        if needs_weight and not _give(ctx, factors):
            of_weight = factors.product()
        if needs_bias:
            of_bias = factors.output_grads.sum(0)
        return None, of_input, of_weight, of_bias


def _give(ctx: Any, factors: Factors) -> bool:
    """Whether the reducer has taken the factors."""
    if torch.is_grad_enabled() or not accumulates_in(ctx.next_functions[1][0]):
        return False
    # Copies: what runs before the end of backward may write to either.
    copies = Factors(*(each.clone(memory_format=torch.contiguous_format) for each in factors))
    reducer: Reducer = reducer_of[ctx.weight]
    return reducer.collect_factors(ctx.weight, copies)


PATCHES = [Patch(nn.functional, "linear", _linear, compile="inline")]
"""For replicas."""
