"""Which rank reports that the script has failed: rank 0, if all ranks fail in the same way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from time import monotonic

import torch.distributed as dist

from instep.distributed.errors import AuthenticationError, DisagreementError
from instep.distributed.identity.world import World
from instep.distributed.watchdog import client
from instep.process import settings
from instep.process.failures.tracebacks import root_cause

WAIT_SECONDS = 1.5
"""If all ranks fail in the same way, rank 0 has reported it by then, unless it is behind:
it alone writes files and prints."""
LONGEST_WAIT_SECONDS = 30.0
"""For a rank 0 that waits for nobody: it may be writing to a slow disk or pipe."""
_POLL = 0.5
"""Seconds between two looks of each rank at rank 0's store."""
_FAILED, _NEVER = "failed", "never"


class FailureReports:
    """The failure of this rank's script, compared with that of rank 0's through a store."""

    def __init__(self, store: dist.Store, world: World) -> None:
        self._store, self._world = store, world
        self.has_failed = False
        """Whether the script of this rank has failed."""

    def close(self) -> None:
        """Let go of the store."""
        del self._store

    def rank_0_is_done(self) -> None:
        """On rank 0: its script has come to its end."""
        self._store.set(_FAILED, "")

    def is_to_report(
        self,
        message: str,
        error: BaseException | None = None,
        alike: Callable[[], object] = lambda: None,
    ) -> bool:
        """Called when the script fails, by an exception or not: whether this rank is to report it.

        If all ranks fail in the same way, rank 0 reports it when it comes to it, and the others
        call `alike` and wait for its end. Another rank reports its failure if rank 0 fails in
        another way, ends, or does neither in WAIT_SECONDS seconds and waits for others, or in
        `_longest_wait`. Called again, it returns True: that failure is another one.
        """
        if self.has_failed:
            return True
        self.has_failed = True
        failed = message.encode(errors="surrogatepass")  # of a file name that is not UTF-8, say
        try:
            if self._world.rank == 0:
                self._store.set(_FAILED, failed)  # type: ignore[arg-type]  # the stub says str
                return True
            has_failed = self._has_rank_0_failed(_longest_wait(error))
            if not has_failed or self._store.get(_FAILED) != failed:
                return True
        except RuntimeError:  # rank 0, which keeps the store, may have ended
            return True
        client.announce_same_failure()
        alike()
        with suppress(RuntimeError):
            self._store.wait([_NEVER], settings.timeout())
        return False

    def _has_rank_0_failed(self, longest: float) -> bool:
        """Whether rank 0 has failed or come to its end, for which this rank waits while rank 0
        waits for nobody. Raises RuntimeError where it is gone, with the store."""
        with suppress(dist.DistStoreError):  # it has taken too long
            self._store.wait([_FAILED], timedelta(seconds=WAIT_SECONDS))
            return True
        rank_0_waits = client.announce_failure()
        deadline = monotonic() + longest
        while not self._store.check([_FAILED]):
            if rank_0_waits is None or rank_0_waits.wait(_POLL) or monotonic() > deadline:
                return False
        return True


def _longest_wait(error: BaseException | None) -> float:
    """Seconds for which a rank that fails with this waits for a rank 0 that waits for nobody: none
    if rank 0 raises it at the same time or never."""
    differs = error and isinstance(root_cause(error), DisagreementError | AuthenticationError)
    return 0.0 if differs else LONGEST_WAIT_SECONDS
