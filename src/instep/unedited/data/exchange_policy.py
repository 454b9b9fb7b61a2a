"""Decides whether each rank loads its own rows and the ranks exchange them.

The numbers do not depend on it, because a sample is the same on every rank that loads it; that is
checked now and then. All ranks decide by what all of them measured, so they decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

_MEASURED_BATCHES = 3
"""How many batches are exchanged before it is decided: the first ones open files."""
_SECONDS_PER_EXCHANGE = 1e-3
_SECONDS_PER_BYTE = 1e-9


class BatchLoading(NamedTuple):
    """How the ranks load a batch."""

    exchanges: bool = False
    """Whether each rank loads its own rows; otherwise every rank loads all."""
    checks: bool = False
    """Whether the ranks compare what they load: where they exchange rows, each also loads one
    sample of another rank's."""
    counts: bool = False
    """Whether it is found out if samples that draw random numbers are small."""
    as_plain: bool = False
    """Whether samples draw from the global generators as they are, as in plain Python."""


@dataclass
class ExchangePolicy:
    """The decision for one loader."""

    ranks: int
    workers: int
    """How many processes of a rank load at once; 0: the rank's own."""
    may_load_as_plain: bool = False
    """Whether all ranks load everything as plain Python does if it turns out that samples that draw
    random numbers are small."""
    exchanges: bool = field(init=False)
    """Whether rows are exchanged, as far as it is decided: after the 3rd batch that was exchanged,
    and again after the 4th, 8th, 16th ..., since the first ones take longer to load."""
    loads_rest: bool = False
    """Whether each rank also loads the rows that others have loaded, in batches that were requested
    before it was decided that each loads all."""
    has_printed: bool = False
    """Whether loading has printed in any batch: many do once, as they open files."""
    _as_plain: bool = False
    _batches: int = 0
    _measured: int = 0
    _forced: bool = False
    _seconds: float = float("inf")  # per sample, the least
    _bytes: float = 0.0  # per sample, the most

    def __post_init__(self) -> None:
        self.exchanges = self.ranks > 1

    def next_batch(self, *, is_shared: bool = True) -> BatchLoading:
        """How the next batch is loaded. It is checked if it is the 1st, 2nd, 4th, 8th ...

        is_shared: whether all ranks load it at the same time.
        """
        counts, as_plain = self.may_load_as_plain, self._as_plain and not self.exchanges
        if not is_shared:
            return BatchLoading(counts=counts, as_plain=as_plain)
        self._batches += 1
        checks = self.ranks > 1 and self._batches.bit_count() == 1
        if as_plain:
            return BatchLoading(checks=checks, as_plain=True)
        if self._forced and not self.exchanges:
            return BatchLoading(counts=counts)
        return BatchLoading(exchanges=self.exchanges or checks, checks=checks, counts=counts)

    def update_plain(self, are_small: bool | None) -> bool:
        """Whether samples are loaded as plain Python loads them from this batch on, the first in
        which any draw; `are_small`: whether those that draw are small, None if none does."""
        if are_small is None or not self.may_load_as_plain:
            return False
        self.may_load_as_plain = False
        if are_small:
            self.force(exchange=False)
            self._as_plain = True
        return are_small

    def force(self, *, exchange: bool, loads_rest: bool = False) -> None:
        """Decide for good: samples cannot be sent, or depend on the rank that loads them, or
        loading them changes something else."""
        self.exchanges, self._forced, self.loads_rest = exchange, True, loads_rest
        self.may_load_as_plain = False

    @property
    def has_gained(self) -> bool:
        """Whether rows are exchanged since that is faster."""
        return self.exchanges and self._measured >= _MEASURED_BATCHES

    def set_single_rank(self) -> None:
        """From now on there is one rank."""
        self.ranks, self.exchanges, self._forced, self.loads_rest = 1, False, True, False

    def update(self, count: int, seconds: float, nbytes: int) -> None:
        """Learn that a batch of `count` samples took the ranks `seconds` in all to load."""
        if not count:
            return
        self._measured += 1
        self._seconds = min(self._seconds, seconds / count)
        self._bytes = max(self._bytes, nbytes / count)
        is_again = self._measured > _MEASURED_BATCHES and self._measured.bit_count() == 1
        if (self._measured == _MEASURED_BATCHES or is_again) and not self._forced:
            loading = self._seconds * count / max(1, self.workers)
            nbytes = int(self._bytes * count)
            self.exchanges = is_exchange_faster(loading, nbytes, count, self.ranks)


def is_exchange_faster(seconds: float, nbytes: int, count: int, ranks: int) -> bool:
    """Whether loading only its own rows saves a rank more time than the exchange costs.

    Args:
        seconds: to load the whole batch.
        nbytes: the size of the batch.
        count: the samples of the batch.
        ranks: the number of ranks that share it.
    """
    largest_block = -(-count // ranks)  # the other ranks wait for the rank that loads it
    return is_sending_faster(seconds * (1 - largest_block / count), nbytes)


def is_sending_faster(seconds: float, nbytes: int) -> bool:
    """Whether ranks take less than so many seconds to send each other a batch of this size."""
    return seconds > _SECONDS_PER_EXCHANGE + nbytes * _SECONDS_PER_BYTE
