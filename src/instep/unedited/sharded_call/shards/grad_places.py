"""In which bucket the gradient of each parameter is summed over the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from instep.distributed.communication.transport import Transport
from instep.process.torch_private.autograd import hooks_of, later_hooks_of
from instep.training.buckets.bucket_sums import make_bucket
from instep.training.buckets.compression import compression_setting, make_codec
from instep.training.buckets.grad_bucket import GradBucket
from instep.training.buckets.layout import plan_tensors
from instep.training.buckets.sparse_sums import find_tables
from instep.unedited.sharded_call.shards.node_hooks import have_node_hooks

_TYPE = attrgetter("dtype", "device", "shape")
"""What stays the same for a parameter, until `model.half()` and the like."""
AT_ONCE = -1
"""In place of an index in a bucket: the gradient is summed when a backward has computed it."""
_IS_LEAF = attrgetter("is_leaf")


class _Place(NamedTuple):
    """Where the gradient of a parameter is summed."""

    bucket: GradBucket
    slot: int
    """Its index in the bucket."""
    type: tuple[object, ...]
    """The parameter's, when its bucket was made."""


_places: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By parameter."""
_sparse: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameters that had a sparse gradient, which does not travel in a bucket."""
_bucket_numbers = count()
"""All ranks make their buckets in the same order."""


class BucketMembers(NamedTuple):
    """A bucket, and the parameters of a list whose gradients are summed in it."""

    bucket: GradBucket | None
    members: list[int]
    """The places of these parameters in the list."""
    slots: list[int]
    """Their indices in the bucket, or AT_ONCE."""


class _Division:
    """How the parameters of a module were divided into buckets, while they stay as they are."""

    def __init__(self, parameters: Sequence[Tensor], parts: list[BucketMembers]) -> None:
        self.parts = parts
        self._references = list(map(weakref.ref, parameters))
        self._types = list(map(_TYPE, parameters))
        self._sparse = len(_sparse)

    def matches(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the same parameters, and none is of those that are summed at once."""
        # In every call, for every parameter: loops in C, not in Python.
        own: list[Any] = list(map(weakref.ref.__call__, self._references))
        return (
            self._sparse == len(_sparse)
            and list(map(id, own)) == list(map(id, parameters))
            and self._types == list(map(_TYPE, parameters))
            and all(map(_IS_LEAF, parameters))
            and not have_hooks(parameters)
        )


_divisions: weakref.WeakKeyDictionary[nn.Module, _Division] = weakref.WeakKeyDictionary()
"""The last one of each module that is called."""


def divide_into_buckets(
    parameters: Sequence[Tensor],
    module: Callable[[], nn.Module | None] | None,
    transport: Transport,
) -> list[BucketMembers]:
    """The buckets in which the gradients of these parameters are summed; makes those that are
    missing.

    `module`: a weak reference to the one that is called.
    """
    called = None if module is None else module()
    known = None if called is None else _divisions.get(called)
    if known is not None and known.matches(parameters):
        return known.parts
    for table in () if called is None else find_tables(called):
        note_sparse(table)  # on all ranks, though only some may have rows for it
    in_buckets = [p for p in parameters if not _is_reduced_now(p)]
    places = {id(p): _find_place(p) for p in in_buckets}
    if unplanned := [p for p in in_buckets if places[id(p)] is None]:
        _make_buckets(unplanned, transport)
        places |= {id(p): _find_place(p) for p in unplanned}
    found: dict[GradBucket | None, BucketMembers] = {}
    for k, parameter in enumerate(parameters):
        place = places.get(id(parameter))
        bucket, slot = (place.bucket, place.slot) if place else (None, AT_ONCE)
        part = found.setdefault(bucket, BucketMembers(bucket, [], []))
        part.members.append(k)
        part.slots.append(slot)
    at_once = found.pop(None, None)
    parts = list(found.values())
    if at_once is not None and parts:  # their sums come on all ranks, whichever of them a rank uses
        parts[0].members.extend(at_once.members)
        parts[0].slots.extend([AT_ONCE] * len(at_once.members))
    elif at_once is not None:
        parts = [at_once]
    if called is not None and at_once is None:
        _divisions[called] = _Division(parameters, parts)
    return parts


def note_sparse(parameter: Tensor) -> None:
    """The gradient of this parameter is sparse."""
    _sparse[parameter] = True


def have_hooks(parameters: Sequence[Tensor]) -> bool:
    """Whether the script has hooks on the gradient of any of these."""
    return (
        any(map(hooks_of, parameters))
        or any(map(later_hooks_of, parameters))
        or have_node_hooks(parameters)
    )


def _is_reduced_now(parameter: Tensor) -> bool:
    """Whether its gradient is summed at once: the script's hooks must see the sum, and so must
    the tensors from which the script has computed the parameter (torch.func.functional_call)."""
    is_sparse = len(_sparse) > 0 and parameter in _sparse
    return have_hooks([parameter]) or not parameter.is_leaf or is_sparse


def _find_place(parameter: Tensor) -> _Place | None:
    place: _Place | None = _places.get(parameter)
    return place if place is not None and place.type == _TYPE(parameter) else None


def _make_buckets(parameters: Sequence[Tensor], transport: Transport) -> None:
    compression = compression_setting()
    last_first = dict(enumerate(reversed(parameters)))  # backward reaches the last ones first
    for layout in plan_tensors(last_first):
        members = {slot.index: last_first[slot.index] for slot in layout.slots}
        number = next(_bucket_numbers)
        bucket = make_bucket(
            layout,
            _WeakParameters(members),
            transport,
            ids=(number,),
            codec=make_codec(layout, members, compression),
            grads_as_views=True,
        )
        bucket.title = f"gradients, bucket {number + 1}"
        for index, parameter in members.items():
            _places[parameter] = _Place(bucket, index, _TYPE(parameter))


class _WeakParameters(Mapping[int, Tensor]):
    """Parameters by index, without those that are gone."""

    def __init__(self, parameters: Mapping[int, Tensor]) -> None:
        self._references = {index: TensorWeakRef(p) for index, p in parameters.items()}

    def __getitem__(self, index: int) -> Tensor:
        parameter: Tensor | None = self._references[index]()
        if parameter is None:
            raise KeyError(index)
        return parameter

    def get(self, index: int, default: Any = None) -> Any:  # Mapping's takes a try and a call more
        parameter = self._references[index]()
        return default if parameter is None else parameter

    def __iter__(self) -> Iterator[int]:
        return iter(self._references)

    def __len__(self) -> int:
        return len(self._references)
