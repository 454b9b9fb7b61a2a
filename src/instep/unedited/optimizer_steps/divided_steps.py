"""Steps of an unedited script's optimizers, divided between the ranks of a host.

Parameters and state are the script's own tensors, which all ranks see as one copy (`HostCopy`);
only the kernel runs on a part of them. So everything around a step is as in one process: hooks,
schedulers, `optimizer.state`, `state_dict()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from instep.distributed.communication.rank_local import is_rank_local
from instep.distributed.communication.transport import Transport, get_transport
from instep.distributed.numbers import on_all_ranks
from instep.process import in_main_thread, settings
from instep.process.patching import Function
from instep.process.process_value import ProcessValue
from instep.process.torch_private.tensors import foreach_add_
from instep.training.drift.step_gradients import GradientCheck
from instep.training.optimizer_shards.host_copy import HostCopy, are_many
from instep.training.optimizer_shards.layout import Part, divide_elements

_FIRST_TRY = 3
"""The step in which the tensors may first move into a common copy, if they are those of the step
before. Later tries are in steps 6, 12, 24 and so on: each costs a message between the ranks."""
_GRADS, _STEPS = 1, 5
"""The places of the gradients and of Adam's step counters among the lists."""


def step(
    original: Function, lists: Sequence[Sequence[Tensor | None]], options: dict[str, Any]
) -> bool:
    """Run a kernel of torch.optim on this rank's part, if the step can be divided. Collective.

    Args:
        lists: parameters, gradients, state for each of their elements, and Adam's step counters.
        options: of the kernel.

    Returns False, and has done nothing, if every rank is to make the whole step. Raises DriftError
    if the ranks' gradients or options have become different.
    """
    if not in_main_thread():
        return False  # the ranks' threads need not come to their steps in the same order
    parameters = [each for each in lists[0] if isinstance(each, nn.Parameter)]
    if len(parameters) < len(lists[0]) or not are_many(parameters):
        return False
    if _is_paused.value or is_rank_local() or settings.is_bitwise():
        return False
    known: _DividedStep | None = _steps_of.get(parameters[0])
    if known is None:
        known = _steps_of[parameters[0]] = _DividedStep()
    return known.run(original, lists, options, get_transport())


@dataclass
class StepCounts:
    """This rank's steps so far."""

    divided: int = 0
    """Those of which it has made its part."""


step_counts = StepCounts()
_is_paused = ProcessValue(False)


@contextmanager
def pausing_steps() -> Iterator[None]:
    """Inside, this rank makes whole steps. Afterwards it shares them again, once the other ranks
    have made the same ones."""
    try:
        with _is_paused.set_to(True):
            yield
    finally:
        for each in _steps_of.values():
            each.copy.expect_writes()


class _DividedStep:
    """The steps of one list of parameters."""

    def __init__(self) -> None:
        self.copy = HostCopy()
        self._check = GradientCheck()
        self._whole_steps = 0
        """Since there was a copy."""
        self._tensors: tuple[int, ...] = ()
        """The ids of those of the last step. An id may be that of another tensor by now, so the
        ranks agree on what follows from it."""

    def run(
        self,
        original: Function,
        lists: Sequence[Sequence[Tensor | None]],
        options: dict[str, Any],
        transport: Transport,
    ) -> bool:
        """As `step`."""
        columns: list[list[Tensor]] = []
        for given in (lists[0], *lists[2:_STEPS]):
            column = [each for each in given if each is not None]
            if len(column) < len(given):  # the first step makes its own
                return False
            columns.append(column)
        if not (self.copy.slices or self._may_move(columns, transport)):
            return False

        def own_parts() -> Sequence[Part]:
            return divide_elements(columns[0], transport.size)[transport.rank]

        if not self.copy.prepare(columns, own_parts, transport):
            return False
        self._whole_steps = 0
        self._check.begin_step(columns[0], lists[_GRADS], options, transport)
        gradients = self.copy.slices_of([each for each in lists[_GRADS] if each is not None])
        own: list[list[Tensor]] = [self.copy.slices[0], gradients, *self.copy.slices[1:]]
        steps = [each for given in lists[_STEPS:] for each in given if each is not None]
        if steps:
            own.append([steps[place] for place in self.copy.places])
        original(*own, **options)
        of_others = {*range(len(steps))}.difference(self.copy.places)
        if others := [steps[place] for place in of_others]:
            foreach_add_(others, 1)
        self.copy.publish()
        step_counts.divided += 1
        return True

    def _may_move(self, columns: Sequence[Sequence[Tensor]], transport: Transport) -> bool:
        """Whether it is time to try, and the last step had the same tensors on all ranks.
        Collective."""
        tensors = tuple(id(tensor) for column in columns for tensor in column)
        are_same = tensors == self._tensors
        self._tensors = tensors
        self._whole_steps += 1
        times, rest = divmod(self._whole_steps, _FIRST_TRY)
        is_time = not rest and times.bit_count() == 1
        return (
            is_time
            and self.copy.can_begin(columns[0], transport)
            and on_all_ranks(are_same, transport)
        )


_steps_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Of each list of parameters, by the first of them."""
