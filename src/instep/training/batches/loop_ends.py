"""Whether the ranks come to the end of the same sharded loaders. None waits to find out.

A rank whose loop the others do not run has its own rows of the batches: what it prints of them is
no metric of the data set.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
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
    """The ends of loops on this rank so far."""

    def __init__(self) -> None:
        self.latest: deque[_End] = deque(maxlen=_MAX_SHOWN)
        self.clear(first_loader=0)

    def clear(self, first_loader: int) -> None:
        """Begin anew, with the loader of this number."""
        self.first_loader = first_loader
        self.number = 0
        """How many there were."""
        self.latest.clear()
        self.has_warned = False

    def add(self, end: _End) -> None:
        self.number += 1
        self.latest.append(end)

    def show(self, *, is_last: bool) -> None:
        """Compare with the neighbors; `is_last`: this rank has ended its script."""
        if self.has_warned:
            return
        shown = self.number, [*self.latest], is_last
        mine = _RankLoops.of(bootstrap.current().rank, *shown)
        for rank, theirs in neighbors.show("loop ends", shown):
            difference = _find_difference(mine, _RankLoops.of(rank, *theirs))
            if difference is not None:
                self.has_warned = True
                _warn(*difference)
                return


class _RankLoops(NamedTuple):
    """The loops of one rank, as far as it shows them."""

    rank: int
    ends: dict[int, _End]
    """Each by how many there were before it."""
    total: float
    """How many there are in its script; infinite until that has ended."""

    @classmethod
    def of(cls, rank: int, number: int, latest: list[Any], is_last: bool) -> _RankLoops:
        ends = enumerate((_End(*each) for each in latest), start=number - len(latest))
        return cls(rank, dict(ends), number if is_last else math.inf)


def _find_difference(
    mine: _RankLoops, theirs: _RankLoops
) -> tuple[_RankLoops, _RankLoops, int] | None:
    """The rank that runs a loop alone, the other one, and the number of the loop."""
    for k in sorted(mine.ends.keys() | theirs.ends.keys()):
        if k in mine.ends and k in theirs.ends:
            if mine.ends[k].loader != theirs.ends[k].loader:
                # More often it is an evaluation that some ranks leave out.
                alone, other = sorted((mine, theirs), key=lambda each: each.ends[k].has_gradients)
                return alone, other, k
        elif k >= theirs.total:
            return mine, theirs, k
        elif k >= mine.total:
            return theirs, mine, k
    return None


def _warn(alone: _RankLoops, other: _RankLoops, k: int) -> None:
    end, instead = alone.ends[k], other.ends.get(k)
    what = "has not, and is at the end of its script"
    if instead is not None:
        what = f"has come to that of another one instead, at {instead.place}"
    text = (
        f"rank {alone.rank} has come to the end of a loader of instep.shard at {end.place}, and "
        f"rank {other.rank} {what}. What rank {alone.rank} computes there is of its own rows only, "
        "and no metric of the whole data. Iterate over the loader on every rank and bring the "
        "ranks' results together (instep.Mean, instep.Accuracy, instep.gather_rows), or let the "
        "one rank iterate over a loader that is not sharded. [INS719]"
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
    number = loader - _ends.first_loader
    _ends.add(_End(number, frame.f_code.co_filename, frame.f_lineno, torch.is_grad_enabled()))
    _ends.show(is_last=False)


def reset() -> None:
    """Forget all loops; some ranks may have made more loaders than others before."""
    _ends.clear(next(_loader_numbers))
    neighbors.reset()


@functools.cache
def _follow_exit() -> None:
    """Compare at the end of the script, too; before the ranks leave the job. Not at the end of a
    forked child."""
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=functools.partial(atexit.unregister, _at_exit))


def _at_exit() -> None:
    if dist.is_initialized() and not client.has_failed():
        _ends.show(is_last=True)
