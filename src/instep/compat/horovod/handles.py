"""Submit a collective under a name; wait for it by its handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from instep.compat.horovod.errors import WrongArgumentError
from instep.compat.horovod.session import session
from instep.compat.horovod.sets import ProcessSet, global_process_set
from instep.distributed.communication.forbid_collectives import line_of_script
from instep.distributed.communication.tensors import check_reachable
from instep.distributed.negotiation.message_table import JOIN, Verdict, Wish
from instep.distributed.negotiation.negotiator import Task

Finish = Callable[[Verdict, list[Tensor]], Any]


class Handle:
    """A collective under way."""

    def __init__(self, task: Task, finish: Finish) -> None:
        self._task, self._finish = task, finish
        self._result: Any = None
        self._finished = False

    def poll(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return self._task.over

    def result(self) -> Any:
        """What the collective gives. Raises HorovodInternalError, OverflowedError."""
        if not self._finished:
            self._result = self._finish(*self._task.wait())
            self._finished = True
        return self._result


def poll(handle: Handle) -> bool:
    """Whether the collective is over: then `synchronize` does not wait."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for the collective and return what its plain form returns.

    Raises HorovodInternalError where it could not take place.
    """
    return handle.result()


def named(kind: str, name: str | None, process_set: ProcessSet) -> str:
    """What ranks are matched by. Without a name: how many there were before, of this kind."""
    if name is not None:
        return f"{kind}.{name}"
    key = kind, process_set.members
    number = session().unnamed[key]
    session().unnamed[key] += 1
    return f"{kind}.noname.{number}"


def submit(
    kind: str,
    name: str,
    tensors: Sequence[Tensor],
    process_set: ProcessSet,
    finish: Finish,
    *,
    into: Sequence[Tensor] | None = None,
    **rest: Any,
) -> Handle:
    """This rank is ready for a collective of these tensors.

    Args:
        kind: what the executing thread does.
        name: what `named` returned.
        tensors: of one dtype, on one device.
        process_set: who takes part.
        finish: makes the result, in the thread that waits.
        into: where the results go.
        rest: the other fields of a Wish.

    Raises WrongArgumentError, WrongDeviceError, UnsuitableTensorError, NameInFlightError,
    NotAMemberError, HorovodInternalError after the end.
    """
    if not tensors:
        raise WrongArgumentError.no_tensors(name)
    for tensor in tensors:
        check_reachable(tensor)
    kinds = sorted({f"{tensor.dtype} on {tensor.device.type}" for tensor in tensors})
    if len(kinds) > 1:
        raise WrongArgumentError.mixed(name, kinds)
    wish = Wish(
        name,
        kind,
        process_set.members,
        dtype=str(tensors[0].dtype),
        device=tensors[0].device.type,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        line=line_of_script(),
        **rest,
    )
    return Handle(session().negotiator.submit(Task(wish, tensors, into)), finish)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has come here, or joined."""
    name = named("barrier", None, process_set)
    wish = Wish(name, "barrier", process_set.members, line=line_of_script())
    session().negotiator.submit(Task(wish)).wait()


def join(device: int = -1) -> int:
    """This rank has no data left; returns when that is true of all, with the rank that came last.

    Until then this rank adds zeros to the others' sums and averages (an average still divides by
    all ranks). Whatever else the others ask for raises HorovodInternalError there.

    Args:
        device: Horovod's; the device of the others' tensors is used.
    """
    wish = Wish(JOIN, JOIN, session().negotiator.world.ranks, line=line_of_script())
    verdict, _ = session().negotiator.submit(Task(wish)).wait()
    assert verdict.last is not None
    session().unnamed.clear()  # a rank that joined early has counted fewer
    return verdict.last
