"""What is wrong with a named collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from instep.distributed.errors import DisagreementError
from instep.errors import CollectiveError
from instep.process.exit_status import named


class NameInFlightError(CollectiveError, ValueError):
    """A name was submitted again before its first collective was over."""

    def __init__(self, name: str, line: str) -> None:
        super().__init__(
            f"{name} is already under way on this rank (submitted at {line}). Ranks are matched by "
            "names: wait for the first one, or give the second a name of its own."
        )


class NegotiationError(CollectiveError, RuntimeError):
    """A collective that ranks are matched to by its name cannot take place."""

    @classmethod
    def mismatch(
        cls, what: str, name: str, seen: Mapping[str, Iterable[int]], advice: str
    ) -> NegotiationError:
        """The ranks mean different things by one name."""
        return cls(str(DisagreementError(f"{what} of {name}", seen, advice)))

    @classmethod
    def joined(cls, name: str, kind: str, ranks: Iterable[int], line: str) -> NegotiationError:
        """Some ranks have no data left, and this cannot do without them."""
        return cls(
            f"{name} ({line}) is of the kind {kind}, and {named(ranks)} already called join(): a "
            "rank that joined can only add zeros to sums and averages. Call it before any joins."
        )

    @classmethod
    def left(cls, rank: int, size: int) -> NegotiationError:
        """A rank shut its side down, or its process ended."""
        return cls(
            f"rank {rank} of {size} has ended or called shutdown(), so collectives with it are "
            "over. Its own output may say why; let every rank submit the same ones before that."
        )

    @classmethod
    def stalled(cls, text: str) -> NegotiationError:
        """A rank did not come, and the user wants an end then."""
        return cls(f"{text} The job asked to end now rather than wait.")

    @classmethod
    def failed(cls, name: str, why: object) -> NegotiationError:
        """The exchange itself broke off."""
        return cls(f"{name} broke off: {why}. A rank that ended is the usual cause.")
