"""Whether it is policy while that each rank loads its own rows and the ranks exchange them.

The numbers do not depend on it: whoever loads a sample, it is the same. That is tried now and then.
All ranks judge by what all of them measured, so they judge alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_TRIED = 3
"""How many batches are exchanged before the judgement: the first ones open files."""
_SECONDS_PER_EXCHANGE = 1e-3
_SECONDS_PER_BYTE = 1e-9


@dataclass
class ExchangePolicy:
    """The judgement on one loader."""

    ranks: int
    workers: int
    """How many processes of a rank load at once; 0: its own."""
    exchanging: bool = field(init=False)
    """Whether rows are exchanged, for all that is known now."""
    _asked: int = 0
    _tried: int = 0
    _forced: bool = False
    _seconds: float = float("inf")  # per sample, at best
    _bytes: float = 0.0  # per sample, at most

    def __post_init__(self) -> None:
        self.exchanging = self.ranks > 1

    def ask(self) -> tuple[bool, bool]:
        """For the next batch: whether to exchange rows, and whether to prove that who loads a
        sample makes no difference. The 1st, 2nd, 4th, 8th ... batch is a proof.
        """
        self._asked += 1
        proving = self.ranks > 1 and not self._asked & (self._asked - 1)
        if self._forced and not self.exchanging:
            return False, False
        return self.exchanging or proving, proving

    def force(self, *, exchanging: bool) -> None:
        """There is no choice: samples cannot travel, or do depend on who loads them."""
        self.exchanging, self._forced = exchanging, True

    def learn(self, count: int, seconds: float, nbytes: int) -> None:
        """A batch of `count` samples took all ranks together `seconds` to load."""
        if not count:
            return
        self._tried += 1
        self._seconds = min(self._seconds, seconds / count)
        self._bytes = max(self._bytes, nbytes / count)
        if self._tried == _TRIED and not self._forced:
            loading = self._seconds * count / max(1, self.workers)
            self.exchanging = is_exchange_faster(
                loading, int(self._bytes * count), count, self.ranks
            )


def is_exchange_faster(seconds: float, nbytes: int, count: int, ranks: int) -> bool:
    """Whether a rank that loads its part of a batch saves more than it costs to exchange it.

    Args:
        seconds: to load all of the batch.
        nbytes: of the batch.
        count: the samples of the batch.
        ranks: among how many they are divided.
    """
    most = -(-count // ranks)  # one rank's, and the others wait for it
    saved = seconds * (1 - most / count)
    return saved > _SECONDS_PER_EXCHANGE + nbytes * _SECONDS_PER_BYTE
