"""Rank 0 does something for all ranks, and the others get its value or its exception.

This is no collective: rank 0 does not wait for a rank that never asks. A rank that asks for
something waits until rank 0 comes to it, since outside of `rank_local` all ranks take the same
path. It raises an error if rank 0 does something else.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from instep.distributed.communication.rank_local import is_rank_local, rank_local
from instep.distributed.errors import CollectiveTimeoutError, DisagreementError
from instep.process import in_main_thread, settings
from instep.unedited.errors import UneditedError

T = TypeVar("T")

_FIRST_INTERVAL, _LONGEST_INTERVAL = 0.0005, 0.05
"""Seconds between two looks at the store: they double from the first to the longest."""
WAIT_SECONDS = 60.0
"""For which rank 0 waits for the others before it changes what they may still look at."""
MESSAGE_BYTES = 1 << 20
"""The size of one message; the store refuses messages above 8 MiB."""


class FileSync(Protocol):
    """Passes the state of rank 0's files on to the other ranks, while all ranks wait."""

    def capture(self) -> Any:
        """On rank 0: what the others have to know of its files. It must pickle."""

    def apply(self, state: Any) -> None:
        """On another rank: go on with the files as rank 0 has them."""


class Relay:
    """Numbered messages from rank 0, in the order in which the script asks for them."""

    def __init__(self, store: dist.Store, rank: int, size: int, name: str = "relay") -> None:
        self._store = dist.PrefixStore(name, store)  # verified, because values are unpickled
        self._rank, self._size = rank, size
        self._number = 0
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._channels: dict[str, Relay] = {}
        self.before_waiting: Callable[[], None] = lambda: None
        """Called on rank 0, in an operation for which it waits for the others."""
        self.has_timeout = True
        """Whether the other ranks wait only INSTEP_TIMEOUT for rank 0 to come to an operation."""

    def close(self) -> None:
        """Release the store: from now on every rank does everything by itself."""
        for relay in (self, *self._channels.values()):
            relay._process = -1
        self._channels.clear()
        del self._store

    def channel(self, name: str) -> Relay:
        """The relay of this name, which numbers its own messages in an order of their own."""
        with self._lock:
            if name not in self._channels:
                channel = Relay(self._store, self._rank, self._size, name)
                channel._process = self._process
                channel.before_waiting = self.before_waiting
                self._channels[name] = channel
            return self._channels[name]

    @property
    def is_rank0(self) -> bool:
        """Whether this is the rank that does it for all ranks."""
        return self._rank == 0

    def is_replicated(self) -> bool:
        """Whether this is the rank's own process and not rank-local: all ranks do the same."""
        return os.getpid() == self._process and not is_rank_local()

    def is_first(self, name: str, seconds: float) -> bool:
        """Whether no rank has asked this of this name before. Another rank than 0 lets rank 0 be
        the first if it asks within these seconds."""
        key = f"first/{name}"
        with suppress(RuntimeError):  # rank 0, which keeps the store, may have ended
            if self._rank != 0 and seconds and self._wait([key], seconds):
                return False
            return int(self._store.add(key, 1)) == 1
        return False

    def is_ordered(self) -> bool:
        """Whether all ranks come here in the same order: `is_replicated`, in the main thread."""
        return self.is_replicated() and in_main_thread()

    def run_on_rank0(
        self,
        name: str,
        function: Callable[[], T],
        detail: str = "",
        *,
        wait_first: bool = False,
        sync: FileSync | None = None,
    ) -> T:
        """The value of `function()`, or its exception, on rank 0. It must pickle.

        Args:
            name: of the operation, for messages.
            function: called on rank 0 only.
            detail: what the operation is about, which must be the same on all ranks.
            wait_first: whether rank 0 waits for the others before it starts, because it may change
                files which they must not see changed before they come here too.
            sync: rank 0 waits for the others when it is done, and goes on when they have applied
                the state of its files.

        Raises DisagreementError if rank 0 does something else, and UneditedError if the value does
        not pickle.
        """
        if self._rank == 0 and (wait_first or sync is not None):
            self.before_waiting()
            if self._process == -1:  # closed: there are no others any more
                with rank_local():
                    return function()
        with self._lock:
            self._number += 1
            step = f"{self._number}/"
        if self._rank == 0:
            return self._run_and_send(step, name, function, detail, wait_first, sync)
        value: T = self._receive(step, name, detail, sync)
        return value

    # ------------------------------------------------------------------------------- rank 0

    def _run_and_send(
        self,
        step: str,
        name: str,
        function: Callable[[], T],
        detail: str,
        wait_first: bool,
        sync: FileSync | None,
    ) -> T:
        self._store.set(f"{step}started", f"{name}\0{detail}")
        if wait_first:
            self._wait_for_others(step)
        try:
            with rank_local():
                value = function()
            message = _pickle_value(name, value)
        except Exception as error:
            self._send(step, _pickle_error(error), sync)
            raise
        except BaseException as error:  # the others, interrupted too, may have left this step
            self._send(step, _pickle_error(error), None)
            raise
        self._send(step, message, sync)
        return value

    def _wait_for_others(self, step: str) -> None:
        self._wait([f"{step}here{rank}" for rank in range(1, self._size)], WAIT_SECONDS)

    def _send(self, step: str, message: bytes, sync: FileSync | None) -> None:
        if sync is None:
            self._send_parts(step, pickle.dumps((message, False, None)))
            return
        self._wait_for_others(step)
        self._send_parts(step, pickle.dumps((message, True, sync.capture())))
        if self._wait([f"{step}applied"], WAIT_SECONDS):
            self._store.delete_key(f"{step}applied")

    def _send_parts(self, step: str, message: bytes) -> None:
        starts = range(0, len(message), MESSAGE_BYTES)
        for number, start in enumerate(starts):
            part = message[start : start + MESSAGE_BYTES]
            self._store.set(f"{step}part{number}", part)  # type: ignore[arg-type]  # says str
        self._store.set(f"{step}done", str(len(starts)))

    # ------------------------------------------------------------------------ the other ranks

    def _receive(self, step: str, name: str, detail: str, sync: FileSync | None) -> Any:
        self._store.set(f"{step}here{self._rank}", "")
        self._check_operation(f"{step}started", name, detail)
        self._wait([f"{step}done"], None)
        parts = [f"{step}part{n}" for n in range(int(self._store.get(f"{step}done")))]
        message, synchronizes, state = pickle.loads(b"".join(map(self._store.get, parts)))
        if synchronizes and sync is not None:
            sync.apply(state)
        self._acknowledge(step, parts, synchronizes=synchronizes)
        value, error = pickle.loads(message)
        if error is not None:
            raise error
        return value

    def _acknowledge(self, step: str, parts: list[str], *, synchronizes: bool) -> None:
        """The last rank that has received a message deletes it, and tells a rank 0 that waits."""
        if self._store.add(f"{step}received", 1) < self._size - 1:
            return
        here = [f"{step}here{rank}" for rank in range(1, self._size)]
        for key in (f"{step}started", f"{step}done", f"{step}received", *parts, *here):
            self._store.delete_key(key)
        if synchronizes:
            self._store.set(f"{step}applied", "")

    def _check_operation(self, key: str, name: str, detail: str) -> None:
        seconds = settings.timeout().total_seconds()
        if not self._wait([key], seconds if self.has_timeout else None):
            raise CollectiveTimeoutError(["rank 0"], name, seconds)
        name0, _, detail0 = self._store.get(key).decode().partition("\0")
        if name0 != name:
            raise self._disagreement(name0, name)
        if _without_process_names(detail0) != _without_process_names(detail):
            raise self._disagreement(f"{name} {detail0}", f"{name} {detail}")

    def _disagreement(self, on_rank0: str, here: str) -> DisagreementError:
        return DisagreementError(
            "what comes next",
            {on_rank0: [0], here: [self._rank]},
            "Something that differs between processes (time, process id, host name) decides "
            "in this script; start it with --plain.",
        )

    def _wait(self, keys: list[str], seconds: float | None) -> bool:
        """Wait until all keys are set; False after that many seconds."""
        interval, start = _FIRST_INTERVAL, time.monotonic()
        while not self._store.check(keys):
            if seconds is not None and time.monotonic() - start > seconds:
                return False
            time.sleep(interval)
            interval = min(2 * interval, _LONGEST_INTERVAL)
        return True


def _without_process_names(detail: str) -> str:
    """A command without what may differ between processes: words with digits in them (a time, a
    process id, a uuid), and the names that tempfile draws."""
    return re.sub(r"tmp[a-z0-9_]{8}|[\w.:+-]*\d[\w.:+-]*", "*", detail)


def _pickle_value(name: str, value: object) -> bytes:
    try:
        return pickle.dumps((value, None))
    except Exception as error:  # raised by the value's own __reduce__
        raise UneditedError(
            f"rank 0 did this for all ranks: {name}; but its result, a value of type "
            f"{type(value).__name__}, cannot be sent to the others: {error}. Let it return text, "
            "bytes or plain values, or run this script with one rank (-n 1), or with --plain."
        ) from error


def _pickle_error(error: BaseException) -> bytes:
    try:
        pickled = pickle.dumps((None, error))
        pickle.loads(pickled)
    except Exception:  # the same, and raised by its class for the arguments
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return pickled
