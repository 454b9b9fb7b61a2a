"""Collectives matched by name: what is ready on each rank in, one agreed order out. Pure.

A rank submits wishes in any order, from any thread. When all members of a wish's group have
submitted the same name, or have joined (they have no data left), the ledger gives a verdict: the
collective takes place, or the same error on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from instep.distributed.errors import DisagreementError
from instep.distributed.negotiation.errors import NegotiationError
from instep.process.exit_status import format_ranks

Shape = tuple[int, ...]
Key = tuple[tuple[int, ...], str]

JOIN = "join"
"""The kind of wish that is matched with everything: this rank has no data left."""
_RAGGED = ("allgather", "alltoall")
"""Kinds whose ranks may differ in dimension 0."""
_JOINABLE = ("barrier", JOIN)
"""Kinds that a rank without data can take part in; reductions by sum are others."""


@dataclass(frozen=True)
class Request:
    """A collective that one rank is ready for."""

    name: str
    """What ranks are matched by, within a group."""
    kind: str
    """Which collective."""
    members: tuple[int, ...]
    """The ranks that take part, ascending."""
    dtype: str = ""
    device: str = ""
    shapes: tuple[Shape, ...] = ()
    """Of each of its tensors."""
    op: str = ""
    """The reduction, where it is one."""
    root: int | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    """Factors before and after a reduction."""
    splits: tuple[int, ...] = ()
    """How many rows each member gets, of an alltoall."""
    line: str = ""
    """Where in the script it was submitted."""

    @property
    def key(self) -> Key:
        """What it is matched by."""
        return self.members, self.name


@dataclass(frozen=True)
class Response:
    """What becomes of a wish: every member gets the same, in the same order."""

    wish: Request
    """One of the wishes; they agree on all that matters."""
    rows: tuple[tuple[int, ...], ...] = ()
    """What each member gives: rows of each tensor (allgather) or for each member (alltoall)."""
    last: int | None = None
    """The rank that joined last, when all have."""
    fault: NegotiationError | None = None
    """Why it does not take place."""


@dataclass(frozen=True)
class StalledRequest:
    """A wish that waits for ranks that have not submitted it."""

    wish: Request
    present: tuple[int, ...]
    missing: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        return (
            f"{format_ranks(self.present)} submitted {self.wish.name} {self.seconds:.0f} s ago at "
            f"{self.wish.line}; {format_ranks(self.missing)} did not yet."
        )


class MessageTable:
    """What the ranks have submitted and is not complete, in the order in which it came."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: dict[Key, dict[int, Request]] = {}
        self._since: dict[Key, float] = {}
        self._told: set[Key] = set()
        self._joined: list[int] = []

    def hear(self, rank: int, wish: Request, now: float) -> list[Response]:
        """Note what `rank` is ready for; returns what is complete by that, in its order."""
        if wish.kind == JOIN:
            self._joined.append(rank)
            complete = [v for key in list(self._waiting) for v in self._if_complete(key)]
            return complete + self._if_all_joined(wish)
        key = wish.key
        self._since.setdefault(key, now)
        self._waiting.setdefault(key, {})[rank] = wish
        return self._if_complete(key)

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def delays(self, now: float, seconds: float) -> list[StalledRequest]:
        """What has been waiting for at least so long, the oldest first."""
        return [
            StalledRequest(wishes[min(wishes)], tuple(sorted(wishes)), self._missing(key), waited)
            for key, wishes in self._waiting.items()
            if (waited := now - self._since[key]) >= seconds
        ]

    def new_delays(self, now: float, seconds: float) -> list[StalledRequest]:
        """Those that no call before this one has returned."""
        delays = self.delays(now, seconds)
        new = [delay for delay in delays if delay.wish.key not in self._told]
        self._told.update(delay.wish.key for delay in new)
        return new

    def _missing(self, key: Key) -> tuple[int, ...]:
        here = {*self._waiting[key], *self._joined}
        return tuple(rank for rank in key[0] if rank not in here)

    def _if_complete(self, key: Key) -> list[Response]:
        if self._missing(key):
            return []
        wishes = self._waiting.pop(key)
        del self._since[key]
        self._told.discard(key)
        return [_verdict(wishes, [rank for rank in key[0] if rank not in wishes])]

    def _if_all_joined(self, wish: Request) -> list[Response]:
        if len(self._joined) < self._size:
            return []
        last = self._joined[-1]
        self._joined.clear()
        return [Response(wish, last=last)]


def _verdict(wishes: Mapping[int, Request], joined: list[int]) -> Response:
    """What becomes of the wishes of all members but those who joined."""
    first = wishes[min(wishes)]
    fault = _disagreement(wishes)
    if fault is None and joined and first.kind not in _JOINABLE and first.op not in ("sum", "mean"):
        kind = f"{first.kind} ({first.op})" if first.op else first.kind
        fault = NegotiationError(
            f"{first.name} ({first.line}) is of the kind {kind}, and {format_ranks(joined)} "
            "already called join(): a rank that joined can only add zeros to sums and averages. "
            "Call it before any joins."
        )
    if fault is not None:
        return Response(first, fault=fault)
    given = [wishes[rank] for rank in first.members if rank in wishes]
    if first.kind == "alltoall":
        return Response(first, tuple(wish.splits for wish in given))
    if first.kind == "allgather":
        return Response(first, tuple(tuple(s[0] for s in wish.shapes) for wish in given))
    return Response(first)


def _disagreement(wishes: Mapping[int, Request]) -> NegotiationError | None:
    """The first respect in which the ranks differ."""
    for what, view, advice in _RESPECTS:
        seen: dict[str, list[int]] = {}
        for rank, wish in sorted(wishes.items()):
            seen.setdefault(view(wish), []).append(rank)
        if len(seen) > 1:
            name = wishes[min(wishes)].name
            return NegotiationError(str(DisagreementError(f"{what} of {name}", seen, advice)))
    return None


def _shapes(wish: Request) -> str:
    free = wish.kind in _RAGGED
    shown = [("any", *shape[1:]) if free else shape for shape in wish.shapes]
    return ", ".join(f"({', '.join(map(str, shape))})" for shape in shown)


_RESPECTS: tuple[tuple[str, Callable[[Request], str], str], ...] = (
    ("the kind", lambda w: w.kind, "Give different collectives different names."),
    ("the dtype", lambda w: w.dtype, "Convert them to one."),
    ("the device", lambda w: w.device, "Move them to one kind."),
    ("the reduction", lambda w: w.op, "Give the same op on every rank."),
    ("the root", lambda w: f"root {w.root}", "Give the same root rank on every rank."),
    ("the number of tensors", lambda w: f"{len(w.shapes)} tensors", "Group the same ones."),
    ("the shape", _shapes, "Make them equal, or give different tensors different names."),
    (
        "the factors",
        lambda w: f"prescale {w.scales[0]:g} and postscale {w.scales[1]:g}",
        "Give the same ones on every rank.",
    ),
)
"""What the wishes of one name have to agree on: how it is shown, and what to do about it."""
