"""Methods of a group that take what torch's own take: one tensor, a root, a reduction, a timeout.

torch.distributed calls them with lists of tensors and with options; people call them with less, as
`group.allreduce(tensor, ReduceOp.MAX)` or `group.broadcast(tensor, root=1)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

from instep.process.torch_private.distributed import (
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
)

Class = TypeVar("Class", bound=type)
_OPTIONS: Mapping[str, tuple[Callable[[], Any], int, Sequence[str]]] = {
    "allreduce": (AllreduceOptions, 1, ("op", "timeout")),
    "broadcast": (BroadcastOptions, 1, ("root", "timeout")),
    "reduce": (ReduceOptions, 1, ("root", "op", "timeout")),
    "allgather": (AllgatherOptions, 2, ("timeout",)),
    "gather": (GatherOptions, 2, ("root", "timeout")),
    "scatter": (ScatterOptions, 2, ("root", "timeout")),
    "reduce_scatter": (ReduceScatterOptions, 2, ("op", "timeout")),
    "barrier": (BarrierOptions, 0, ("timeout",)),
}
"""Of each method: its options, how many arguments hold tensors, and the names of those that
follow."""
_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def accept_overloads(owner: Class) -> Class:
    """Let the methods that this class defines be called as those of torch's ProcessGroup."""
    for name in _OPTIONS:
        if name in vars(owner):
            setattr(owner, name, _overloaded(name, vars(owner)[name]))
    return owner


def _overloaded(name: str, method: Callable[..., Work]) -> Callable[..., Work]:
    @wraps(method)
    def call(self: object, *args: Any, **kwargs: Any) -> Work:
        if args and not kwargs and _are_options(args[-1]):
            return method(self, *args)
        return method(self, *_with_options(name, args, kwargs))

    return call


def _with_options(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments as lists of tensors and options."""
    options_class, count, names = _OPTIONS[name]
    by_name = dict(zip(names, args[count:], strict=False)) | kwargs
    options = by_name.pop("opts", None)
    if len(args) > count and _are_options(args[count]):
        options = args[count]
        del by_name[names[0]]
    if options is None:
        options = options_class()
    for field in names:
        if (value := by_name.pop(field, None)) is not None:
            setattr(options, _FIELDS[field], value)
    tensors = [*args[:count], *(by_name[key] for key in sorted(by_name, key=_is_input))]
    if len(tensors) != count or len(args) > count + len(names):
        given = [*map(_type_name, args), *(f"{k}={_type_name(v)}" for k, v in kwargs.items())]
        raise TypeError(f"{name}() does not take ({', '.join(given)}).")
    if any(isinstance(each, Tensor) for each in tensors):
        tensors = [[each] if isinstance(each, Tensor) or each else [] for each in tensors]
    return [*tensors, options]


def _are_options(value: object) -> bool:
    return type(value).__name__.endswith("Options")


def _is_input(name: str) -> bool:
    """torch puts the tensors that are written before those that are read."""
    return name.startswith("input")


def _type_name(value: object) -> str:
    return type(value).__name__
