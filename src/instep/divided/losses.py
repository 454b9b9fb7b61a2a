"""Losses that a divided module computes in its own forward: those of the whole batch.

A mean over this rank's rows is not the mean over the batch where rows count differently (ignored
tokens, class weights). So inside of a divided call PyTorch's loss functions add up over the ranks,
numerator and denominator, and every rank gets the value that one process would.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from instep.collectives import all_reduce
from instep.divided import region
from instep.seams import Function, uncompiled

NAMES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
    *("poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss", "hinge_embedding_loss"),
    *("margin_ranking_loss", "cosine_embedding_loss", "triplet_margin_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"),
)
"""The losses of torch.nn.functional that add up over rows and divide by what they added up."""


def loss(original: Function, *args: Any, **kwargs: Any) -> Any:
    """A loss of torch.nn.functional; over the rows of all ranks inside of a divided call."""
    if not region.is_inside():
        return original(*args, **kwargs)
    return _of_whole_batch(original, args, kwargs)


@uncompiled
def _of_whole_batch(original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    how = _reduction(given)
    if how not in ("mean", "sum", "batchmean"):
        return original(*args, **kwargs)
    given.update(reduction="sum", size_average=None, reduce=None)
    given = {
        name: value for name, value in given.items() if name in _signature(original).parameters
    }
    total = all_reduce(original(**given))
    if how == "sum":
        return total
    count = torch.as_tensor(_denominator(original, given, how), device=total.device)
    return total / all_reduce(count.detach().to(total.dtype))


@cache
def _signature(original: Function) -> inspect.Signature:
    return inspect.signature(original)


def _reduction(given: dict[str, Any]) -> str:
    average, reduce = given.get("size_average"), given.get("reduce")
    if average is None and reduce is None:
        how: str = given["reduction"]
        return how
    legacy: str = nn._reduction.legacy_get_string(average, reduce, emit_warning=False)
    return legacy


def _denominator(original: Function, given: dict[str, Any], how: str) -> Tensor | float:
    """What a mean of this rank's rows divides by."""
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    name, first = original.__name__, tensors[0]
    if how == "batchmean":
        return first.shape[0]
    if name in ("cross_entropy", "nll_loss"):
        return _classes_counted(first, given)
    whole: Tensor = original(**{**given, "reduction": "none"})
    return whole.numel()


def _classes_counted(scores: Tensor, given: dict[str, Any]) -> Tensor | float:
    target: Tensor = given["target"]
    if target.is_floating_point():  # probabilities: one loss per row and position
        return scores.numel() / scores.shape[1 if scores.dim() > 1 else 0]
    kept = target != given["ignore_index"]
    weights: Tensor | None = given["weight"]
    return kept.sum() if weights is None else weights[target.where(kept, 0)].where(kept, 0).sum()
