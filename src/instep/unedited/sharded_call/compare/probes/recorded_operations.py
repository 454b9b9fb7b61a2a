"""The operations of a forward as they run, with the code that computes each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

from instep.process import frames_from
from instep.process.torch_private.dispatch import KernelMode
from instep.unedited.sharded_call.shards.reductions import (
    REDUCTIONS,
    ReductionCall,
    replaced_reductions,
)

OperationPlace = tuple[str, str, int, int]
"""An operation, and where the script, or a library other than torch, calls what computes it."""
_CALLS = "instep.unedited.sharded_call.plan.bound_call"
"""Instep's module that calls the script's outermost one."""
_PASSED = frozenset(
    (
        "instep.process.patching",
        "instep.unedited.sharded_call.modules",
        "instep.unedited.sharded_call.own_forward",
        "instep.unedited.sharded_call.plan.control_flow",
        "instep.unedited.sharded_call.shards.reductions",
    )
)
"""Those that call torch's modules and functions as the script does."""


class RecordedOperation(NamedTuple):
    """An operation that has run."""

    place: OperationPlace
    func: Any
    args: Any
    kwargs: Any
    result: Any
    frame: FrameType | None
    """Of the code that computes it, if it is neither torch's nor instep's."""
    is_view: bool
    is_in_place: bool


_Answer = Callable[[RecordedOperation], Any]
"""Gets an operation, and returns what is its result."""


class OperationRecorder(KernelMode):
    """A mode in which a function gets each operation, and gives its result.

    Another result of a view is no view any more; what writes to it writes to the view.
    """

    def __init__(
        self, answer: _Answer, note_reduction: Callable[[ReductionCall, Any], None] | None = None
    ) -> None:
        super().__init__()
        self._answer, self._note_reduction = answer, note_reduction
        self._is_ignored = False
        self._views: dict[int, tuple[Tensor, Tensor]] = {}
        """Results that stand in for views, and these views."""

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Inside, operations on this thread are seen."""
        with replaced_reductions(self._ignored, REDUCTIONS), self:
            yield

    def _ignored(self, call: ReductionCall) -> Any:
        if not call.is_over_first_dim():
            return NotImplemented
        before, self._is_ignored = self._is_ignored, True
        try:
            result = call.run()
        finally:
            self._is_ignored = before
        if self._note_reduction is not None:
            self._note_reduction(call, result)
        return result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind is not Tensor for kind in types):  # what these make of it is seen then
            return NotImplemented
        schema: Any = getattr(func, "_schema", None)  # there are operations without one
        is_in_place = schema is not None and schema.is_mutable
        if is_in_place and args and id(args[0]) in self._views:
            args = self._views[id(args[0])][1], *args[1:]
        result = func(*args, **kwargs)
        if self._is_ignored or schema is None:
            return result
        caller = _caller_from(sys._getframe(1))
        if caller is None:
            return result
        is_view = not is_in_place and _is_view(schema)
        place = (schema.name, *caller.place)
        seen = RecordedOperation(
            place, func, args, kwargs, result, caller.frame, is_view, is_in_place
        )
        answer = self._answer(seen)
        if is_view and answer is not result and isinstance(answer, Tensor):
            self._views[id(answer)] = answer, result
        return answer


def _is_view(schema: Any) -> bool:
    """Whether what an operation returns shares memory with what it is given."""
    return any(each.alias_info is not None for each in schema.returns)


class _Caller(NamedTuple):
    """The code that is neither torch's nor instep's."""

    place: tuple[str, int, int]
    frame: FrameType | None


def _caller_from(frame: FrameType | None) -> _Caller | None:
    """That from this frame on outwards; None where a function of instep's computes what goes over
    all ranks."""
    for each in frames_from(frame):
        name = each.f_globals.get("__name__", "")
        if name == _CALLS:
            break
        owner = name.partition(".")[0]
        if owner == "instep" and name not in _PASSED:
            return None
        if owner not in ("torch", "instep"):
            code = each.f_code
            return _Caller((code.co_filename, code.co_firstlineno, each.f_lasti), each)
    return _Caller(("", 0, 0), None)
