"""Carries out the choice between the ranks of a host and rank 0 alone, as the script runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Protocol

import torch

from instep.distributed.communication.local_transport import LocalTransport
from instep.distributed.communication.rank_local import is_rank_local
from instep.distributed.communication.transport import get_transport, use_transport
from instep.distributed.numbers import gather_values, on_any_rank
from instep.process import in_main_thread, settings
from instep.process.process_value import ProcessValue
from instep.training.drift.rank0_values import take_rank0_values
from instep.unedited.optimizer_steps.divided_steps import pausing_steps, step_counts
from instep.unedited.sharded_call.one_process.cores import Cores
from instep.unedited.sharded_call.one_process.process_choice import (
    WHOLE_STEPS,
    Phase,
    ProcessChoice,
)

_NOTHING_DIVIDED = f"since nothing in its last {WHOLE_STEPS} steps pays to be divided"
_TAKES_LESS = "which takes less time than all ranks do together"
_AHEAD = "since it has made steps that the other ranks have not"
_END, _CATCH_UP = "end", "catch up"
"""What rank 0 tells the others after it has made steps alone."""


class ScriptRanks(Protocol):
    """What the ranks of a script share beside the calls."""

    def has_outputs(self) -> bool:
        """Whether there are graphs or outputs of divided calls, which need all ranks."""

    def is_loading_shared(self) -> bool:
        """Whether the ranks share the loading of data, or a loader in use has rows of other ranks
        still to come."""

    def tell(self, verdict: Callable[[], str]) -> str:
        """`verdict()` of rank 0, for which the other ranks wait."""

    def leave_to_rank0(self, cores: Cores, why: str) -> None:
        """Let rank 0 go on alone with these cores, and say why unless that is empty; on the other
        ranks it does not return. Collective."""


class Fallback:
    """Lets rank 0 go on alone where that takes less time.

    Args:
        threads: the threads of PyTorch's operations that a process alone on this host would use.
    """

    def __init__(self, threads: int, ranks: ScriptRanks) -> None:
        self._ranks, self._transport = ranks, get_transport()
        self._choice = ProcessChoice(self._transport.size)
        self._threads, self._threads_before = threads, torch.get_num_threads()
        self._start = self._turn_start = 0.0
        self._divided_steps = step_counts.divided
        self._turn = ExitStack()
        """Of the steps that this rank makes alone."""
        self._cores: Cores | None = None
        self._is_waiting = False
        self._process = os.getpid()
        self.ends_in_call = False
        """Whether a `backward()` has ended in the outermost call under way, which is a step then:
        see `end_backward`."""

    @property
    def computes_whole(self) -> bool:
        """Whether outermost calls are computed whole now."""
        return self._choice.phase is not Phase.SHARED

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

    def end_backward(self, slow_calls: int) -> None:
        """A `backward()` of the script has ended, in its main thread, or the outermost call in
        which some did; `slow_calls`: those that were compared, timed or watched so far.
        Collective where something is due."""
        choice = self._choice
        self.ends_in_call = False
        if step_counts.divided != self._divided_steps:
            self._divided_steps = step_counts.divided
            choice.add_divided()
        choice.add_step(slow_calls)
        if choice.phase is Phase.WHOLE:
            self._drain()
        elif choice.is_warmed_up:
            self._start_clock()
        elif choice.is_phase_over and choice.phase is Phase.ALONE:
            self._end_turn()
        elif choice.is_phase_over:
            [seconds] = max(gather_values([perf_counter() - self._start], self._transport))
            choice.finish_phase(seconds)
        elif choice.is_due:
            choice.begin(
                is_possible=not on_any_rank(self._ranks.is_loading_shared(), self._transport)
            )

    def leave_others(self, why: str = _AHEAD) -> None:
        """Rank 0 waits for others, or is interrupted or at its end: it goes on alone if it has made
        steps that they have not made. Nothing in a process that it has forked."""
        is_ahead = self._choice.phase is Phase.ALONE and self._transport.rank == 0
        if is_ahead and os.getpid() == self._process:
            self._turn.close()
            self._leave(why)

    def may_interrupt(self) -> bool:
        """Whether an interrupt reaches the script of this rank now, before which rank 0 leaves the
        others. A rank that waits for rank 0 will end or do what rank 0 has done."""
        self.leave_others()
        return not self._is_waiting or os.getpid() != self._process

    def _drain(self) -> None:
        """Go on to what follows the phase WHOLE, if all ranks can. Collective."""
        choice = self._choice
        if choice.is_drain_too_long:
            choice.stop()
            return
        if choice.drain_steps.bit_count() > 1:  # each look costs a message
            return
        needs_all = self._ranks.has_outputs() or self._ranks.is_loading_shared()
        if on_any_rank(needs_all, self._transport):
            return
        self._cores = Cores.of_all(self._threads, self._transport)
        if choice.is_for_one:
            self._ranks.leave_to_rank0(self._cores_alone(), _NOTHING_DIVIDED)
            return
        choice.finish_drain()
        self._begin_turn()

    def _begin_turn(self) -> None:
        """Begin the steps that this rank makes alone, after those of the ranks before it."""
        transport = self._transport
        self._is_waiting = transport.rank > 0
        if self._is_waiting and self._ranks.tell(lambda: "") == _END:
            self._leave(_TAKES_LESS)
        self._is_waiting = False
        if transport.rank > 1:
            transport.recv_object(transport.rank - 1)
        self._turn_start = perf_counter()
        self._turn.enter_context(use_transport(LocalTransport()))
        self._turn.enter_context(pausing_steps())
        self._turn.enter_context(self._cores_alone().applied())

    def _end_turn(self) -> None:
        """This rank has made its steps alone. Collective, unless rank 0 goes on so."""
        transport, choice = self._transport, self._choice
        seconds = perf_counter() - self._start
        self._turn.close()
        if transport.rank == 0:
            choice.finish_phase(seconds)
            if choice.is_for_one or self._is_far_ahead():
                self._leave(_TAKES_LESS if choice.is_for_one else _AHEAD)
                return
            self._ranks.tell(lambda: _CATCH_UP)
        elif transport.rank + 1 < transport.size:
            transport.send_object(None, transport.rank + 1)
        seconds = transport.broadcast_object(seconds, 0)
        if transport.rank != 0:
            choice.finish_phase(seconds)
        take_rank0_values(transport)

    def _is_far_ahead(self) -> bool:
        """Whether rank 0 might wait in vain for the others, one after the other, to catch up."""
        seconds = (self._transport.size - 1) * (perf_counter() - self._turn_start)
        return 2 * seconds > settings.timeout().total_seconds()

    def _leave(self, why: str) -> None:
        if self._transport.rank == 0:
            self._ranks.tell(lambda: _END)
        self._ranks.leave_to_rank0(self._cores_alone(), why)

    def _cores_alone(self) -> Cores:
        """The cores of all ranks, with the number of threads that the script has set, if it has."""
        assert self._cores is not None
        threads = torch.get_num_threads()
        is_set = threads != self._threads_before
        return replace(self._cores, threads=threads) if is_set else self._cores

    def _start_clock(self) -> None:
        if self._choice.phase is Phase.SHARED:
            self._transport.barrier()
        self._start = perf_counter()


_current = ProcessValue[Fallback | None](None)


def set_fallback(fallback: Fallback | None) -> None:
    """Let this be what the calls and backwards of the script ask; None: nothing."""
    _current.value = fallback


def current_fallback() -> Fallback | None:
    """The fallback that is to be asked here; None outside of the script's main thread, or where
    this rank works alone."""
    fallback = _current.value
    if fallback is None or not in_main_thread() or is_rank_local():
        return None
    return fallback


def leave_others(why: str = _AHEAD) -> None:
    """See `Fallback.leave_others`; for any place of the script."""
    if fallback := _current.value:
        fallback.leave_others(why)


def may_interrupt() -> bool:
    """See `Fallback.may_interrupt`; for any place of the script."""
    fallback = _current.value
    return fallback is None or fallback.may_interrupt()
