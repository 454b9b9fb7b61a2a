"""Whether the ranks of a host go on sharing the calls, or rank 0 alone with the cores of all.

On a CPU one process uses all cores already. So ranks for each of these cores gain where smaller
parts keep their data in the caches, and lose where each reads all parameters for fewer rows. It is
measured: some steps as they are, then as many that rank 0 makes alone while the others wait, who
catch up afterwards; and so on in turns.

All ranks give their choice the same numbers in the same order, so they choose alike.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

WHOLE_STEPS = 24
"""Where nothing was divided in so many steps, there is nothing to be measured."""
FIRST_MEASURE = 16
"""Steps before the first measurement."""
_MOST_RANKS = 8
"""More would wait for too long for each other."""
WARM_UP = 2
"""Steps at the start of a phase that are not timed."""
_SETTLED = 8
"""Steps without a comparison or a timed call, before a measurement."""
_FEWEST, _SECONDS = 2, 0.1
"""The least number of timed steps in a phase, and about how long they take."""
_MOST_SECONDS = 20.0
"""Longer the other ranks are not to wait: nothing is measured where steps take so long."""
_MAJORITY, _MAX_PAIRS = 2, 8
"""Of pairs of phases: how many decide, and how many are tried."""
MARGIN = 0.98
"""One process must take less than this share of what the ranks take together."""
_CLEAR = 1.25
"""Where it takes so many times as long, one pair is enough."""
_MAX_DRAIN = 16
"""Steps until nothing is left of divided calls."""


class Phase(Enum):
    """How the calls of modules are computed."""

    SHARED = auto()
    """As it is decided for each."""
    WHOLE = auto()
    """Whole on every rank, until no graph and no output of a divided call is left."""
    ALONE = auto()
    """Whole on rank 0, as if there were no other rank, and then on each of the others."""


@dataclass(frozen=True)
class _PhaseSample:
    """What the steps of a phase took."""

    seconds: float
    calls: Counter[bool]
    has_trial: bool


@dataclass(eq=False)
class ProcessChoice:
    """The choice for one script. A step is what ends with a `backward()`."""

    ranks: int = 2
    phase: Phase = Phase.SHARED
    is_for_one: bool = False
    """Whether rank 0 is to go on alone."""
    _steps: int = 0
    _last_divided: int = 0
    _last_trial: int = 0
    _slow_calls: int = 0
    _next: int = FIRST_MEASURE
    _length: int = 0
    """Timed steps of the phase under way; 0: none is timed."""
    _step_seconds: float = 0.0
    """What a step takes, as far as is known while phases are timed."""
    _last_evaluation: int | None = None
    """The steps before the last call without gradients, while phases are timed."""
    _evaluation_steps: int = 1
    """The steps between two evaluations."""
    _is_calibrating: bool = False
    _in_phase: int = 0
    _calls: Counter[bool] = field(default_factory=Counter)
    """Of the timed steps of this phase, by whether gradients were enabled."""
    _has_trial: bool = False
    _shared: _PhaseSample | None = None
    _ratios: list[float] = field(default_factory=list)
    _pairs: int = 0

    @property
    def is_measuring(self) -> bool:
        """Whether phases are timed, or the choice for one process waits to be carried out."""
        return self._length > 0 or self.is_for_one

    @property
    def is_due(self) -> bool:
        """Whether the next measurement should begin: see `begin`. Something was divided lately, and
        not only to compare or time it."""
        return (
            self.ranks <= _MOST_RANKS
            and not self.is_measuring
            and self._steps >= self._next
            and self._steps - self._last_trial >= _SETTLED
            and self._steps - self._last_divided < WHOLE_STEPS
            and self._last_divided >= self._last_trial
        )

    @property
    def is_warmed_up(self) -> bool:
        """Whether the time of a phase begins now."""
        return self._length > 0 and self._in_phase == WARM_UP

    @property
    def is_phase_over(self) -> bool:
        """Whether the steps of a timed phase are complete: see `finish_phase`."""
        is_timed = self._length > 0 and self.phase is not Phase.WHOLE
        return is_timed and self._in_phase >= WARM_UP + self._length

    @property
    def drain_steps(self) -> int:
        """How many steps the phase WHOLE has lasted."""
        return self._in_phase if self.phase is Phase.WHOLE else 0

    @property
    def is_drain_too_long(self) -> bool:
        """Whether a script seems to keep outputs of divided calls."""
        return self.drain_steps >= _MAX_DRAIN and self._last_divided > 0

    def add_call(self, *, has_grad: bool) -> None:
        """An outermost call begins, with gradients enabled or not."""
        self._calls[has_grad] += 1
        if not has_grad and self._last_evaluation != self._steps:
            if self._last_evaluation is not None:
                self._evaluation_steps = self._steps - self._last_evaluation
            self._last_evaluation = self._steps

    def add_divided(self) -> None:
        """A call was divided, or an optimizer's step."""
        self._last_divided = self._steps

    def add_step(self, slow_calls: int) -> None:
        """A `backward()` has ended; `slow_calls`: those that were compared, timed or watched
        so far."""
        self._steps += 1
        self._in_phase += 1
        if slow_calls != self._slow_calls:
            self._slow_calls, self._last_trial, self._has_trial = slow_calls, self._steps, True
        if self.is_warmed_up:
            self._calls.clear()
        if not self.is_measuring and self._steps - self._last_divided >= WHOLE_STEPS:
            self.is_for_one = True
            self._begin_phase(Phase.WHOLE)

    def begin(self, *, is_possible: bool) -> None:
        """Begin to measure; or later, if rank 0 could not go on alone now."""
        if not is_possible:
            self._next = 2 * self._steps
            return
        self._ratios, self._pairs = [], 0
        self._last_evaluation, self._evaluation_steps = None, 1
        self._length, self._is_calibrating = _FEWEST, True
        self._begin_phase(Phase.SHARED)

    def finish_phase(self, seconds: float) -> None:
        """End a phase that is over, whose timed steps took so long; ALONE: on rank 0."""
        if self._is_calibrating:
            self._calibrate(seconds)
            return
        sample = _PhaseSample(seconds, self._calls, self._has_trial)
        if self.phase is Phase.SHARED:
            self._shared = sample
            self._begin_phase(Phase.WHOLE)
            return
        assert self._shared is not None
        self._pairs += 1
        is_alike = sample.calls == self._shared.calls
        if is_alike and not (sample.has_trial or self._shared.has_trial):
            self._ratios.append(sample.seconds / max(self._shared.seconds, 1e-9))
        self._begin_phase(Phase.SHARED)
        faster = sum(ratio < MARGIN for ratio in self._ratios)
        slower = len(self._ratios) - faster
        if self._ratios and self._ratios[-1] > _CLEAR:
            self.stop()
        elif faster == _MAJORITY:
            self._length, self.is_for_one = 0, True
        elif slower == _MAJORITY or self._pairs == _MAX_PAIRS:
            self.stop()
        elif not is_alike:
            self._set_length(_next_multiple(self._length, self._evaluation_steps))

    def _calibrate(self, seconds: float) -> None:
        """Choose the number of steps of a phase, by what the first ones took."""
        self._step_seconds = max(seconds, 1e-6) / self._length
        self._is_calibrating = False
        self._begin_phase(Phase.SHARED)
        self._set_length(max(_FEWEST, _next_multiple(math.ceil(_SECONDS / self._step_seconds), 2)))

    def _set_length(self, steps: int) -> None:
        self._length = steps
        if self.ranks * (steps + WARM_UP) * self._step_seconds > _MOST_SECONDS:
            self.stop()

    def finish_drain(self) -> None:
        """Nothing is left of divided calls: rank 0 begins its steps."""
        self._begin_phase(Phase.ALONE)

    def stop(self) -> None:
        """Go on sharing the calls, and measure again after ten times as many steps."""
        self._length, self.is_for_one = 0, False
        self._next, self._last_divided = 10 * self._steps, self._steps
        self._begin_phase(Phase.SHARED)

    def _begin_phase(self, phase: Phase) -> None:
        self.phase, self._in_phase, self._has_trial = phase, 0, False
        self._calls = Counter()


def _next_multiple(number: int, divisor: int) -> int:
    return math.ceil(number / divisor) * divisor
