"""Carries out the choice between the ranks of a host and rank 0 alone, as the script runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

import torch

from instep.distributed.communication.rank_local import is_rank_local
from instep.distributed.communication.transport import Transport, get_transport
from instep.distributed.numbers import on_all_ranks
from instep.training.optimizer_shards.divided_steps import step_counts
from instep.unedited.sharded_call.one_process.process_choice import Phase, ProcessChoice
from instep.unedited.sharded_call.one_process.sequential import Cores, run_sequential

T = TypeVar("T")

_MOST_RANKS = 8
"""More would wait for too long for each other's turns."""


class Fallback:
    """Lets rank 0 go on alone where that takes less time.

    Args:
        threads: the threads of PyTorch's operations that a process alone on this host would use.
        loads_apart: whether the ranks share the loading of data, or a loader in use has rows of
            other ranks still to come.
        has_outputs: whether there are graphs or outputs of divided calls, which need all ranks.
        go_on: called on all ranks with the cores of all, and whether it was measured. Rank 0 then
            goes on alone; on the other ranks it does not return.
    """

    def __init__(
        self,
        threads: int,
        *,
        loads_apart: Callable[[], bool],
        has_outputs: Callable[[], bool],
        go_on: Callable[[Cores, bool], None],
    ) -> None:
        size = get_transport().size
        gains = threads > torch.get_num_threads()
        self._choice = ProcessChoice(can_measure=gains and 1 < size <= _MOST_RANKS)
        self._threads, self._threads_before = threads, torch.get_num_threads()
        self._loads_apart, self._has_outputs, self._go_on = loads_apart, has_outputs, go_on
        self._cores: Cores | None = None
        self._start = self._waited = 0.0
        self._divided_steps = step_counts.divided

    @property
    def computes_whole(self) -> bool:
        """Whether outermost calls are computed whole now, by `run`."""
        return self._choice.phase is not Phase.SHARED

    @property
    def is_sequential(self) -> bool:
        """Whether the ranks compute one after the other now."""
        return self._choice.phase is Phase.SEQUENTIAL

    @property
    def is_measuring(self) -> bool:
        """Whether calls are counted: see `add_call`."""
        return self._choice.is_measuring

    def add_call(self) -> None:
        """An outermost call begins."""
        self._choice.add_call(has_grad=torch.is_grad_enabled())

    def add_divided(self) -> None:
        """A call was divided."""
        self._choice.add_divided()

    def run(self, function: Callable[[], T]) -> T:
        """`function()`, a whole call or its backward; in turns, if these are timed. Collective."""
        if not self.is_sequential:
            return function()
        assert self._cores is not None
        value, waited = run_sequential(function, self._cores, get_transport())
        self._waited += waited
        return value

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """What runs inside would not be done by one process."""
        start = perf_counter()
        yield
        self._waited += perf_counter() - start

    def end_backward(self, trials: int) -> None:
        """A `backward()` of the script has ended, in its main thread; `trials`: the calls that were
        compared or timed so far. Collective where something is due."""
        choice, transport = self._choice, get_transport()
        if step_counts.divided != self._divided_steps:
            self._divided_steps = step_counts.divided
            choice.add_divided()
        choice.add_step(trials)
        if choice.phase is Phase.WHOLE:
            self._drain(transport)
        elif choice.is_phase_over:
            choice.finish_phase(self._exchange_seconds(transport))
            self._start_clock(transport)
        elif choice.is_due:
            choice.begin(is_possible=on_all_ranks(not self._loads_apart(), transport))
            if choice.is_measuring:
                self._start_clock(transport)

    def _drain(self, transport: Transport) -> None:
        """Go on to what follows the phase WHOLE, if all ranks can."""
        choice = self._choice
        if choice.is_drain_too_long():
            choice.stop()
            return
        if choice.drain_steps.bit_count() > 1:  # each look costs a message
            return
        is_free = not self._has_outputs() and not (choice.is_for_one and self._loads_apart())
        if not on_all_ranks(is_free, transport):
            return
        if choice.is_for_one:
            self._go_on(self._all_cores(transport), choice.is_measured)
            return
        self._cores = self._all_cores(transport)
        choice.finish_drain()
        self._start_clock(transport)

    def _all_cores(self, transport: Transport) -> Cores:
        threads = torch.get_num_threads()
        if threads == self._threads_before:  # the script has not set it
            threads = self._threads
        return Cores.of_all(threads, transport)

    def _start_clock(self, transport: Transport) -> None:
        transport.barrier()
        self._start, self._waited = perf_counter(), 0.0

    def _exchange_seconds(self, transport: Transport) -> float:
        """What the phase took: rank 0 by itself in turns, else the slowest rank."""
        mine = torch.tensor([perf_counter() - self._start - self._waited], dtype=torch.float64)
        seconds = [float(each) for each in transport.all_gather(mine)]
        return seconds[0] if self.is_sequential else max(seconds)


_current: list[Fallback] = []


def set_fallback(fallback: Fallback | None) -> None:
    """Let this be what the calls and backwards of the script ask; None: nothing."""
    _current[:] = [] if fallback is None else [fallback]


def current_fallback() -> Fallback | None:
    """What is to be asked here: nothing outside of the script's main thread, or where this rank
    alone works."""
    if not _current or threading.current_thread() is not threading.main_thread():
        return None
    return None if is_rank_local() else _current[0]
