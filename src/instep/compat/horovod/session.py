"""What lies between init() and shutdown(), and what a rank may ask about itself and the job."""

from __future__ import annotations

import os
from collections import Counter

from instep.compat.horovod.errors import NotInitializedError
from instep.distributed.identity.world import World
from instep.distributed.negotiation.coordinator import Patience
from instep.distributed.negotiation.negotiator import Negotiator
from instep.distributed.rendezvous import bootstrap


class Session:
    """From one init() to its shutdown()."""

    def __init__(self) -> None:
        self.negotiator = Negotiator(_patience())
        self.unnamed: Counter[tuple[object, ...]] = Counter()
        """How many collectives of each kind, in each process set, had no name."""


_session: Session | None = None


def begin() -> None:
    """Open one. Collective."""
    global _session
    _session = Session()


def end() -> None:
    """Close it; what other ranks have under way ends with an error there."""
    global _session
    ending, _session = session(), None
    ending.negotiator.close()


def session() -> Session:
    """The one that is open. Raises NotInitializedError."""
    if _session is None:
        raise NotInitializedError
    return _session


def is_initialized() -> bool:
    """Whether between init() and shutdown()."""
    return _session is not None


def world() -> World:
    """Who this rank is. Raises NotInitializedError."""
    session()
    return bootstrap.current()


def rank() -> int:
    """Which of the job's ranks this is."""
    return world().rank


def size() -> int:
    """How many ranks the job has."""
    return world().size


def local_rank() -> int:
    """Which of the ranks on this host."""
    return world().local_rank


def local_size() -> int:
    """How many ranks are on this host."""
    return world().local_size


def cross_rank() -> int:
    """Which of the hosts this is."""
    return world().node_rank


def cross_size() -> int:
    """How many hosts the job has."""
    return world().nodes


def is_homogeneous() -> bool:
    """Whether every host has as many ranks as this one."""
    return world().local_size * world().nodes == world().size


def _patience() -> Patience:
    """Horovod's variables for ranks that wait for others; 0 means never."""
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        return Patience(None, None)
    warn = float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", "60"))
    end = float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0"))
    return Patience(warn or None, end or None)
