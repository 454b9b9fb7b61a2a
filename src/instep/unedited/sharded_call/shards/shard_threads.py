"""Functions that run as threads, of which one runs at a time, and that meet.

Batch statistics need the rows of all shards of a rank. So the forwards of its shards take turns:
each runs until it needs something of the others, the main thread computes it for all in one node
of the autograd graph, and each goes on with its part. One backward then does for all shards, and
nothing in it waits.

Autograd runs the nodes with the highest numbers first, and gradients of a tensor are added up in
that order. A new thread numbers its nodes from 0, so the shards' nodes have equal numbers, and a
node of all shards gets the number that a node of one shard would have there: the order is that of
a rank with one shard.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from instep.process.torch_private import function_mode_stack

T = TypeVar("T")
Joint = Callable[[Sequence[Any]], Sequence[Any]]
"""From a value of each function, in their order, a result for each."""


class BranchError(Exception):
    """The functions do not meet in the same places."""


class _StoppedError(BaseException):
    """Another function has failed; no `except Exception` of the script's may catch this."""


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
        self._values: list[Any] = [None] * count
        self._results: Sequence[Any] = ()
        self._joint: Joint = tuple
        self._joint_grad_mode, self._joint_number = True, 0
        self._arrived = self._ended = 0
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
                self._end()
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
            self._run_joints()
        except BaseException as error:
            self._fail(error)
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return found

    @property
    def number(self) -> int:
        """That of the function on this thread."""
        number: int = self._thread.number
        return number

    def meet(self, value: Any, joint: Joint) -> Any:
        """This function's result of `joint`, to which every function gives a value.

        Called by each function, at the same place.
        """
        if self._ended:
            self._stop_all()
        number = self._thread.number
        self._values[number] = value
        self._arrived += 1
        self._joint, self._joint_grad_mode = joint, torch.is_grad_enabled()
        self._joint_number = next_sequence_number()  # of no other node from now on
        self._pass_on()
        self._wait()
        return self._results[number]

    def _run_joints(self) -> None:
        """On the main thread: compute what the functions meet for, until all have ended."""
        while True:
            self._semaphores[0].release()
            self._main.acquire()
            if self._error is not None or self._ended:
                return
            with torch.set_grad_enabled(self._joint_grad_mode):
                self._results = self._joint(self._values)
            nodes = {x.grad_fn for x in _tensors(self._results) if x.grad_fn is not None}
            for node in nodes:
                node._set_sequence_nr(self._joint_number)  # type: ignore[attr-defined]
            self._arrived = 0

    def _end(self) -> None:
        if self._arrived:
            self._stop_all()
        self._ended += 1
        self._pass_on()

    def _pass_on(self) -> None:
        following = self._thread.number + 1
        is_last = following == len(self._semaphores)
        (self._main if is_last else self._semaphores[following]).release()

    def _wait(self) -> None:
        self._semaphores[self._thread.number].acquire()
        if self._error is not None:
            raise _StoppedError
        self._on_switch(self._thread.number)

    def _stop_all(self) -> NoReturn:
        """The script may catch what is raised here; `run` raises BranchError all the same."""
        self._fail(BranchError("parts of the batch take different branches"))
        raise _StoppedError

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
        self._modes = function_mode_stack()
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
    number: int = node._sequence_nr()
    return number


def _autocast_devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu", *([accelerator.type] if accelerator is not None else [])]


def _tensors(results: Sequence[Any]) -> Iterator[Tensor]:
    for result in results:
        parts = result if isinstance(result, tuple) else (result,)
        yield from (part for part in parts if isinstance(part, Tensor))
