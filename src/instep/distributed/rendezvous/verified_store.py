"""A store whose values only the ranks of this job can write.

Any process that reaches a TCPStore's port may set any key: torch's has no password. Here a value
follows a signature of itself and its key; a value without the right signature is an error. A
counter (`add`) has none: a stranger may change it, which causes an error or a wait, but not
a wrong value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from instep.distributed.errors import PeerLeftError
from instep.distributed.identity.authentication import sign, verify
from instep.process.torch_private.distributed import quiet_log

P = ParamSpec("P")
T = TypeVar("T")


def poll_interval(waited: float) -> float:
    """Seconds between two looks at a store for a key for which so many were waited already.

    A wait with a timeout would do, but torch's store prints two warnings at each timeout.
    """
    return min(0.2, max(0.001, waited / 10))


class VerifiedStore(dist.Store):
    """`store`, with values that are signed with `key`.

    Keep a reference as long as torch may use it: C++ calls these methods, but does not keep the
    Python object. Reading raises AuthenticationError for a value that was written without the key.
    `referenced` is such an object below `store`: it lives as long as this one. `keeper` is the rank
    whose process keeps the store, where that is known: if it has ended, calls raise PeerLeftError.
    """

    def __init__(
        self,
        store: dist.Store,
        key: bytes,
        referenced: dist.Store | None = None,
        keeper: int | None = None,
    ) -> None:
        super().__init__()
        self._keeper = keeper
        self.underlying_store = store
        self._reference = referenced
        self._key = key

    def set(self, key: str, value: str | bytes) -> None:
        """Write it."""
        self._call(self.underlying_store.set, key, self._sign(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for it, and read it."""
        value = self._call(self.underlying_store.get, key)
        return verify(self._key, value, key)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several."""
        signed = [self._sign(key, value) for key, value in zip(keys, values, strict=True)]
        below: Any = self.underlying_store  # torch's stubs do not know of it
        self._call(below.multi_set, list(keys), signed)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read several."""
        values = self._call(self.underlying_store.multi_get, list(keys))
        return [verify(self._key, value, key) for key, value in zip(keys, values, strict=True)]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write `desired` if the value is `expected`, or if both are empty; returns the value."""
        before: Any = self._sign(key, expected) if expected else ""
        after: Any = self._sign(key, desired)
        value = self._call(self.underlying_store.compare_set, key, before, after)
        return verify(self._key, value, key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is not signed."""
        return self._call(self.underlying_store.add, key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set; the values are not verified."""
        return self._call(self.underlying_store.check, list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set; the values are not verified."""
        self._call(self.underlying_store.wait, list(keys), timeout or self.timeout)

    def delete_key(self, key: str) -> bool:
        """Whether it was set."""
        return self._call(self.underlying_store.delete_key, key)

    def num_keys(self) -> int:
        """The number of keys."""
        return self._call(self.underlying_store.num_keys)

    def has_extended_api(self) -> bool:
        """No append and no queues: parts of a value cannot have one signature."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """The limit for `get` and `wait`."""
        self.underlying_store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """The timeout of the underlying store."""
        below: Any = self.underlying_store  # torch's stubs do not know of it
        timeout: timedelta = below.timeout
        return timeout

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - what torch's C++ looks for

    def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the store below."""
        try:
            with quiet_log():
                return function(*args, **kwargs)
        except dist.DistNetworkError:
            if self._keeper is None:
                raise
        raise PeerLeftError(f"rank {self._keeper}", "a store that it keeps", self._keeper)

    def _sign(self, key: str, value: str | bytes) -> bytes:
        return sign(self._key, value.encode() if isinstance(value, str) else bytes(value), key)
