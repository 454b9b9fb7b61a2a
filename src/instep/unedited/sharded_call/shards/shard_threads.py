"""Functions that run as threads, of which one runs at a time, and that meet.

Batch statistics need the rows of all shards of a rank. So the forwards of its shards take turns:
each runs until it needs something of the others, the main thread computes it for all in one node
of the autograd graph, and each goes on with its part. One backward then does for all shards, and
nothing in it waits. What is only cheaper for several shards together is computed for those that
come to the same place.

Autograd runs the nodes with the highest numbers first, and gradients of a tensor are added up in
that order. A new thread numbers its nodes from 0, so the shards' nodes have equal numbers, and a
node of all shards gets the number that a node of one shard would have there: the order is that of
a rank with one shard.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from instep.process.torch_private.dispatch import dispatch_mode_stack, function_mode_stack
from instep.unedited.sharded_call.shards.index_checks import IndexChecks

T = TypeVar("T")
Joint = Callable[[Sequence[Any]], Sequence[Any]]
"""From a value of each function, in their order, a result for each."""


class BranchError(Exception):
    """The functions do not meet in the same places."""


class _StoppedError(BaseException):
    """Another function has failed, or they do not meet; no `except Exception` of the script's may
    catch this."""


@dataclass
class _Arrival:
    """A function that waits for a result."""

    value: Any
    joint: Joint
    place: Hashable
    """Where it meets others; None where it meets all."""
    grad_mode: bool
    sequence_number: int
    """Of no other node of the autograd graph on its thread."""


class ShardThreads:
    """One run of several functions, each in a thread of its own.

    Args:
        count: how many functions there are.
        on_switch: called with the number of a function before it begins or goes on.
    """

    def __init__(self, count: int, on_switch: Callable[[int], None]) -> None:
        self._on_switch = on_switch
        self._semaphores = [threading.Semaphore(0) for _ in range(count)]
        self._main = threading.Semaphore(0)
        self._arrivals: dict[int, _Arrival] = {}
        self._results: dict[int, Any] = {}
        self._next: dict[int, int] = {}
        """Who runs after a function; the main thread after the last one."""
        self._error: BaseException | None = None
        self._thread = threading.local()

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """What the functions return. Raises the first error of one of them, and BranchError."""
        found: list[Any] = [None] * len(functions)
        state = _ThreadState()

        def body(number: int, function: Callable[[], T]) -> None:
            self._thread.number = number
            try:
                self._wait()
                with state.restored():
                    found[number] = function()
                self._pass_on()
            except _StoppedError:
                return
            except BaseException as error:
                self._fail(error)

        threads = []
        for number, function in enumerate(functions):
            run = contextvars.copy_context().run
            threads.append(threading.Thread(target=run, args=(body, number, function), daemon=True))
            threads[-1].start()
        try:
            self._run_in_turn(range(len(functions)))
        except BaseException as error:
            self._fail(error)
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return found

    @property
    def number(self) -> int:
        """The number of the function on this thread."""
        return int(self._thread.number)

    def meet(self, value: Any, joint: Joint, place: Hashable = None) -> Any:
        """This function's result of `joint`, to which every function gives a value.

        Called by each function, at the same point. With a place, only those give a value that are
        there when no other can go on.
        """
        number = self._thread.number
        self._arrivals[number] = _Arrival(
            value, joint, place, torch.is_grad_enabled(), next_sequence_number()
        )
        self._pass_on()
        self._wait()
        return self._results.pop(number)

    def _run_in_turn(self, numbers: Sequence[int]) -> None:
        """On the main thread: let these functions run until all have ended."""
        while numbers:
            self._next = dict(pairwise(numbers))
            self._semaphores[numbers[0]].release()
            self._main.acquire()
            if self._error is not None:
                return
            numbers = self._join()

    def _join(self) -> list[int]:
        """Compute what functions have met for; returns those that go on."""
        groups: dict[Hashable, list[int]] = {}
        for number, arrival in sorted(self._arrivals.items()):
            groups.setdefault(arrival.place, []).append(number)
        of_all = groups.pop(None, [])
        if of_all and not groups:
            if len(of_all) < len(self._semaphores):
                raise BranchError("parts of the batch take different branches")
            groups[None] = of_all
        for members in groups.values():
            arrivals = [self._arrivals.pop(number) for number in members]
            last = arrivals[-1]
            with torch.set_grad_enabled(last.grad_mode):
                results = last.joint([arrival.value for arrival in arrivals])
            for node in {x.grad_fn for x in _tensors(results) if x.grad_fn is not None}:
                node._set_sequence_nr(last.sequence_number)  # type: ignore[attr-defined]
            self._results |= zip(members, results, strict=True)
        return sorted(self._results)

    def _pass_on(self) -> None:
        following = self._next.get(self._thread.number)
        (self._main if following is None else self._semaphores[following]).release()

    def _wait(self) -> None:
        self._semaphores[self._thread.number].acquire()
        if self._error is not None:
            raise _StoppedError
        self._on_switch(self._thread.number)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        for semaphore in (*self._semaphores, self._main):
            semaphore.release()


class _ThreadState:
    """What torch keeps for each thread, as it is on this one."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._grad_mode = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        checks = [mode for mode in dispatch_mode_stack() if isinstance(mode, IndexChecks)]
        self._modes = [*function_mode_stack(), *checks]
        self._autocasts = [
            (device, torch.get_autocast_dtype(device))
            for device in _autocast_devices()
            if torch.is_autocast_enabled(device)
        ]
        self._autocast_cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, it is the same on another thread."""
        torch.set_num_threads(self._threads)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad_mode))
            for device, dtype in self._autocasts:
                stack.enter_context(
                    torch.autocast(device, dtype, cache_enabled=self._autocast_cache)
                )
            for mode in self._modes:
                stack.enter_context(mode)
            yield


def next_sequence_number() -> int:
    """The number of the node that autograd makes next on this thread, which is made here."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = torch.empty(0, requires_grad=True, device="cpu").clone().grad_fn
    return int(node._sequence_nr())


def _autocast_devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu", *([accelerator.type] if accelerator is not None else [])]


def _tensors(results: Sequence[Any]) -> Iterator[Tensor]:
    for result in results:
        parts = result if isinstance(result, tuple) else (result,)
        yield from (part for part in parts if isinstance(part, Tensor))
