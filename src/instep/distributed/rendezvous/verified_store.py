"""A store whose values only the ranks of this job can write.

Whoever reaches a TCPStore's port may set any key: torch's has no password. Here a value stands
behind a mark over itself and its key; what bears no right mark is an error. A counter (`add`)
bears none: a stranger may spoil it, which costs an error or a wait, and never decides what is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from instep.distributed.identity.authentication import sign, verify


class VerifiedStore(dist.Store):
    """`store`, with what its values say guaranteed by `key`.

    Keep a reference as long as torch may use it: C++ calls these methods, but does not keep the
    Python object. Reading raises AuthenticationError for a value that was written without the key.
    """

    def __init__(self, store: dist.Store, key: bytes) -> None:
        super().__init__()
        self.underlying_store = store
        self._key = key

    def set(self, key: str, value: str | bytes) -> None:
        """Write it."""
        self.underlying_store.set(key, self._marked(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for it, and read it."""
        return verify(self._key, self.underlying_store.get(key), key)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read several."""
        values = self.underlying_store.multi_get(list(keys))
        return [verify(self._key, value, key) for key, value in zip(keys, values, strict=True)]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write `desired` if there is `expected`, or nothing where that is empty; what is there."""
        before: Any = self._marked(key, expected) if expected else ""
        after: Any = self._marked(key, desired)
        return verify(self._key, self.underlying_store.compare_set(key, before, after), key)

    def add(self, key: str, amount: int) -> int:
        """Count; not verified."""
        return self.underlying_store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there, whoever wrote them."""
        return self.underlying_store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all are there, whoever wrote them."""
        self.underlying_store.wait(list(keys), timeout or self.timeout)

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        return self.underlying_store.delete_key(key)

    def num_keys(self) -> int:
        """How many there are."""
        return self.underlying_store.num_keys()

    def has_extended_api(self) -> bool:
        """Not append and queues: parts of a value cannot bear one mark."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait."""
        self.underlying_store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """As the store below has it."""
        below: Any = self.underlying_store  # torch's stubs do not know of it
        timeout: timedelta = below.timeout
        return timeout

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - what torch's C++ looks for

    def _marked(self, key: str, value: str | bytes) -> bytes:
        return sign(self._key, value.encode() if isinstance(value, str) else bytes(value), key)
