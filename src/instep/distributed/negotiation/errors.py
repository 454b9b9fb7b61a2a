"""Errors of named collectives."""

from __future__ import annotations

from instep.errors import CollectiveError


class NameInFlightError(CollectiveError, ValueError):
    """A name was submitted again before its first collective was over."""


class NegotiationError(CollectiveError, RuntimeError):
    """A named collective cannot take place."""

    @classmethod
    def rank_left(cls, rank: int, size: int) -> NegotiationError:
        return cls(
            f"rank {rank} of {size} has ended or called shutdown(), so collectives with it are "
            "over. Its own output may say why; let every rank submit the same ones before that."
        )
