"""All-gather of few bytes between several hosts, by messages of their first ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store

from instep.distributed.shm.memory.signals import CollectiveSignature
from instep.distributed.shm.rank_connections import LONGEST_MESSAGE, CollectiveCall, connect

LONGEST_RESULT = LONGEST_MESSAGE
"""Bytes of all hosts together."""


class HostChannel:
    """The connections of the first rank of a host. One thread at a time may use them."""

    def __init__(
        self,
        store: Store,
        host: int,
        first_ranks: Sequence[int],
        default_timeout: Callable[[], timedelta],
        describe: Callable[[], str],
    ) -> None:
        """Connect. Collective over the first ranks of all hosts.

        `first_ranks` are ranks of the job; `describe`: the collective that runs now, with the
        script's line.
        """
        self._host, self._hosts, self._calls = host, len(first_ranks), 0
        self._default_timeout, self._describe = default_timeout, describe
        self._distances = [1 << k for k in range((self._hosts - 1).bit_length())]
        called = [(host - distance) % self._hosts for distance in self._distances]
        callers = [(host + distance) % self._hosts for distance in self._distances]
        seconds = default_timeout().total_seconds()
        self._to, self._from = connect(store, host, first_ranks, called, callers, seconds)

    def all_gather(
        self,
        mine: bytes,
        lengths: Sequence[int],
        signature: CollectiveSignature,
        timeout: timedelta | None,
    ) -> bytearray:
        """The bytes of all hosts, one after the other; `lengths`: how many each host has.

        J. Bruck et al.: Efficient Algorithms for All-to-All Communications in Multiport
        Message-Passing Systems, 1997. In round k each host sends what it knows to the host 2^k
        before it; H hosts need ceil(log2(H)) rounds. Raises PeerLeftError, PeerGaveUpError,
        DisagreementError or CollectiveTimeoutError.
        """
        self._calls += 1
        seconds = (timeout or self._default_timeout()).total_seconds()
        call = CollectiveCall(self._calls, signature, seconds, self._describe)
        hosts = self._hosts
        known: list[bytes | memoryview] = [mine]  # of this host and of those after it
        for distance in self._distances:
            before, after = (self._host - distance) % hosts, (self._host + distance) % hosts
            count = min(distance, hosts - distance)
            self._to[before].send(b"".join(known[:count]), call)
            their_lengths = [lengths[(after + k) % hosts] for k in range(count)]
            message = self._from[after].receive(sum(their_lengths), call)
            for length in their_lengths:
                known.append(message[:length])
                message = message[length:]
        begin = -self._host % hosts
        return bytearray().join(known[begin:] + known[:begin])

    def abort(self, why: str) -> None:
        """Leave for an error: a host that waits for this one gets to know it.

        What the others send is still taken, so that they come to the reason.
        """
        for connection in self._to.values():
            connection.abort(why)

    def close(self) -> None:
        """Leave: a host that waits for this one gets an error."""
        for connection in [*self._to.values(), *self._from.values()]:
            connection.close()
