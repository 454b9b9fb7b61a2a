"""Where each rank puts what the others shall read: parts of shared memory, taken in turn.

Two parts for each rank are enough, and stay in its cache. Where the ranks' cores share a further
cache that is the fastest. Where they do not (a processor may have one for each few cores, a host
several processors), a core waits long to write to a line that another one has lately read: on an
EPYC 20 MB took 7.5 ms, and 2 ms in turn through so many parts that the lines had left the other's
cache; with a common cache 1.6 and 2.9 ms. Nobody tells a process which it is, and it changes when
the system moves it. So the ranks try both, and again from time to time.
"""

from __future__ import annotations

from math import inf
from statistics import median

import torch
from torch import Tensor

NEAR_PARTS = 2
FAR_PARTS = 16
_KEPT_VIEWS = 256


class Staging:
    """The same number of parts for each rank, in one stretch of memory."""

    def __init__(self, memory: memoryview, ranks: int, parts: int) -> None:
        self._memory = memory
        self._ranks, self._parts = ranks, parts
        self._part = len(memory) // (ranks * parts)
        self._turn = 0
        self._views: dict[tuple[torch.dtype, int, int], list[Tensor]] = {}

    def next_turn(self) -> int:
        """Which part each rank writes to now."""
        self._turn = (self._turn + 1) % self._parts
        return self._turn

    def view(self, rank: int, turn: int, dtype: torch.dtype, start: int, numel: int) -> Tensor:
        """`numel` elements from element `start` on in a rank's part of this turn."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        offset = (rank * self._parts + turn) * self._part + start * dtype.itemsize
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset)

    def views(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """The first `numel` elements of every rank's part at the next turn."""
        key = (dtype, numel, self.next_turn())
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # they are kept for callers that are in none
                views = [self.view(rank, key[2], dtype, 0, numel) for rank in range(self._ranks)]
            self._views[key] = views
        return views


_FIRST_BYTES, _BETWEEN_BYTES = 128 << 20, 2 << 30
_PHASES = (
    # bytes, with far parts, measured
    (8 << 20, False, False),
    (24 << 20, False, True),
    (16 << 20, True, False),
    (32 << 20, True, True),
)
_SMALLEST_MEASURED_BYTES = 16 << 10
_CLEARLY = 0.9


class Trials:
    """Which parts to use for large tensors: the two, or the many (`far`), by what writing takes.

    When a trial begins and ends depends on what the ranks have moved, so all have it at once.
    """

    def __init__(self) -> None:
        self.far = False
        self.measuring = False
        """Whether `wrote` wants to know."""
        self._phase = -1
        self._left = float(_FIRST_BYTES)
        self._rates: dict[bool, list[float]] = {False: [], True: []}

    def moves(self, size: int) -> bool:
        """So many bytes come next. Returns whether the ranks have to `settle` before."""
        self._left -= size
        if self._left > 0:
            return False
        self._phase += 1
        if self._phase == len(_PHASES):
            return True
        self._left, self.far, self.measuring = _PHASES[self._phase]
        return False

    def wrote(self, size: int, seconds: float) -> None:
        """This rank wrote so many bytes."""
        if size >= _SMALLEST_MEASURED_BYTES:
            self._rates[self.far].append(seconds / size)

    def rates(self) -> list[float]:
        """What a byte took this rank, in seconds, near and far; 0 where it wrote none."""
        return [median(rates) if rates else 0.0 for rates in self._rates.values()]

    def settle(self, near: float, far: float) -> None:
        """The trial is over; this is what a byte took, the same numbers on all ranks."""
        self.far, self.measuring = far < _CLEARLY * near, False
        self._phase, self._left = -1, _BETWEEN_BYTES
        for rates in self._rates.values():
            rates.clear()

    def give_up(self) -> None:
        """There is no memory for more than two parts."""
        self.far, self.measuring, self._left = False, False, inf
