"""Whether the ranks come to the end of the same sharded loaders. None waits to find out.

A rank whose loop the others do not run has its own rows of the batches: what it prints of them is
no metric of the data set.
"""

from __future__ import annotations

import atexit
import functools
import sys
import warnings
from collections import deque
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from instep.distributed import neighbors
from instep.distributed.flight_record.script_line import script_frame
from instep.distributed.rendezvous import bootstrap
from instep.distributed.watchdog import client
from instep.errors import InstepWarning
from instep.training.batches.progress import is_followed

_MAX_SHOWN = 32
"""The ends of so many loops are compared at once: by so many a rank may be ahead of another."""
_loader_numbers = count()


class _End(NamedTuple):
    """The end of a loop over a sharded loader."""

    loader: int
    file: str
    line: int
    has_gradients: bool

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


class _LoopEnds:
    """Those of this rank so far."""

    def __init__(self) -> None:
        self.number = 0
        """How many there were."""
        self.latest: deque[_End] = deque(maxlen=_MAX_SHOWN)
        self.has_warned = False

    def add(self, end: _End) -> None:
        self.number += 1
        self.latest.append(end)

    def show(self, *, is_last: bool) -> None:
        """Compare with the neighbors; `is_last`: this rank has ended its script."""
        if self.has_warned:
            return
        own = bootstrap.current().rank
        for rank, (number, latest, was_last) in neighbors.show(
            "loop ends", (self.number, [*self.latest], is_last)
        ):
            theirs = _by_number(number, [_End(*each) for each in latest])
            mine = _by_number(self.number, [*self.latest])
            for k in sorted(mine.keys() | theirs.keys()):
                if k in mine and k in theirs:
                    if mine[k].loader != theirs[k].loader:
                        # More often it is an evaluation that some ranks leave out.
                        pair = [(own, mine[k]), (rank, theirs[k])]
                        alone, other = sorted(pair, key=lambda each: each[1].has_gradients)
                        self._warn(*alone, *other)
                        return
                elif k >= number and was_last:
                    self._warn(own, mine[k], rank)
                    return
                elif k >= self.number and is_last:
                    self._warn(rank, theirs[k], own)
                    return

    def _warn(self, rank: int, end: _End, other: int, others: _End | None = None) -> None:
        self.has_warned = True
        instead = "has not, and is at the end of its script"
        if others is not None:
            instead = f"has come to that of another one instead, at {others.place}"
        text = (
            f"rank {rank} has come to the end of a loader of instep.shard at {end.place}, and rank "
            f"{other} {instead}. What rank {rank} computes there is of its own rows only, and no "
            "metric of the whole data. Iterate over the loader on every rank and bring the ranks' "
            "results together (instep.Mean, instep.Accuracy, instep.gather_rows), or let the one "
            "rank iterate over a loader that is not sharded. [INS719]"
        )
        warnings.warn_explicit(text, InstepWarning, end.file, end.line)


_ends = _LoopEnds()


def number_loader() -> int:
    """A number for a sharded loader, the same on all ranks; -1 in a run-once scope, where the other
    ranks do not shard it."""
    if bootstrap.is_world_of_one():
        return -1
    if bootstrap.current().size > 1:
        _follow_exit()
    return next(_loader_numbers)


def note_end(loader: int) -> None:
    """A loop has come to the end of the loader of this number."""
    if loader < 0 or not is_followed() or bootstrap.current().size == 1:
        return
    frame = script_frame(sys._getframe(1))
    _ends.add(_End(loader, frame.f_code.co_filename, frame.f_lineno, torch.is_grad_enabled()))
    _ends.show(is_last=False)


def reset() -> None:
    """Forget all loops."""
    global _ends
    _ends = _LoopEnds()
    neighbors.reset()


@functools.cache
def _follow_exit() -> None:
    """Compare at the end of the script, too; before the ranks leave the job."""
    atexit.register(_at_exit)


def _at_exit() -> None:
    if dist.is_initialized() and not client.has_failed():
        _ends.show(is_last=True)


def _by_number(number: int, latest: list[_End]) -> dict[int, Any]:
    """The latest ends, each by how many there were before it."""
    return dict(enumerate(latest, start=number - len(latest)))
