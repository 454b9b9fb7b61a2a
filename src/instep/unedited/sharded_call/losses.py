"""Losses that a divided module computes in its own forward: those of the whole batch.

A mean over this rank's rows is not the mean over the batch where rows count differently (ignored
tokens, class weights). So inside of a divided call PyTorch's loss functions add up over the ranks,
numerator and denominator, and every rank gets the value that one process would.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import Tensor, nn

from instep.distributed.communication.collectives import all_reduce
from instep.process.patching import Function
from instep.process.torch_compile import disable_compile
from instep.unedited.sharded_call import region
from instep.unedited.sharded_call.mappings import own_rows, summed
from instep.unedited.sharded_call.sharded_output import Rows

NAMES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
    *("poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss", "hinge_embedding_loss"),
    *("margin_ranking_loss", "cosine_embedding_loss", "triplet_margin_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"),
)
"""The losses of torch.nn.functional that add up over rows and divide by what they added up."""


def loss(original: Function, *args: Any, **kwargs: Any) -> Any:
    """A loss of torch.nn.functional; from the rows of all ranks, where each holds its own."""
    if region.is_inside():
        return _inside(original, args, kwargs)
    if any(isinstance(value, Rows) for value in (*args, *kwargs.values())):
        return _of_rows(original, args, kwargs)
    return original(*args, **kwargs)


@disable_compile
def _inside(original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In a divided call: every argument is this rank's rows."""
    asked = _Asked(original, args, kwargs)
    if asked.how not in ("mean", "sum", "batchmean"):
        return original(*args, **kwargs)
    total = all_reduce(asked.summed(asked.given))
    if asked.how == "sum":
        return total
    count = asked.denominator(asked.given)
    if not isinstance(count, Tensor):  # filled in: a copy to a GPU would be waited for
        count = total.new_full((), count)
    return total / all_reduce(count.detach().to(total.dtype))


def _of_rows(original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of outputs of a divided call: they are on their ranks, other arguments are whole."""
    asked = _Asked(original, args, kwargs)
    rows = next(value for value in asked.given.values() if isinstance(value, Rows))
    own = asked.own_rows(rows)
    if own is None or asked.how not in ("mean", "sum", "batchmean"):
        return original(*args, **kwargs)
    total = summed(asked.summed(own), 1, rows.way)
    return total if asked.how == "sum" else total / asked.denominator(asked.given)


class _Asked:
    """A call of a loss: its arguments by name, and what it shall do with the sum."""

    def __init__(self, original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._original = original
        bound = _signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        self.given = bound.arguments
        self.how = _reduction(self.given)

    def summed(self, given: dict[str, Any]) -> Tensor:
        """The sum, of these arguments."""
        changed = {"reduction": "sum", "size_average": None, "reduce": None}
        total: Tensor = self._original(
            **{name: changed.get(name, value) for name, value in given.items()}
        )
        return total

    def own_rows(self, rows: Rows) -> dict[str, Any] | None:
        """The arguments with this rank's rows only; None where they are not all a batch's."""
        own: dict[str, Any] = {}
        for name, value in self.given.items():
            if isinstance(value, Rows):
                if not value.stays_with(rows):
                    return None
                own[name] = value.own
            elif not isinstance(value, Tensor):
                own[name] = value
            elif value.dim() and value.shape[0] == rows.shape[0]:
                own[name] = own_rows(value, rows.block, 0, rows.way)
            elif name in _PER_CLASS:
                own[name] = value
            else:
                return None
        return own

    def denominator(self, given: dict[str, Any]) -> Tensor | float:
        """What a mean over these rows divides by."""
        first = next(value for value in given.values() if isinstance(value, Tensor))
        if self.how == "batchmean":
            return first.shape[0]
        if self._original.__name__ in ("cross_entropy", "nll_loss"):
            return _classes_counted(first, given)
        tensors = [value for value in given.values() if isinstance(value, Tensor)]
        alike = all(value.shape == first.shape for value in tensors)
        if alike and self._original.__name__ not in _ONE_PER_ROW:
            return first.numel()
        whole: Tensor = self._original(**{**given, "reduction": "none"})
        return whole.numel()


_PER_CLASS = ("weight", "pos_weight")
"""Arguments that may be one number for each class."""


_ONE_PER_ROW = (*("triplet_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"),)
"""Losses that have one number for each row of tensors that are alike; others have one for each
element."""


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


def _classes_counted(scores: Tensor, given: dict[str, Any]) -> Tensor | float:
    target: Tensor = given["target"]
    if target.is_floating_point():  # probabilities: one loss per row and position
        return scores.numel() / scores.shape[1 if scores.dim() > 1 else 0]
    kept = target != given["ignore_index"]
    weights: Tensor | None = given["weight"]
    return kept.sum() if weights is None else weights[target.where(kept, 0)].where(kept, 0).sum()
