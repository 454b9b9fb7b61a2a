"""What rank 0 does for all: it does it, and tells the others what came of it.

Not a collective: rank 0 waits for nobody who does not come. A rank that asks for what rank 0 has
not come to waits, since outside of `apart` all ranks take the same path; it says so when rank 0
does something else.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from instep.distributed.communication.rank_local import is_rank_local, rank_local
from instep.distributed.errors import CollectiveTimeoutError, DisagreementError
from instep.process import settings
from instep.unedited.errors import UneditedError

T = TypeVar("T")

_FIRST, _LONGEST = 0.0005, 0.05
"""Seconds between two looks: they double from the first to the longest."""
PATIENCE = 60.0
"""Seconds that rank 0 waits for the others before it changes what they may still look at."""
PIECE = 1 << 20
"""Bytes of one message of the store's, which refuses those above 8 MiB."""


class Moment(Protocol):
    """What becomes of the ranks' files at a moment to which all of them come."""

    def opened(self) -> Any:
        """On rank 0, while the others wait: what they have to know of its files. It must pickle."""

    def enter(self, told: Any) -> None:
        """On another rank, while rank 0 waits: go on with the files as rank 0 has them."""


class Relay:
    """Numbered messages from rank 0, in the order in which the script asks for them."""

    def __init__(self, store: dist.Store, rank: int, size: int, name: str = "told") -> None:
        self._store = dist.PrefixStore(name, store)  # verified, as what is told is unpickled
        self._rank, self._size = rank, size
        self._number = 0
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._lanes: dict[str, Relay] = {}

    def close(self) -> None:
        """Let go of the store: whatever comes, nobody is told."""
        self._process = -1
        self._lanes.clear()
        del self._store

    def lane(self, name: str) -> Relay:
        """The relay of this name, with numbers of its own: for what has an order of its own."""
        with self._lock:
            if name not in self._lanes:
                lane = Relay(self._store, self._rank, self._size, name)
                lane._process = self._process
                self._lanes[name] = lane
            return self._lanes[name]

    @property
    def does(self) -> bool:
        """Whether this is the rank that does it for all."""
        return self._rank == 0

    def is_of_this_process(self) -> bool:
        """Whether this is the rank itself, and not apart: then the others ask for the same."""
        return os.getpid() == self._process and not is_rank_local()

    def reaches_here(self) -> bool:
        """Whether all ranks come to this place: the main thread, not apart, in the rank itself."""
        return self.is_of_this_process() and threading.current_thread() is threading.main_thread()

    def once(
        self,
        kind: str,
        do: Callable[[], T],
        detail: str = "",
        *,
        together: bool = False,
        moment: Moment | None = None,
    ) -> T:
        """The value of `do()`, or its exception, on rank 0. It must pickle.

        `together`: rank 0 waits for the others first, because it may change files which they
        shall not see changed before they come here too. `moment`: it waits for them when it has
        done it, tells them what is to become of their files, and goes on when they are through.
        Raises DisagreementError where rank 0 does something else, and UneditedError where the
        value does not pickle.
        """
        with self._lock:
            self._number += 1
            step = f"{self._number}/"
        if self._rank == 0:
            return self._do_and_tell(step, kind, do, detail, together, moment)
        told: T = self._be_told(step, kind, detail, moment)
        return told

    # ------------------------------------------------------------------------------- rank 0

    def _do_and_tell(
        self,
        step: str,
        kind: str,
        do: Callable[[], T],
        detail: str,
        together: bool,
        moment: Moment | None,
    ) -> T:
        self._store.set(f"{step}begun", f"{kind}\0{detail}")
        if together:
            self._wait_for_the_others(step)
        try:
            with rank_local():
                value = do()
            message = _packed(kind, value)
        except Exception as error:
            self._tell(step, _packed_error(error), moment)
            raise
        except BaseException as error:  # the others, interrupted too, may have left this step
            self._tell(step, _packed_error(error), None)
            raise
        self._tell(step, message, moment)
        return value

    def _wait_for_the_others(self, step: str) -> None:
        self._wait([f"{step}here{rank}" for rank in range(1, self._size)], PATIENCE)

    def _tell(self, step: str, message: bytes, moment: Moment | None) -> None:
        if moment is None:
            self._send(step, pickle.dumps((message, False, None)))
            return
        self._wait_for_the_others(step)
        self._send(step, pickle.dumps((message, True, moment.opened())))
        if self._wait([f"{step}read"], PATIENCE):
            self._store.delete_key(f"{step}read")

    def _send(self, step: str, message: bytes) -> None:
        pieces = range(0, len(message), PIECE)
        for number, start in enumerate(pieces):
            piece = message[start : start + PIECE]
            self._store.set(f"{step}piece{number}", piece)  # type: ignore[arg-type]  # says str
        self._store.set(f"{step}done", str(len(pieces)))

    # ------------------------------------------------------------------------ the other ranks

    def _be_told(self, step: str, kind: str, detail: str, moment: Moment | None) -> Any:
        self._store.set(f"{step}here{self._rank}", "")
        self._check_what_rank_0_does(f"{step}begun", kind, detail)
        self._wait([f"{step}done"], None)
        pieces = [f"{step}piece{n}" for n in range(int(self._store.get(f"{step}done")))]
        message, waits, files = pickle.loads(b"".join(map(self._store.get, pieces)))
        if waits and moment is not None:
            moment.enter(files)
        self._taken(step, pieces, waits=waits)
        value, error = pickle.loads(message)
        if error is not None:
            raise error
        return value

    def _taken(self, step: str, pieces: list[str], *, waits: bool) -> None:
        """The last one who has read a message deletes it, and says so to a rank 0 that waits."""
        if self._store.add(f"{step}taken", 1) < self._size - 1:
            return
        here = [f"{step}here{rank}" for rank in range(1, self._size)]
        for key in (f"{step}begun", f"{step}done", f"{step}taken", *pieces, *here):
            self._store.delete_key(key)
        if waits:
            self._store.set(f"{step}read", "")

    def _check_what_rank_0_does(self, key: str, kind: str, detail: str) -> None:
        if not self._wait([key], float(int(settings.TIMEOUT))):
            raise CollectiveTimeoutError(["rank 0"], kind, float(int(settings.TIMEOUT)))
        theirs, _, other = self._store.get(key).decode().partition("\0")
        if theirs != kind:
            raise self._disagree(theirs, kind)
        if _without_names(other) != _without_names(detail):
            raise self._disagree(f"{kind} {other}", f"{kind} {detail}")

    def _disagree(self, theirs: str, mine: str) -> DisagreementError:
        return DisagreementError(
            "what comes next",
            {theirs: [0], mine: [self._rank]},
            "Something that differs between processes (time, process id, host name) decides "
            "in this script; start it with --plain.",
        )

    def _wait(self, keys: list[str], seconds: float | None) -> bool:
        """Until all keys are there, or for so many seconds; returns whether they are there."""
        pause, begun = _FIRST, time.monotonic()
        while not self._store.check(keys):
            if seconds is not None and time.monotonic() - begun > seconds:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return True


def _without_names(detail: str) -> str:
    """A command without what may differ between processes: words with digits in them (a time, a
    process id, a uuid), and the names that tempfile draws."""
    return re.sub(r"tmp[a-z0-9_]{8}|[\w.:+-]*\d[\w.:+-]*", "*", detail)


def _packed(kind: str, value: object) -> bytes:
    try:
        return pickle.dumps((value, None))
    except Exception as error:  # whatever the value's own __reduce__ raises
        raise UneditedError.cannot_tell(kind, type(value).__name__, str(error)) from error


def _packed_error(error: BaseException) -> bytes:
    try:
        packed = pickle.dumps((None, error))
        pickle.loads(packed)
    except Exception:  # the same; and what its class makes of its arguments
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return packed
