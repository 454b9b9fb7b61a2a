"""The choice between sharding a call and computing it whole on every rank, by what each costs.

All ranks give their tuners the same costs in the same order, so they choose alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any
from weakref import WeakSet, finalize

import numpy as np

_FEWEST, _CLEAR = 2, 1.5
"""After so many steps of each sort it is chosen where all of one cost so many times the other's."""
_ENOUGH, _CLOSE, _MOST = 3, 1.25, 7
"""After so many by their medians. Where these are within this factor of the limit, and not all
steps are on the same side of it, after so many: beside other work steps vary by a fifth."""
MARGIN = 0.95
"""What is not in use must cost less than this share of what is."""
FIRST_CALLS = 100
"""After so many calls both are timed again, and then after ten times as many."""


@dataclass(eq=False)
class TimedStep:
    """A call without gradients; or calls up to the backward() that reaches one of them."""

    is_sharded: bool
    compares_bits: bool
    seconds: float = 0.0
    """Of all calls, and of their share of the backward."""
    calls: int = 0
    elements: int = 0
    bits: int = 0
    """A checksum of what the calls returned, and of the gradients."""
    is_reached: bool = False
    """Whether a backward() has reached one of the calls."""
    missed: int = 0
    """How many times backward() has reached none."""
    is_complete: bool = False
    backwards: int | None = None
    """If it ended by its number of calls, before a backward(): how many of these there were."""

    @property
    def cost(self) -> float:
        """Seconds per element of the arguments."""
        return self.seconds / max(1, self.elements)


@dataclass(eq=False)
class CallTuner:
    """How calls of one kind and of about one size are computed.

    A cost is in seconds per element of the arguments: sizes may differ by a factor of two.
    """

    is_sharded: bool = False
    """The choice; the first time, sharding has to gain something to be chosen."""
    is_decided: bool = False
    begins_later: bool = False
    """Whether it waits until the tuners of the module's parts have decided."""
    may_be_whole: bool = False
    """Whether a whole call was seen to have the same bits on all ranks."""
    step: TimedStep | None = None
    """The last one that was timed."""
    skipped: int = 0
    """Calls since it ended that were not timed."""
    elements: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """Of all calls, by whether they were sharded."""
    typical: dict[bool, float] = field(default_factory=dict)
    """The median costs by which it was decided."""
    _costs: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    """Of timed steps, by whether they were sharded."""
    _calls: int = 0
    _next: int = FIRST_CALLS
    _stays: bool = False

    def count(self, elements: int, *, sharded: bool) -> None:
        """A call with so many elements was computed so."""
        self.elements[sharded] += elements
        self._calls += 1

    @property
    def is_due(self) -> bool:
        """Whether the next call is to be timed."""
        return not self.is_decided or (self._calls >= self._next and not self._stays)

    @property
    def has_chosen_whole(self) -> bool:
        """Whether the next call is computed whole and not timed."""
        return not (self.is_sharded or self.is_due)

    def begin(self) -> None:
        """Begin to time steps, if that is due and has not begun."""
        if self.is_decided:
            self.is_decided, self._next, self.step = False, 10 * self._next, None
            self._costs = {True: [], False: []}

    def next_is_sharded(self) -> bool:
        """How the next timed step is to be computed."""
        steps = sum(map(len, self._costs.values()))
        return steps % 4 in (1, 2)  # both sorts early and late, at odd and even places

    def needs_bits(self) -> bool:
        """Whether the bits of the next whole call are to be compared, as it may be chosen."""
        whole, sharded = self._costs[False], self._costs[True]
        return bool(sharded) and min(whole) <= 1.2 * max(sharded)

    def add(self, cost: float, *, sharded: bool, same_bits: bool | None) -> None:
        """Learn what a timed step cost, and choose if that is enough.

        `same_bits`: whether what a whole call returned is the same on all ranks; None: not
        compared.
        Where it is not, the ranks would drift apart, and the calls stay sharded.
        """
        self._costs[sharded].append(cost)
        if same_bits is not None:
            self.may_be_whole = same_bits
            self._stays = not same_bits
        choice = True if self._stays else self._choice()
        if choice is not None:
            self._decide(sharded=choice or not self.may_be_whole)

    def _choice(self) -> bool | None:
        """Whether the steps so far speak for sharding; None: they are too few."""
        whole, sharded = self._costs[False], self._costs[True]
        steps = min(len(whole), len(sharded))
        if steps < _FEWEST:
            return None
        if _CLEAR * max(sharded) < min(whole):
            return True
        if _CLEAR * max(whole) < min(sharded):
            return False
        limit = 1 / MARGIN if self.is_sharded else MARGIN
        gain = limit * median(whole) / (median(sharded) or 1.0)
        are_apart = max(sharded) < limit * min(whole) or min(sharded) > limit * max(whole)
        is_clear = are_apart or not 1 / _CLOSE < gain < _CLOSE
        return gain > 1 if steps >= (_ENOUGH if is_clear else _MOST) else None

    def _decide(self, *, sharded: bool) -> None:
        self.is_sharded, self.is_decided, self.step = sharded, True, None
        self.typical.clear()
        self.typical.update((by, median(costs)) for by, costs in self._costs.items() if costs)


class GainEstimate:
    """What ranks gain by the calls of all tuners, also of modules that are gone."""

    def __init__(self, tuners: Iterable[CallTuner] = ()) -> None:
        self._tuners: WeakSet[CallTuner] = WeakSet()
        self._of_gone = np.zeros(3)
        for tuner in tuners:
            self.add(tuner)

    def add(self, tuner: CallTuner) -> None:
        """Include the calls of this tuner, those that come, too."""
        self._tuners.add(tuner)
        keep = partial(self._keep, self._of_gone, tuner.elements, tuner.typical)
        finalize(tuner, keep).atexit = False

    def reset(self) -> None:
        """Forget them all."""
        self._tuners.clear()
        self._of_gone = np.zeros(3)

    @staticmethod
    def _keep(
        total: np.ndarray[Any, Any], elements: dict[bool, int], typical: dict[bool, float]
    ) -> None:
        total += _seconds(elements, typical)

    def format(self, ranks: int, seconds: float) -> str:
        """One line on what so many ranks have gained in a run of so many seconds; "" if no calls
        were timed.

        It is an estimate: calls take other times than the few that were timed, and these were
        whole on all ranks at once.
        """
        of_tuners = (_seconds(tuner.elements, tuner.typical) for tuner in self._tuners)
        sharded, whole, saved = sum(of_tuners, self._of_gone)
        if not sharded + whole:
            return ""
        total = max(seconds, sharded + whole)
        gain = (total + saved) / total
        fast = f"about {gain:.1f} times as fast as one" if gain >= 1.05 else "about as fast as one"
        parts = (
            *(
                f"{100 * part / total:.0f} % of the time in {where}"
                for part, where in (
                    (sharded, "divided calls"),
                    (whole, "calls that every rank computes whole"),
                )
                if part >= total / 200
            ),
            "the rest elsewhere",
        )
        return f"{ranks} ranks: {fast} (estimated from calls timed both ways); {'; '.join(parts)}."


def _seconds(elements: dict[bool, int], typical: dict[bool, float]) -> np.ndarray[Any, Any]:
    """The time of a tuner's sharded calls, that of the others, and what the first have saved."""
    if len(typical) < 2:
        return np.zeros(3)
    sharded, whole = elements[True] * typical[True], elements[False] * typical[False]
    return np.array([sharded, whole, elements[True] * typical[False] - sharded])


gain = GainEstimate()
"""By all calls that can be divided."""
