"""What cannot be done with a collective, or with a run-once scope."""

from __future__ import annotations

from collections.abc import Iterable

from instep.errors import CollectiveError, InstepError
from instep.process.exit_status import named


class UnknownOpError(CollectiveError, ValueError):
    """A reduction that does not exist."""

    def __init__(self, op: object, known: Iterable[str]) -> None:
        super().__init__(f"unknown reduction {op!r}; known are {', '.join(known)}.")


class WrongDeviceError(CollectiveError):
    """A tensor lies where this job's ranks cannot talk."""

    def __init__(self, device: object, reachable: Iterable[str]) -> None:
        super().__init__(
            f"this job's ranks exchange tensors on {' and '.join(reachable)}, "
            f"but this tensor is on {device}. Move it there first."
        )


class UnsuitableTensorError(CollectiveError, TypeError):
    """A collective was given something that it has no meaning for."""

    @classmethod
    def not_a_tensor(cls, value: object) -> UnsuitableTensorError:
        """Some other Python value."""
        return cls(
            f"this collective takes tensors, not {type(value).__name__}. For other values there "
            "are broadcast_object, all_gather_object and gather_object."
        )

    @classmethod
    def not_dense(cls, layout: object) -> UnsuitableTensorError:
        """A sparse tensor."""
        return cls(f"ranks exchange dense tensors, not {layout}. Call to_dense() first.")

    @classmethod
    def no_mean(cls, dtype: object) -> UnsuitableTensorError:
        """Integers and truth values."""
        return cls(f"the mean of {dtype} is no {dtype}; use op='sum', or convert it first.")

    @classmethod
    def no_order(cls, dtype: object) -> UnsuitableTensorError:
        """Complex numbers."""
        return cls(f"{dtype} has no order, so no min or max; reduce its abs() or its real part.")

    @classmethod
    def no_rows(cls) -> UnsuitableTensorError:
        """A number where rows are divided."""
        return cls("this tensor has no dimension 0 to divide; reshape it first.")


class OverflowedError(CollectiveError, OverflowError):
    """The sum or product over ranks does not fit the dtype."""

    def __init__(self, op: str, dtype: object, value: int) -> None:
        super().__init__(
            f"the {op} over ranks reaches {value}, which {dtype} cannot hold. "
            "Convert the tensor to torch.int64 first."
        )


class NotAMemberError(CollectiveError, ValueError):
    """A rank takes part in a collective of a group that it is not in."""

    def __init__(self, rank: int, members: Iterable[int]) -> None:
        super().__init__(
            f"rank {rank} talks in the group of {named(members)}, but is not in it. "
            "Call this on the group's members only: if instep.rank in group."
        )


class InsideScopeError(CollectiveError):
    """A collective inside of a run-once scope, where there is nobody to talk to."""

    def __init__(self, what: str, line: str, rank: int, scope: str) -> None:
        super().__init__(
            f"torch.distributed's {what} at {line} is inside the single_process_scope of rank "
            f"{rank} ({scope}); the other ranks are waiting for its end. "
            "Move it out of the scope; instep's own collectives are those of a world of one there."
        )


class RunOnceError(InstepError):
    """A run-once scope could not hand its value or its exception to every rank."""

    @classmethod
    def value(cls, rank: int, scope: str, kind: str, why: str) -> RunOnceError:
        """Its value does not pickle."""
        return cls(
            f"the single_process_scope of rank {rank} ({scope}) returned a {kind} that cannot be "
            f"sent to the other ranks: {why}. Return something that pickles, or None."
        )

    @classmethod
    def exception(cls, rank: int, scope: str, kind: str, trace: str) -> RunOnceError:
        """Its exception does not pickle."""
        return cls(
            f"the single_process_scope of rank {rank} ({scope}) raised {kind}, an exception that "
            f"does not pickle. On rank {rank}:\n\n{trace}"
        )

    @classmethod
    def not_asked(cls, scope: str) -> RunOnceError:
        """The with form without its `if`."""
        return cls(
            f"the body of the single_process_scope at {scope} ran on every rank, because Python "
            "cannot skip it. Write `with instep.single_process_scope() as here:` and inside "
            "`if here:`, or decorate a function."
        )

    @classmethod
    def lost(cls, rank: int, scope: str, seen: str) -> RunOnceError:
        """The rank that runs the scope is gone."""
        return cls(
            f"rank {rank} ended inside its single_process_scope ({scope}): {seen}. "
            "Its own output says why; the others cannot go on without it."
        )
