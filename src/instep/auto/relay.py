"""What rank 0 does for all: it does it, and tells the others what came of it.

Not a collective: rank 0 waits for nobody who does not come. A rank that asks for what rank 0 has
not come to waits, since outside of `apart` all ranks take the same path; it says so when rank 0
does something else.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from instep import knobs
from instep.communication.apart import apart, is_apart
from instep.errors import CollectiveTimeoutError, DisagreementError

T = TypeVar("T")

_FIRST, _LONGEST = 0.0005, 0.05
"""Seconds between two looks: they double from the first to the longest."""
PATIENCE = 60.0
"""Seconds that rank 0 waits for the others before it changes what they may still look at."""


class Relay:
    """Numbered messages from rank 0, in the order in which the script asks for them."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = dist.PrefixStore("told", store)
        self._rank, self._size = rank, size
        self._number = 0
        self._process = os.getpid()

    def close(self) -> None:
        """Let go of the store: whatever comes, nobody is told."""
        self._process = -1
        del self._store

    def reaches_here(self) -> bool:
        """Whether all ranks come to this place: the main thread, not apart, in the rank itself."""
        return (
            os.getpid() == self._process
            and threading.current_thread() is threading.main_thread()
            and not is_apart()
        )

    def once(self, kind: str, do: Callable[[], T], detail: str = "", *, changes: bool = False) -> T:
        """The value of `do()`, or its exception, on rank 0. It must pickle.

        `changes`: it may change files, which the others shall not see before they come here too.
        A rank whose `detail` is another one does it by itself: the time in a name, perhaps.
        Raises DisagreementError where rank 0 does something of another kind.
        """
        self._number += 1
        begun, done = f"{self._number}/begun", f"{self._number}/done"
        if self._rank == 0:
            self._store.set(begun, f"{kind}\0{detail}")
            if changes:
                self._wait_for_the_others()
            return self._do_and_tell(done, do)
        if changes:
            self._store.set(f"{self._number}/here{self._rank}", "")
        if self._what_rank_0_does(begun, kind) != detail:
            with apart():
                return do()
        self._wait(done, None)
        value: T = _unpacked(self._store.get(done))
        return value

    def _wait_for_the_others(self) -> None:
        others = [f"{self._number}/here{rank}" for rank in range(1, self._size)]
        with suppress(dist.DistStoreError):
            self._store.wait(others, timedelta(seconds=PATIENCE))

    def _do_and_tell(self, done: str, do: Callable[[], T]) -> T:
        try:
            with apart():
                value = do()
        except Exception as error:
            self._tell(done, _packed(error))
            raise
        self._tell(done, pickle.dumps((value, None)))
        return value

    def _tell(self, key: str, message: bytes) -> None:
        self._store.set(key, message)  # type: ignore[arg-type]  # the stub knows only str

    def _what_rank_0_does(self, begun: str, kind: str) -> str:
        """Its detail."""
        if not self._wait(begun, float(int(knobs.TIMEOUT))):
            raise CollectiveTimeoutError(["rank 0"], kind, float(int(knobs.TIMEOUT)))
        theirs, _, detail = self._store.get(begun).decode().partition("\0")
        if theirs != kind:
            raise DisagreementError(
                "what comes next",
                {theirs: [0], kind: [self._rank]},
                "Something that differs between processes (time, process id, host name) decides "
                "in this script; start it with --plain.",
            )
        return detail

    def _wait(self, key: str, seconds: float | None) -> bool:
        pause, begun = _FIRST, time.monotonic()
        while not self._store.check([key]):
            if seconds is not None and time.monotonic() - begun > seconds:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return True


def _packed(error: Exception) -> bytes:
    try:
        return pickle.dumps((None, error))
    except (pickle.PicklingError, TypeError, AttributeError):
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))


def _unpacked(message: bytes) -> Any:
    value, error = pickle.loads(message)
    if error is not None:
        raise error
    return value
