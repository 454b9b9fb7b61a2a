"""A trial of something that may fail on some ranks only, so that none of the others waits for it.

During a trial the ranks tell each other before every collective which one comes next. Where they
disagree, because one has failed or took another branch, all of them stop.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar
from zlib import crc32

from torch import Tensor

from instep.distributed.communication.transport import Transport, use_transport
from instep.distributed.numbers import gather_values
from instep.unedited.errors import MismatchError, ShardedCallError
from instep.unedited.sharded_call.plan.control_flow import NewBranch
from instep.unedited.sharded_call.plan.whole_reasons import FREEZES
from instep.unedited.sharded_call.shards.index_checks import IndexChecks

T = TypeVar("T")


_SETS_REQUIRES_GRAD = "you can only change requires_grad flags of leaf variables"


def attempt(
    action: Callable[[Transport], T], transport: Transport, *, checks_indices: bool = False
) -> tuple[T | None, str]:
    """The result of `action`, if it returns on all ranks; else None and why not. Collective.

    `checks_indices`: whether an index out of range may end the process instead of raising an error.
    """
    checked: Any = CheckedTransport(transport)  # a Transport by its __getattr__
    result, why = None, ""
    try:
        with use_transport(checked), IndexChecks() if checks_indices else nullcontext():
            result = action(checked)
    except MismatchError as mismatch:
        return None, str(mismatch)
    except ShardedCallError as error:
        why = str(error)
    except NewBranch:
        why = "it takes a branch that no compared call has taken"
    except Exception as error:  # whatever the script's forward raises on some of its rows
        line = "".join(traceback.format_exception_only(error)).partition("\n")[0].rstrip(".")
        why = f"it cannot be computed for some of its rows ({line})"
        if _SETS_REQUIRES_GRAD in line:  # of an alias of a parameter
            why = FREEZES.text
    try:
        checked.finish(why)
    except MismatchError as mismatch:
        return None, why or str(mismatch)
    return (None, why) if why else (result, "")


def _layout(tensor: Tensor) -> object:
    return (*tensor.shape, str(tensor.dtype).removeprefix("torch."))


_COLLECTIVES: dict[str, Callable[..., object]] = {
    "all_reduce": lambda tensor, op: (_layout(tensor), op),
    "all_reduce_each": lambda tensors, op: (*map(_layout, tensors), op),
    "reduce": lambda tensor, op, root: (_layout(tensor), op, root),
    "broadcast": lambda tensor, root: (_layout(tensor), root),
    "all_gather": _layout,
    "all_gather_bytes": len,
    "all_to_all": lambda inputs, output_sizes: None,
    "all_gather_object": lambda value: None,
    "broadcast_object": lambda value, root: root,
    "barrier": lambda: None,
}
"""Of each collective the part of its arguments that must be the same on all ranks."""


class CheckedTransport:
    """A transport whose ranks agree on each collective; after the trial, a plain one."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._finished = False
        self._mismatch = ""

    def finish(self, why: str) -> None:
        """End the trial, in which this rank has failed if it says `why`.

        Raises MismatchError unless all ranks end it now, and all of them well or none of them.
        """
        if self._finished:  # the script has caught the error
            raise MismatchError(self._mismatch)
        self._check("failed" if why else "done", why=why)
        self._finished = True

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._transport, name)
        if self._finished or name not in _COLLECTIVES:
            return attribute

        def checked(*args: Any) -> Any:
            self._check(name, _COLLECTIVES[name](*args))
            return attribute(*args)

        return checked

    def _check(self, *step: object, why: str = "") -> None:
        code = crc32(repr(step).encode())
        codes = [int(theirs) for [theirs] in gather_values([code], self._transport)]
        if len(set(codes)) == 1:
            return
        self._finished = True
        self._mismatch = self._describe_mismatch(codes, step, why)
        raise MismatchError(self._mismatch)

    def _describe_mismatch(self, codes: list[int], step: tuple[object, ...], why: str) -> str:
        operation, layout = (*step, "")[:2]
        doing = "has ended" if operation == "done" else f"calls {operation} of {layout}"
        by_rank = self._transport.all_gather_object((why, doing))
        for rank, (failure, _) in enumerate(by_rank):
            if failure:
                return f"on rank {rank} {failure}"
        odd = next(rank for rank, code in enumerate(codes) if code != codes[0])
        return (
            f"it takes another branch on rank {odd}, which {by_rank[odd][1]}, than on rank 0, "
            f"which {by_rank[0][1]}"
        )
