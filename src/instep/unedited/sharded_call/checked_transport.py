"""Something that may fail on some ranks only, tried so that none is left waiting.

While a trial is under way, the ranks tell each other before every collective what they are about
to do. Where they do not agree, because one has failed or took another branch, all of them stop.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from instep.distributed.communication.transport import Pending, Transport, use_transport
from instep.unedited.errors import UndividedError

T = TypeVar("T")


class PartedError(Exception):
    """The ranks do not do the same."""


def attempt(action: Callable[[Transport], T], way: Transport) -> tuple[T | None, str]:
    """What `action` returns, if it returns on all ranks; else None and why not. Collective."""
    cautious = _Cautious(way)
    result, why = None, "another rank fails or takes another branch"
    try:
        with use_transport(cautious):
            result = action(cautious)
        why = ""
    except PartedError:
        pass
    except UndividedError as error:
        why = str(error)
    except Exception as error:  # whatever the script's forward raises on some of its rows
        said = "".join(traceback.format_exception_only(error)).partition("\n")[0].rstrip(".")
        why = f"it cannot be computed for some of its rows ({said})"
    done = cautious.end("failed" if why else "done")
    return (result, "") if done and not why else (None, why or "another rank fails")


class _Cautious:
    """A transport whose users agree on each step; once the trial has ended, a plain one."""

    def __init__(self, way: Transport) -> None:
        self.rank, self.size, self.in_place = way.rank, way.size, way.in_place
        self.control_device = way.control_device
        self._way = way
        self._over = False

    def end(self, how: str) -> bool:
        """Close the trial; returns whether all ranks end it in the same way."""
        if self._over:
            return False
        try:
            self._agree(how)
        except PartedError:
            return False
        self._over = True
        return True

    def _agree(self, *step: object) -> None:
        if self._over:
            return
        code = torch.tensor([crc32(repr(step).encode())], device=self.control_device)
        if any(int(theirs) != int(code) for theirs in self._way.all_gather(code)):
            self._over = True
            raise PartedError

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        self._agree("all_reduce", tuple(tensor.shape), tensor.dtype, op)
        return self._way.all_reduce(tensor, op)

    def all_reduce_each(self, tensors: list[Tensor], op: str) -> None:
        self._agree("all_reduce_each", [tuple(t.shape) for t in tensors], op)
        self._way.all_reduce_each(tensors, op)

    def reduce(self, tensor: Tensor, op: str, root: int) -> Pending:
        self._agree("reduce", tuple(tensor.shape), tensor.dtype, op, root)
        return self._way.reduce(tensor, op, root)

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        self._agree("broadcast", tuple(tensor.shape), tensor.dtype, root)
        return self._way.broadcast(tensor, root)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._agree("all_gather", tuple(tensor.shape), tensor.dtype)
        return self._way.all_gather(tensor)

    def all_to_all(self, gives: Sequence[Tensor], takes: Sequence[int]) -> list[Tensor]:
        self._agree("exchange")
        return self._way.all_to_all(gives, takes)

    def send(self, tensor: Tensor, to: int) -> None:
        self._way.send(tensor, to)

    def receive(self, tensor: Tensor, source: int) -> None:
        self._way.receive(tensor, source)

    def all_gather_object(self, value: T) -> list[T]:
        self._agree("all_gather_object")
        return self._way.all_gather_object(value)

    def broadcast_object(self, value: T, root: int) -> T:
        self._agree("broadcast_object", root)
        return self._way.broadcast_object(value, root)

    def send_object(self, value: object, to: int) -> None:
        self._way.send_object(value, to)

    def receive_object(self, source: int) -> Any:
        return self._way.receive_object(source)
