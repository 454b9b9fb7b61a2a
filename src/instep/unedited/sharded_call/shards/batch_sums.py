"""Sums and means that a forward computes itself, over the rows of the whole batch.

A masked mean, `(loss * mask).sum() / mask.sum()`, is neither the mean nor the sum of those of the
ranks. Where a module's outputs are not those of the whole batch for such a reason, it is tried once
more with sums that go over all ranks; for a loss of torch.nn.functional they always do.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from instep.process.patching import Function

Answer = Callable[[Function, Tensor, tuple[Any, ...], dict[str, Any]], Any]
"""What is called in place of a sum or a mean: with the function, the tensor and what else it was
given."""

_PLACES: tuple[tuple[Any, str], ...] = (
    (torch, "sum"),
    (torch, "mean"),
    (Tensor, "sum"),
    (Tensor, "mean"),
)
_HALF = (torch.float16, torch.bfloat16)
_LIBRARIES = frozenset(("torch", "instep"))


@contextmanager
def replaced_sums(answer: Answer) -> Iterator[None]:
    """Inside, on this thread, `answer` gets the sums and means of functions that are neither
    torch's own nor instep's."""
    thread = threading.get_ident()
    before = [vars(owner).get(name) for owner, name in _PLACES]
    for owner, name in _PLACES:
        setattr(owner, name, _replacement(getattr(owner, name), answer, thread))
    try:
        yield
    finally:
        for (owner, name), kept in zip(_PLACES, before, strict=True):
            if kept is None:  # it is inherited
                delattr(owner, name)
            else:
                setattr(owner, name, kept)


def _replacement(original: Function, answer: Answer, thread: int) -> Function:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        tensor, *others = args or (None,)
        if (
            not isinstance(tensor, Tensor)
            or caller in _LIBRARIES
            or threading.get_ident() != thread
        ):
            return original(*args, **kwargs)
        return answer(original, tensor, tuple(others), kwargs)

    return replacement


class SumCount:
    """Counts the sums and means of a forward that go over the first dimension."""

    def __init__(self) -> None:
        self.found = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, they are counted."""
        with replaced_sums(self._answer):
            yield

    def _answer(
        self, original: Function, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.found += is_over_rows(tensor, args, kwargs)
        return original(tensor, *args, **kwargs)


def is_over_rows(tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a sum or mean of a tensor with these arguments goes over its first dimension."""
    if "out" in kwargs or not tensor.dim():
        return False
    dims = args[0] if args else kwargs.get("dim", kwargs.get("axis"))
    if dims is None or dims == ():
        return True
    places = (dims,) if isinstance(dims, int) else dims
    return isinstance(places, tuple | list) and 0 in [place % tensor.dim() for place in places]


def over_all_rows(add_up: Callable[[Tensor], Tensor]) -> Answer:
    """Sums and means over the rows of all ranks, if `add_up` gives the sum over ranks."""

    def answer(
        original: Function, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not is_over_rows(tensor, args, kwargs):
            return original(tensor, *args, **kwargs)
        if original.__name__ == "sum":
            return add_up(original(tensor, *args, **kwargs))
        exact = tensor.float() if tensor.dtype in _HALF else tensor  # a sum may be too large
        sums = exact.sum(*args, **kwargs)
        count = sums.new_full((1,), tensor.numel() // max(1, sums.numel()))
        total = add_up(torch.cat((sums.reshape(-1), count)))
        mean = total[:-1].view(sums.shape) / total[-1]
        return mean.to(kwargs.get("dtype") or tensor.dtype)

    return answer
