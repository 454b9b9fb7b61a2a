"""Collectives by name: `submit` starts one and returns its handle, `synchronize` waits for it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from instep.compat.horovod.basics import ProcessSet, global_process_set, session
from instep.compat.horovod.errors import WrongArgumentError
from instep.distributed.communication.errors import UnsuitableTensorError
from instep.distributed.communication.exchanges import before_collectives
from instep.distributed.communication.tensors import check_reachable
from instep.distributed.negotiation.message_table import JOIN, Request, Response
from instep.distributed.negotiation.negotiator import Task
from instep.distributed.watchdog.call_stack import script_line

Finish = Callable[[Response, list[Tensor]], Any]
P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class Handle:
    """A collective under way."""

    def __init__(self, task: Task, finish: Finish) -> None:
        self._task, self._finish = task, finish
        self._result: Any = None
        self._finished = False

    def poll(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return self._task.done

    def result(self) -> Any:
        """The collective's result. Raises HorovodInternalError, OverflowedError."""
        if not self._finished:
            self._result = self._finish(*self._task.wait())
            self._finished = True
        return self._result

    wait = result  # the name in torch.distributed's Work


class JoinedHandle(Handle):
    """Several collectives under way, with one result; call it, or `synchronize` it."""

    def __init__(self, handles: Sequence[Handle], join: Callable[[list[Any]], Any]) -> None:
        """`join` makes it of theirs."""
        self._handles, self._join = handles, join

    def poll(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return all(handle.poll() for handle in self._handles)

    def result(self) -> Any:
        """The joined result. Raises HorovodInternalError, OverflowedError."""
        return self._join([handle.result() for handle in self._handles])

    wait = __call__ = result


def places_by_dtype(name: str, tensors: Sequence[Tensor]) -> dict[str, list[int]]:
    """The places of the tensors of each dtype, by the names of the collectives that send them: the
    first one has this name, without tensors too."""
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    names = [f"{name}.{dtype}" if number else name for number, dtype in enumerate(places)]
    return dict(zip(names, places.values(), strict=True)) or {name: []}


def in_order(places: Iterable[list[int]], results: Iterable[Sequence[T]]) -> list[T]:
    """The results of collectives whose tensors had these places, in the order of the places."""
    found = dict(zip(chain(*places), chain(*results), strict=True))
    return [found[place] for place in range(len(found))]


def start_by_dtype(
    start: Callable[[str, list[Tensor]], Handle],
    name: str,
    tensors: Sequence[Tensor],
    convert: Callable[[list[Tensor]], Any],
) -> JoinedHandle:
    """Start a collective for the tensors of each dtype, the first one by this name.

    The handle's result is `convert` of all results, in the order of the tensors.
    """
    places = places_by_dtype(name, tensors)
    handles = [start(own, [tensors[each] for each in at]) for own, at in places.items()]
    return JoinedHandle(handles, lambda results: convert(in_order(places.values(), results)))


Start = Callable[..., Handle]
"""Starts a collective whose arguments are known; in place by `in_place=True`."""


def takes_arguments_of(parse: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """A decorator: the function has the arguments of `parse`, and is given the result of it."""

    def decorate(function: Callable[[T], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(parse(*args, **kwargs))

        result = inspect.signature(function).return_annotation
        signature = inspect.signature(parse).replace(return_annotation=result)
        vars(call)["__signature__"] = signature
        return call

    return decorate


def poll(handle: Handle) -> bool:
    """Whether the collective has ended, so that `synchronize` does not wait."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for the collective and return what the function without `_async` returns.

    Raises HorovodInternalError if the ranks could not agree on it.
    """
    return handle.result()


def full_name(collective: str, name: str | None, process_set: ProcessSet) -> str:
    """The name by which the ranks' calls are matched; without a name, the number of such calls."""
    if name is not None:
        return f"{collective}.{name}"
    key = collective, process_set.members
    number = session().unnamed[key]
    session().unnamed[key] += 1
    return f"{collective}.noname.{number}"


def submit(
    collective: str,
    name: str,
    tensors: Sequence[Tensor],
    process_set: ProcessSet,
    finish: Finish,
    *,
    into: Sequence[Tensor] | None = None,
    **rest: Any,
) -> Handle:
    """Start a collective: this rank is ready for it.

    Args:
        collective: the operation that the executing thread performs.
        name: a `full_name`.
        tensors: of one dtype, on one device.
        process_set: the ranks that take part.
        finish: makes the result, in the thread that waits.
        into: the tensors that hold the results.
        rest: the other fields of a Request.

    Raises WrongArgumentError, WrongDeviceError, UnsuitableTensorError, NameInFlightError,
    NotAMemberError, HorovodInternalError after the end, TrainingError in a loop without gradients
    where ranks have skipped the batch.
    """
    if process_set is global_process_set:
        for check in before_collectives:
            check()
    if not tensors:
        raise WrongArgumentError(f"{name} takes at least one tensor.")
    for tensor in tensors:
        if collective == "allreduce" and getattr(tensor, "is_sparse", False):
            raise UnsuitableTensorError(
                f"{name} takes dense tensors, not {tensor.layout}. Call sparse_allreduce_async "
                "for the sum or average of sparse ones, or to_dense() first."
            )
        check_reachable(tensor)
    dtypes = sorted({f"{tensor.dtype} on {tensor.device.type}" for tensor in tensors})
    if len(dtypes) > 1:
        raise WrongArgumentError(
            f"{name} takes tensors of one dtype on one device, not {', '.join(dtypes)}."
        )
    request = Request(
        name,
        collective,
        process_set.members,
        dtype=str(tensors[0].dtype),
        device=tensors[0].device.type,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        line=script_line(),
        **rest,
    )
    return Handle(session().negotiator.submit(Task(request, tensors, into)), finish)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called this function, or joined."""
    name = full_name("barrier", None, process_set)
    request = Request(name, "barrier", process_set.members, line=script_line())
    session().negotiator.submit(Task(request)).wait()


def join(device: int = -1) -> int:
    """Report that this rank has no data left; return the last rank that did, when all have.

    Until then this rank adds zeros to the others' sums and averages (an average still divides by
    all ranks). Any other collective of the others raises HorovodInternalError there.

    Args:
        device: Horovod's; the device of the others' tensors is used.
    """
    request = Request(JOIN, JOIN, session().negotiator.world.ranks, line=script_line())
    response, _ = session().negotiator.submit(Task(request)).wait()
    assert response.last is not None
    session().unnamed.clear()  # a rank that joined early has counted fewer calls
    return response.last
