"""A barrier without locks: one word per rank in shared memory.

Each rank counts its barriers. In a barrier it writes (sequence number, tag of the collective) into
its own word and waits until every other word has the same sequence number. A word is 8 aligned
bytes, which x86-64 writes and reads whole and in program order; other processors promise less, and
Python has no fences, so there the backend is not used (docs/shm.md).
"""

from __future__ import annotations

import ctypes
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

import torch

from instep.distributed.errors import (
    CollectiveTimeoutError,
    DisagreementError,
    PeerDiedError,
    PeerGaveUpError,
    PeerLeftError,
)
from instep.distributed.flight_record.recorder import recorder
from instep.distributed.shm.memory.peers import Peer
from instep.process.exit_status import group_ranks

BYTES_PER_RANK = 1280
_WORDS = BYTES_PER_RANK // 8
_STATE, _TEXT_SEQUENCE = 1, 2  # words of a rank beside word 0
_SIGNATURE, _REASON = slice(128, 512), slice(512, BYTES_PER_RANK)  # a rank's texts, in bytes
_LEFT, _ABORTED = 1, 2

_SPINS = 400
"""So often a waiting rank looks at a word before it gives the core away."""
_YIELD_SECONDS = 0.002
"""It yields the core for so long; then it sleeps."""
_LOST_SECONDS, _LOST_TIMES, _BUSY_SECONDS = 0.0002, 20, 1.0
"""A yield that takes so long has lost the core to another process: a yield gives away a whole time
slice (milliseconds), a sleep ends when it should. The rank then sleeps instead of yielding for so
many times as long, and for twice as long whenever it soon loses the core again, up to a second."""
_SLEEP_SECONDS = (0.00005, 0.001)
"""The first sleep, and the longest in a wait that is not late."""
_LATE_SECONDS, _SLEEP_SHARE, _LONGEST_SLEEP_SECONDS = 1.0, 0.05, 0.2
"""A long wait sleeps for a share of its time so far, so that the watcher sees an idle process."""
_PR_SET_TIMERSLACK = 29
_CHECK_SECONDS = 0.1
"""How often a waiting rank looks whether the missing ones still live."""
_DESCRIBE_SECONDS = 20.0
"""How long ranks that disagree wait for each other's texts."""
TAG_BITS = 24
"""Of a word, those of the tag; the sequence number is above them."""


@dataclass(frozen=True)
class CollectiveSignature:
    """The properties of a collective that must be equal on all ranks."""

    text: str
    """For people: "all_reduce(SUM, float32, 1024 elements)"."""
    tag: int
    """A hash of the text in TAG_BITS bits, the same in every process."""


@lru_cache(maxsize=4096)
def signature_of(
    name: str,
    dtype: torch.dtype | None = None,
    numel: int = 0,
    op: str = "",
    root: int | None = None,
) -> CollectiveSignature:
    """The signature of the collective `name`; `numel`: the number of elements of each rank."""
    words = [op] if op else []
    if dtype is not None:
        words += [str(dtype).removeprefix("torch."), f"{numel} element{'s' * (numel != 1)}"]
    if root is not None:
        words.append(f"root {root}")
    text = f"{name}({', '.join(words)})" if words else name
    return CollectiveSignature(text, zlib.crc32(text.encode()) & ((1 << TAG_BITS) - 1))


class Signals:
    """The words of all ranks; this rank writes its own one only."""

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        peers: Sequence[Peer],
        default_timeout: Callable[[], timedelta],
    ) -> None:
        self._bytes = memory[: BYTES_PER_RANK * len(peers)]
        self._words = self._bytes.cast("q")
        self._rank = rank
        self.peers = peers
        self._own = rank * _WORDS
        self._others = [other * _WORDS for other in range(len(peers)) if other != rank]
        self.default_timeout = default_timeout
        self.describe: Callable[[], str] = str
        """The collective that runs now, with the script's line."""
        self.sequence = 0
        """The number of barriers that this rank has entered."""
        crowded = len(peers) > len(os.sched_getaffinity(0))
        self._spins = 0 if crowded else _SPINS
        self._busy_until = self._busy_seconds = 0.0
        # Linux may lengthen a thread's sleeps by its timer slack: 50 microseconds by default.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    @property
    def ranks(self) -> list[int]:
        """The members, as ranks of the whole job."""
        return [peer.rank for peer in self.peers]

    def barrier(self, signature: CollectiveSignature, timeout: timedelta | None = None) -> None:
        """Return when every rank has entered this barrier with the same signature.

        All ranks then see what any rank wrote to shared memory before it. Raises PeerDiedError,
        PeerLeftError, PeerGaveUpError, CollectiveTimeoutError or DisagreementError.
        """
        self.sequence += 1
        word = self.sequence << TAG_BITS | signature.tag
        words = self._words
        words[self._own] = word
        for index in self._others:
            if words[index] != word:
                self._wait(index, word, signature, timeout)

    def leave(self) -> None:
        """Tell ranks that still wait for this one that it has left."""
        self._words[self._own + _STATE] = _LEFT

    def abort(self, why: str) -> None:
        """Tell ranks that still wait for this one that an error stopped it."""
        self._write(_REASON, why)
        self._words[self._own + _STATE] = _ABORTED

    def _wait(
        self, index: int, word: int, signature: CollectiveSignature, timeout: timedelta | None
    ) -> None:
        words = self._words
        for _ in range(self._spins):
            if words[index] == word:
                return
        began = time.monotonic()
        yields_until = began + _YIELD_SECONDS if began > self._busy_until else began
        sleep, longest = _SLEEP_SECONDS
        next_check = began + _CHECK_SECONDS
        while not self._has_arrived(index, word, signature):
            now = time.monotonic()
            if now < yields_until:
                os.sched_yield()
                if (lost := time.monotonic() - now) > _LOST_SECONDS:
                    yields_until = now
                    self._note_loss(now, lost)
                continue
            time.sleep(sleep)
            if now - began > _LATE_SECONDS:
                longest = min((now - began) * _SLEEP_SHARE, _LONGEST_SLEEP_SECONDS)
            sleep = min(sleep * 1.2, longest)
            if now >= next_check:
                next_check = now + _CHECK_SECONDS
                self._check_peers(word, signature, now - began, timeout)

    def _note_loss(self, now: float, lost: float) -> None:
        """Another process had the core for `lost` seconds."""
        is_soon = now - self._busy_until < self._busy_seconds
        busy = 2 * self._busy_seconds if is_soon else _LOST_TIMES * lost
        self._busy_seconds = min(busy, _BUSY_SECONDS)
        self._busy_until = now + self._busy_seconds

    def _has_arrived(self, index: int, word: int, signature: CollectiveSignature) -> bool:
        seen = self._words[index]
        if seen == word:
            return True
        sequence = word >> TAG_BITS
        if seen >> TAG_BITS == sequence:
            raise self._disagreement(sequence, signature)
        # A rank can be one barrier ahead: it has then seen this rank's word equal to its own.
        return seen >> TAG_BITS > sequence

    def _check_peers(
        self, word: int, signature: CollectiveSignature, waited: float, timeout: timedelta | None
    ) -> None:
        """Raise an error if a missing rank has died, left or aborted, or after the timeout."""
        sequence = word >> TAG_BITS
        missing = [
            other
            for other, index in enumerate(range(0, len(self._words), _WORDS))
            if self._words[index] >> TAG_BITS < sequence
        ]
        for other in missing:
            # In this order: nothing changes after a death, and no rank arrives after it has left.
            peer = self.peers[other]
            alive = peer.is_alive()
            state = self._words[other * _WORDS + _STATE]
            if self._words[other * _WORDS] >> TAG_BITS >= sequence:
                continue  # it arrived in the meantime
            if state == _ABORTED:
                raise PeerGaveUpError(str(peer), signature.text, self._read(_REASON, other))
            if state == _LEFT:
                raise PeerLeftError(str(peer), signature.text, peer.rank, self.describe())
            if not alive:
                raise PeerDiedError(str(peer), signature.text, peer.rank)
        limit = (timeout or self.default_timeout()).total_seconds()
        if waited > limit:
            raise CollectiveTimeoutError(
                [str(self.peers[o]) for o in missing], signature.text, limit
            )

    def _disagreement(self, sequence: int, signature: CollectiveSignature) -> DisagreementError:
        """The error that shows every rank's signature; each rank writes its own for the others."""
        recorder.set_reported()
        self._write(_SIGNATURE, self.describe() or signature.text)
        self._words[self._own + _TEXT_SEQUENCE] = sequence
        texts: dict[int, str] = {}
        deadline = time.monotonic() + _DESCRIBE_SECONDS
        for other, peer in enumerate(self.peers):
            index = other * _WORDS + _TEXT_SEQUENCE
            waits = True
            while not (known := self._words[index] == sequence) and waits:
                time.sleep(0.001)
                # Asked before the last look: a peer may describe its collective and end at once.
                waits = peer.is_alive() and time.monotonic() < deadline
            texts[peer.rank] = self._read(_SIGNATURE, other) if known else "something else"
        return DisagreementError.of_collectives(group_ranks(texts))

    def _write(self, field: slice, text: str) -> None:
        length = field.stop - field.start
        self._section(self._rank)[field] = text.encode()[:length].ljust(length, b"\0")

    def _read(self, field: slice, other: int) -> str:
        return bytes(self._section(other)[field]).rstrip(b"\0").decode(errors="replace")

    def _section(self, rank: int) -> memoryview:
        return self._bytes[rank * BYTES_PER_RANK : (rank + 1) * BYTES_PER_RANK]
