"""How ranks wait for each other: one word per rank in shared memory, and no lock.

Each rank counts its turns. To meet, it writes (turn, tag of the call) into its own word and waits
until every other word has come so far. A word is 8 aligned bytes, which x86-64 writes and reads
whole and in program order; other processors promise less, and Python has no fences, so there the
backend is not used (docs/shm.md).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from instep.distributed.errors import (
    CollectiveTimeoutError,
    DisagreementError,
    PeerDiedError,
    PeerGaveUpError,
    PeerLeftError,
)
from instep.distributed.shm.memory.peers import Peer
from instep.distributed.shm.signature import TAG_BITS, Call

BYTES_PER_RANK = 1024
_WORDS = BYTES_PER_RANK // 8
_STATE, _TEXT_TURN = 1, 2  # words of a rank beside word 0
_CALL, _REASON = slice(128, 384), slice(384, BYTES_PER_RANK)  # a rank's texts, in bytes
_LEFT, _GAVE_UP = 1, 2

_SPINS = 400
_YIELD_SECONDS = 0.002
_SLEEP_SECONDS = (0.00005, 0.001)
_LATE_SECONDS, _SLEEP_SHARE, _LONGEST_SLEEP_SECONDS = 1.0, 0.05, 0.2
"""Later a wait sleeps for a share of its time, until a watcher knows it by using no processor."""
_LOOK_SECONDS = 0.1
_DESCRIBE_SECONDS = 5.0


class Signals:
    """This rank's word, and its view of all others'."""

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
        self._peers = peers
        self._mine = rank * _WORDS
        self._others = [other * _WORDS for other in range(len(peers)) if other != rank]
        self._default_timeout = default_timeout
        self.turn = 0
        """How often the ranks have met, or are about to."""
        crowded = len(peers) > len(os.sched_getaffinity(0))
        self._spins = 0 if crowded else _SPINS

    @property
    def ranks(self) -> list[int]:
        """Who meets here: ranks of the whole job."""
        return [peer.rank for peer in self._peers]

    def meet(self, call: Call, timeout: timedelta | None = None) -> None:
        """Return when every rank has come to this turn with the same call.

        What a rank wrote to shared memory before, every rank sees after. Raises PeerDiedError,
        PeerLeftError, PeerGaveUpError, CollectiveTimeoutError or DisagreementError.
        """
        self.turn += 1
        word = self.turn << TAG_BITS | call.tag
        words = self._words
        words[self._mine] = word
        for place in self._others:
            if words[place] != word:
                self._wait(place, word, call, timeout)

    def leave(self) -> None:
        """Tell whoever still waits for this rank that it will not come."""
        self._words[self._mine + _STATE] = _LEFT

    def give_up(self, why: str) -> None:
        """Tell whoever still waits for this rank that an error stopped it."""
        self._write(_REASON, why)
        self._words[self._mine + _STATE] = _GAVE_UP

    def _wait(self, place: int, word: int, call: Call, timeout: timedelta | None) -> None:
        words = self._words
        for _ in range(self._spins):
            if words[place] == word:
                return
        began = time.monotonic()
        sleep, longest = _SLEEP_SECONDS
        look = began + _LOOK_SECONDS
        while not self._has_come(place, word, call):
            now = time.monotonic()
            if now - began < _YIELD_SECONDS:
                os.sched_yield()
                continue
            time.sleep(sleep)
            if now - began > _LATE_SECONDS:
                longest = min((now - began) * _SLEEP_SHARE, _LONGEST_SLEEP_SECONDS)
            sleep = min(sleep * 1.2, longest)
            if now >= look:
                look = now + _LOOK_SECONDS
                self._look(word, call, now - began, timeout)

    def _has_come(self, place: int, word: int, call: Call) -> bool:
        seen = self._words[place]
        if seen == word:
            return True
        turn = word >> TAG_BITS
        if seen >> TAG_BITS == turn:
            raise self._disagreement(turn, call)
        # A rank can be one turn ahead: it has then found this rank's word equal to its own.
        return seen >> TAG_BITS > turn

    def _look(self, word: int, call: Call, waited: float, timeout: timedelta | None) -> None:
        """Has anybody who is missing died, left or given up, or is the time over?"""
        turn = word >> TAG_BITS
        missing = [
            other
            for other, place in enumerate(range(0, len(self._words), _WORDS))
            if self._words[place] >> TAG_BITS < turn
        ]
        for other in missing:
            peer, state = self._peers[other], self._words[other * _WORDS + _STATE]
            alive = peer.is_alive()
            if self._words[other * _WORDS] >> TAG_BITS >= turn:
                continue  # it came while this rank looked
            if state == _GAVE_UP:
                raise PeerGaveUpError(str(peer), call.text, self._read(_REASON, other))
            if state == _LEFT:
                raise PeerLeftError(str(peer), call.text, peer.rank)
            if not alive:
                raise PeerDiedError(str(peer), call.text, peer.rank)
        limit = (timeout or self._default_timeout()).total_seconds()
        if waited > limit:
            raise CollectiveTimeoutError([str(self._peers[o]) for o in missing], call.text, limit)

    def _disagreement(self, turn: int, call: Call) -> DisagreementError:
        """Collect what every rank does at this turn; whoever disagrees writes it down."""
        self._write(_CALL, call.text)
        self._words[self._mine + _TEXT_TURN] = turn
        seen: dict[str, list[int]] = {}
        deadline = time.monotonic() + _DESCRIBE_SECONDS
        for other, peer in enumerate(self._peers):
            place = other * _WORDS + _TEXT_TURN
            while self._words[place] != turn and peer.is_alive() and time.monotonic() < deadline:
                time.sleep(0.001)
            said = self._words[place] == turn
            text = self._read(_CALL, other) if said else "something else"
            seen.setdefault(text, []).append(peer.rank)
        return DisagreementError(
            "which collective comes next",
            seen,
            "Every rank must call the same collectives in the same order, with equal sizes.",
        )

    def _write(self, where: slice, text: str) -> None:
        room = where.stop - where.start
        self._part(self._rank)[where] = text.encode()[:room].ljust(room, b"\0")

    def _read(self, where: slice, other: int) -> str:
        return bytes(self._part(other)[where]).rstrip(b"\0").decode(errors="replace")

    def _part(self, rank: int) -> memoryview:
        return self._bytes[rank * BYTES_PER_RANK : (rank + 1) * BYTES_PER_RANK]
