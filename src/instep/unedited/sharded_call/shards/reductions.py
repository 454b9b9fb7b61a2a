"""Reductions in the code of the script and of libraries other than torch, and what they go over.

Sums and means are reductions, and so are the largest value, a norm and a standard deviation; what
is sorted depends on all rows, too.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.process.patching import Function, replaced
from instep.process.torch_private.dispatch import script_operations

Place = tuple[str, int, int]
"""Where a reduction stands: the file, the first line of its function, and the instruction."""


class _Dims(NamedTuple):
    """How a function is told which dimensions it goes over."""

    position: int
    """Among its arguments after the tensor."""
    default: int | None
    """None: over all."""


_DIMS = {
    **dict.fromkeys(("sum", "mean", "prod", "max", "min", "amax", "amin"), _Dims(0, None)),
    **dict.fromkeys(("std", "var", "median", "logsumexp", "cumsum", "any", "all"), _Dims(0, None)),
    **dict.fromkeys(("norm", "vector_norm", "quantile"), _Dims(1, None)),
    **dict.fromkeys(("topk", "kthvalue"), _Dims(1, -1)),
    "sort": _Dims(0, -1),
}
SUMS = ("sum", "mean")
CONDITIONS = ("any", "all")
REDUCTIONS = tuple(_DIMS)
EXTREMES = ("max", "min", "amax", "amin")
OTHER_REDUCTIONS = tuple(name for name in _DIMS if name not in (*SUMS, *CONDITIONS, *EXTREMES))
_OWNERS = (torch, Tensor, torch.linalg)
_LIBRARIES = frozenset(("torch", "instep"))


@dataclass(frozen=True)
class ReductionCall:
    """A call of a reduction of a tensor."""

    place: Place
    name: str
    original: Function
    tensor: Tensor
    args: tuple[Any, ...]
    """Beside the tensor."""
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Compute it as without instep."""
        return self.original(self.tensor, *self.args, **self.kwargs)

    def is_over_first_dim(self) -> bool:
        """Whether it goes over the first dimension of the tensor."""
        if "out" in self.kwargs or not self.tensor.dim():
            return False
        position, default = _DIMS[self.name]
        dims = self.kwargs.get("dim", self.kwargs.get("axis", default))
        if len(self.args) > position:
            dims = self.args[position]
        if dims is None or dims == () or isinstance(dims, bool):  # `std(True)`: unbiased
            return True
        places = (dims,) if isinstance(dims, int) else dims
        dim = self.tensor.dim()
        return isinstance(places, tuple | list) and 0 in [place % dim for place in places]


Answer = Callable[[ReductionCall], Any]
"""What is called in place of a reduction; where it returns NotImplemented, that is called."""


@contextmanager
def replaced_reductions(
    answer: Answer, names: Collection[str], *, on_all_threads: bool = False
) -> Iterator[None]:
    """Inside, `answer` gets the reductions of these names of functions that are neither torch's own
    nor instep's: on this thread, if not on all."""
    thread = None if on_all_threads else threading.get_ident()
    functions = [
        (owner, name, _replacement(name, getattr(owner, name), answer, thread))
        for name in names
        for owner in _OWNERS
        if hasattr(owner, name)
    ]
    operations = {
        id(function): operation
        for owner, name, function in functions
        if (operation := script_operations.get(id(getattr(owner, name)))) is not None
    }
    script_operations.update(operations)  # the script may compile a function in its forward
    try:
        with replaced(*functions):
            yield
    finally:
        for key in operations:
            script_operations.pop(key, None)


def _replacement(name: str, original: Function, answer: Answer, thread: int | None) -> Function:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        caller = frame.f_globals.get("__name__", "").partition(".")[0]
        tensor, *others = args or (None,)
        if (
            not isinstance(tensor, Tensor)
            or caller in _LIBRARIES
            or thread not in (None, threading.get_ident())
        ):
            return original(*args, **kwargs)
        place = frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lasti
        result = answer(ReductionCall(place, name, original, tensor, tuple(others), kwargs))
        return original(*args, **kwargs) if result is NotImplemented else result

    return replacement


def noted_lengths(
    of_sums: dict[Place, set[int]], of_others: dict[Place, set[int]]
) -> AbstractContextManager[None]:
    """Inside, these get the lengths of the first dimension of all tensors of which a whole forward
    computes a reduction over this dimension, by place: `of_sums` those of sums and means."""

    def answer(call: ReductionCall) -> Any:
        if call.is_over_first_dim():
            found = of_sums if call.name in SUMS else of_others
            found.setdefault(call.place, set()).add(len(call.tensor))
        return call.run()

    return replaced_reductions(answer, _DIMS)
