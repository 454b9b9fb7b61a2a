"""Decides whether each rank loads its own rows and the ranks exchange them.

The numbers do not depend on it, because a sample is the same on every rank that loads it; that is
checked now and then. All ranks decide by what all of them measured, so they decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MEASURED_BATCHES = 3
"""How many batches are exchanged before the decision: the first ones open files."""
_SECONDS_PER_EXCHANGE = 1e-3
_SECONDS_PER_BYTE = 1e-9


@dataclass
class ExchangePolicy:
    """The decision for one loader."""

    ranks: int
    workers: int
    """How many processes of a rank load at once; 0: the rank's own."""
    exchanges: bool = field(init=False)
    """Whether rows are exchanged, as far as it is decided."""
    loads_rest: bool = False
    """Whether each rank also loads the rows that others have loaded, in batches that were requested
    before it was decided that each loads all."""
    has_printed: bool = False
    """Whether loading has printed in any batch: many do once, as they open files."""
    _batches: int = 0
    _measured: int = 0
    _forced: bool = False
    _seconds: float = float("inf")  # per sample, the least
    _bytes: float = 0.0  # per sample, the most

    def __post_init__(self) -> None:
        self.exchanges = self.ranks > 1

    def next_batch(self) -> tuple[bool, bool]:
        """For the next batch: whether to exchange rows, and whether to check a sample.

        A check compares a sample that two ranks have loaded, in the 1st, 2nd, 4th, 8th ... batch.
        """
        self._batches += 1
        checks = self.ranks > 1 and self._batches.bit_count() == 1
        if self._forced and not self.exchanges:
            return False, False
        return self.exchanges or checks, checks

    def force(self, *, exchange: bool, loads_rest: bool = False) -> None:
        """Decide for good: samples cannot be sent, or depend on the rank that loads them, or
        loading them changes something else."""
        self.exchanges, self._forced, self.loads_rest = exchange, True, loads_rest

    @property
    def has_gained(self) -> bool:
        """Whether rows are exchanged since that is faster."""
        return self.exchanges and self._measured >= _MEASURED_BATCHES

    def set_single_rank(self) -> None:
        """From now on there is one rank."""
        self.ranks = 1
        self.force(exchange=False)

    def update(self, count: int, seconds: float, nbytes: int) -> None:
        """Learn that a batch of `count` samples took the ranks `seconds` in all to load."""
        if not count:
            return
        self._measured += 1
        self._seconds = min(self._seconds, seconds / count)
        self._bytes = max(self._bytes, nbytes / count)
        if self._measured == _MEASURED_BATCHES and not self._forced:
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
