"""Errors of starting ranks, and of sending values to them."""

from __future__ import annotations

from instep.errors import LaunchError


class StartError(LaunchError):
    """The operating system would not start a rank."""

    def __init__(self, rank: int, size: int, why: str) -> None:
        super().__init__(
            f"cannot start rank {rank} of {size}: {why}. Start fewer ranks, or raise the limit."
        )


class RankFailedError(LaunchError):
    """A rank that `instep.spawn` started failed; the message ends with its traceback."""

    def __init__(self, report: str, rank: int, code: int) -> None:
        super().__init__(report)
        self.rank = rank
        """Which rank failed first."""
        self.code = code
        """Its exit code; 128 + n for signal n."""


class CannotSendError(LaunchError, TypeError):
    """A function, an argument or a result that does not pickle."""
