"""Errors of collectives and of single_process_scope."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from instep.distributed.errors import PeerLeftError
from instep.errors import CollectiveError, InstepError
from instep.process.exit_status import format_ranks
from instep.process.failures.tracebacks import is_lost_peer


@contextmanager
def name_lost_peer(op: str, peer: int) -> Iterator[None]:
    """Raises PeerLeftError in place of Gloo's error, which does not say which rank has gone."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise PeerLeftError(f"rank {peer}", op, peer) from None


class UnknownOpError(CollectiveError, ValueError):
    """There is no such reduction."""

    def __init__(self, op: object, known: Iterable[str]) -> None:
        super().__init__(f"unknown reduction {op!r}; known are {', '.join(known)}.")


class WrongDeviceError(CollectiveError):
    """A tensor is on a device that this job's process group does not serve."""


class UnsuitableTensorError(CollectiveError, TypeError):
    """A collective has no meaning for this value, dtype or layout."""


class OverflowedError(CollectiveError, OverflowError):
    """The sum or product over ranks does not fit the dtype."""


class NotAMemberError(CollectiveError, ValueError):
    """A rank called a collective of a group of which it is no member."""

    def __init__(self, rank: int, members: Iterable[int]) -> None:
        super().__init__(
            f"rank {rank} called a collective of the group of {format_ranks(members)}, but is "
            "no member. Call it on the group's members only: if instep.rank in group."
        )


class InsideScopeError(CollectiveError):
    """torch.distributed was called inside a single_process_scope."""

    def __init__(self, op: str, line: str, rank: int, scope: str) -> None:
        super().__init__(
            f"torch.distributed's {op} at {line} is inside the single_process_scope of rank "
            f"{rank} ({scope}); the other ranks are waiting for its end. "
            "Move it out of the scope; instep's own collectives are those of a world of one there."
        )


class RunOnceError(InstepError):
    """A single_process_scope could not give its value or its exception to every rank."""
