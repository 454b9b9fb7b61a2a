"""A trial of something that may fail on some ranks only, so that none of the others waits for it.

During a trial the ranks tell each other before every collective which one comes next. Where they
disagree, because one has failed or took another branch, all of them stop.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from instep.distributed.communication.transport import Pending, Transport, use_transport
from instep.unedited.errors import ShardedCallError

T = TypeVar("T")


class MismatchError(Exception):
    """The ranks do not do the same."""


def attempt(action: Callable[[Transport], T], transport: Transport) -> tuple[T | None, str]:
    """The result of `action`, if it returns on all ranks; else None and why not. Collective."""
    checked = _CheckedTransport(transport)
    result, why = None, "another rank fails or takes another branch"
    try:
        with use_transport(checked):
            result = action(checked)
        why = ""
    except MismatchError:
        pass
    except ShardedCallError as error:
        why = str(error)
    except Exception as error:  # whatever the script's forward raises on some of its rows
        line = "".join(traceback.format_exception_only(error)).partition("\n")[0].rstrip(".")
        why = f"it cannot be computed for some of its rows ({line})"
    succeeded = checked.finish("failed" if why else "done")
    return (result, "") if succeeded and not why else (None, why or "another rank fails")


class _CheckedTransport:
    """A transport whose users agree on each step; after the trial, a plain one."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.size, self.in_place = transport.rank, transport.size, transport.in_place
        self.control_device = transport.control_device
        self._transport = transport
        self._finished = False

    def finish(self, outcome: str) -> bool:
        """End the trial; returns whether all ranks end it with the same outcome."""
        if self._finished:
            return False
        try:
            self._check(outcome)
        except MismatchError:
            return False
        self._finished = True
        return True

    def _check(self, *step: object) -> None:
        if self._finished:
            return
        code = torch.tensor([crc32(repr(step).encode())], device=self.control_device)
        if any(int(theirs) != int(code) for theirs in self._transport.all_gather(code)):
            self._finished = True
            raise MismatchError

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        self._check("all_reduce", tuple(tensor.shape), tensor.dtype, op)
        return self._transport.all_reduce(tensor, op)

    def all_reduce_each(self, tensors: list[Tensor], op: str) -> None:
        self._check("all_reduce_each", [tuple(t.shape) for t in tensors], op)
        self._transport.all_reduce_each(tensors, op)

    def reduce(self, tensor: Tensor, op: str, root: int) -> Pending:
        self._check("reduce", tuple(tensor.shape), tensor.dtype, op, root)
        return self._transport.reduce(tensor, op, root)

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        self._check("broadcast", tuple(tensor.shape), tensor.dtype, root)
        return self._transport.broadcast(tensor, root)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._check("all_gather", tuple(tensor.shape), tensor.dtype)
        return self._transport.all_gather(tensor)

    def all_to_all(self, gives: Sequence[Tensor], takes: Sequence[int]) -> list[Tensor]:
        self._check("all_to_all")
        return self._transport.all_to_all(gives, takes)

    def send(self, tensor: Tensor, to: int) -> None:
        self._transport.send(tensor, to)

    def recv(self, tensor: Tensor, source: int) -> None:
        self._transport.recv(tensor, source)

    def all_gather_object(self, value: T) -> list[T]:
        self._check("all_gather_object")
        return self._transport.all_gather_object(value)

    def broadcast_object(self, value: T, root: int) -> T:
        self._check("broadcast_object", root)
        return self._transport.broadcast_object(value, root)

    def send_object(self, value: object, to: int) -> None:
        self._transport.send_object(value, to)

    def recv_object(self, source: int) -> Any:
        return self._transport.recv_object(source)
