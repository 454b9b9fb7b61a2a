"""Losses in a sharded call, or of its outputs: those of the whole batch.

A mean over this rank's rows is not the mean over the batch where rows count differently (ignored
tokens, class weights). So inside of a sharded call PyTorch's loss functions add up over the ranks,
numerator and denominator, and every rank gets the value that one process would.
"""

from __future__ import annotations

import inspect
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

from instep.process.patching import Function
from instep.process.torch_private.compiler import disable_compile
from instep.process.torch_private.modules import legacy_reduction
from instep.unedited.sharded_call.run.mappings import reduce_from_region, scatter_to_region
from instep.unedited.sharded_call.run.region import current_region, is_inside
from instep.unedited.sharded_call.run.sharded_output import ShardedOutput
from instep.unedited.sharded_call.run.tensor_subclasses import (
    as_plain,
    is_subclass,
    with_attributes_of,
)
from instep.unedited.sharded_call.shards.node_names import named_as_mean

NAMES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
    *("poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss", "hinge_embedding_loss"),
    *("margin_ranking_loss", "cosine_embedding_loss", "triplet_margin_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"),
)
"""The losses of torch.nn.functional that add up over rows and divide by what they added up."""


class _OwnCall(threading.local):
    """Whether a loss is called from here. Under a mode of torch's, such as that of a default
    device, a function calls itself once more, by its public name: the one that is replaced."""

    is_running = False

    def __call__(self, original: Function, arguments: dict[str, Any]) -> Tensor:
        self.is_running = True
        try:
            result: Tensor = original(**arguments)
            return result
        finally:
            self.is_running = False


_own_call = _OwnCall()


def loss(original: Function, *args: Any, **kwargs: Any) -> Any:
    """A loss of torch.nn.functional; from the rows of all ranks, where each holds its own."""
    if _own_call.is_running:
        return original(*args, **kwargs)
    if is_inside():
        return _loss_inside(original, args, kwargs)
    if ShardedOutput in map(type, (*args, *kwargs.values())):
        return _loss_of_outputs(original, args, kwargs)
    return original(*args, **kwargs)


@disable_compile
def _loss_inside(original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss in a sharded call: every argument is this rank's rows."""
    described = next((x for x in (*args, *kwargs.values()) if is_subclass(x)), None)
    if described is not None:
        plain = {name: as_plain(value) for name, value in kwargs.items()}
        total = _loss_inside(original, tuple(map(as_plain, args)), plain)
        return with_attributes_of(described, total)
    call = _LossCall(original, args, kwargs)
    if call.reduction not in ("mean", "sum", "batchmean"):
        return original(*args, **kwargs)
    region = current_region()
    assert region is not None
    part = call.sum(call.arguments)
    if call.reduction == "sum":
        return region.sum(part)
    divisor = call.mean_divisor(call.arguments)
    if not isinstance(divisor, Tensor):  # filled in: a copy to a GPU would be waited for
        divisor = part.new_full((), divisor)
    total, whole_divisor = region.sum(torch.stack([part, divisor.detach().to(part.dtype)]))
    mean = total / whole_divisor
    return named_as_mean(mean, part) if call.reduction == "mean" else mean


def _loss_of_outputs(original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss of outputs of a sharded call: they are on their ranks, other arguments are whole."""
    call = _LossCall(original, args, kwargs)
    output = next(value for value in call.arguments.values() if isinstance(value, ShardedOutput))
    local = call.local_arguments(output)
    if local is None or call.reduction not in ("mean", "sum", "batchmean"):
        return original(*args, **kwargs)
    part = call.sum(local)
    total = reduce_from_region([part], [1], output.group)
    if call.reduction == "sum":
        return total
    mean = total / call.mean_divisor(call.arguments)
    return named_as_mean(mean, part) if call.reduction == "mean" else mean


class _LossCall:
    """A call of a loss: its arguments by name, and its reduction."""

    def __init__(self, original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._original = original
        bound = _signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        self.arguments = bound.arguments
        self.reduction = _reduction(self.arguments)

    def sum(self, arguments: dict[str, Any]) -> Tensor:
        """The loss of these arguments with `reduction="sum"`."""
        changed = {"reduction": "sum", "size_average": None, "reduce": None}
        changed_arguments = {name: changed.get(name, arguments[name]) for name in arguments}
        return _own_call(self._original, changed_arguments)

    def local_arguments(self, output: ShardedOutput) -> dict[str, Any] | None:
        """The arguments with this rank's rows only; None where they are not all a batch's."""
        local: dict[str, Any] = {}
        for name, value in self.arguments.items():
            if isinstance(value, ShardedOutput):
                if not value.is_aligned_with(output):
                    return None
                local[name] = value.local
            elif not isinstance(value, Tensor):
                local[name] = value
            elif name in _PER_CLASS and value.dim() < output.dim():
                local[name] = value  # also where there are as many classes as rows
            elif self._original.__name__ in _ELEMENTWISE and value.dim() < output.dim():
                return None  # it is broadcast over the rows
            elif value.dim() and value.shape[0] == output.shape[0]:
                (local[name],) = scatter_to_region(value, [output.block], 0, output.group)
            else:
                return None
        return local

    def mean_divisor(self, arguments: dict[str, Any]) -> Tensor | float:
        """The number by which a mean over these rows divides."""
        first = next(value for value in arguments.values() if isinstance(value, Tensor))
        if self.reduction == "batchmean":
            return first.shape[0]
        if self._original.__name__ in ("cross_entropy", "nll_loss"):
            return _class_weight_sum(first, arguments)
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        same_shape = all(value.shape == first.shape for value in tensors)
        if same_shape and self._original.__name__ not in _ONE_PER_ROW:
            return first.numel()
        return _own_call(self._original, {**arguments, "reduction": "none"}).numel()


_PER_CLASS = ("weight", "pos_weight")
"""Arguments that may be one number for each class."""

_ELEMENTWISE = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss"),
    *("hinge_embedding_loss", "margin_ranking_loss"),
)
"""Losses with one number for each element of tensors that broadcast."""

_ONE_PER_ROW = ("triplet_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss")
"""Losses with one number for each row of tensors of one shape; others have one per element."""


@cache
def _signature(original: Function) -> inspect.Signature:
    return inspect.signature(original)


def _reduction(arguments: dict[str, Any]) -> str:
    average, reduce = arguments.get("size_average"), arguments.get("reduce")
    if average is None and reduce is None:
        return str(arguments["reduction"])
    return str(legacy_reduction(average, reduce))


def _class_weight_sum(scores: Tensor, arguments: dict[str, Any]) -> Tensor | float:
    target: Tensor = arguments["target"]
    if target.is_floating_point():  # probabilities: one loss per row and position
        return scores.numel() / scores.shape[1 if scores.dim() > 1 else 0]
    kept = target != arguments["ignore_index"]
    weights: Tensor | None = arguments["weight"]
    return kept.sum() if weights is None else weights[target.where(kept, 0)].where(kept, 0).sum()
