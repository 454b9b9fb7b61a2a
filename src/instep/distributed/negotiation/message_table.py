"""Collectives matched by name: requests of the ranks in, responses in one agreed order out. Pure.

A rank submits requests in any order, from any thread. When all members of a request's group have
submitted the same name, or have joined (they have no data left), the table gives a response: the
collective takes place, or the same error is raised on all of them. The terms are Horovod's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from instep.distributed.errors import DisagreementError
from instep.distributed.negotiation.errors import NegotiationError
from instep.process.exit_status import format_ranks, group_ranks

Shape = tuple[int, ...]
Key = tuple[Sequence[int], str]

JOIN = "join"
"""The collective that is matched with all others: this rank has no data left."""
_RAGGED = ("allgather", "alltoall")
"""Collectives whose ranks may differ in dimension 0."""
_JOINABLE = ("barrier", JOIN)
"""Collectives in which a rank without data can take part; reductions by sum are others."""


@dataclass(frozen=True)
class Request:
    """A collective for which one rank is ready."""

    name: str
    """Matched between ranks, within a group."""
    collective: str
    """Which collective."""
    members: Sequence[int]
    """The ranks that take part, ascending: a range where none between them is left out, which is
    as short for 10,000 ranks as for 2, in a message and as a key; else a tuple."""
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", as_range(self.members))

    @property
    def key(self) -> Key:
        """Requests with the same key are matched."""
        return self.members, self.name


def as_range(members: Sequence[int]) -> Sequence[int]:
    """Ascending ranks as a range, or a tuple where that is not possible. Both may be keys."""
    if isinstance(members, range):
        return members
    first, last = (members[0], members[-1]) if members else (0, -1)
    return range(first, last + 1) if len(members) == last + 1 - first else tuple(members)


@dataclass(frozen=True)
class Response:
    """The outcome of matched requests: every member gets the same responses in the same order."""

    request: Request
    """One of the requests; they agree on all that matters."""
    rows: tuple[tuple[int, ...], ...] = ()
    """For each member, rows of each tensor (allgather) or for each member (alltoall)."""
    last: int | None = None
    """The rank that joined last, when all have."""
    error: NegotiationError | None = None
    """Why the collective does not take place."""


@dataclass(frozen=True)
class StalledRequest:
    """A request that waits for ranks that have not submitted it."""

    request: Request
    present: tuple[int, ...]
    missing: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        return (
            f"{format_ranks(self.present)} submitted {self.request.name} {self.seconds:.0f} s ago "
            f"at {self.request.line}; {format_ranks(self.missing)} did not yet."
        )


class MessageTable:
    """The requests that are not complete, in the order in which they arrived."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: dict[Key, dict[int, Request]] = {}
        self._since: dict[Key, float] = {}
        self._reported: set[Key] = set()
        self._joined: list[int] = []

    def add(self, rank: int, request: Request, now: float) -> list[Response]:
        """Add a request of `rank`; returns the responses that it completes, in their order."""
        if request.collective == JOIN:
            self._joined.append(rank)
            complete = [v for key in list(self._waiting) for v in self._complete(key)]
            return complete + self._complete_join(request)
        key = request.key
        self._since.setdefault(key, now)
        self._waiting.setdefault(key, {})[rank] = request
        return self._complete(key)

    @property
    def is_empty(self) -> bool:
        """Whether no request waits."""
        return not self._waiting

    def stalled(self, now: float, seconds: float) -> list[StalledRequest]:
        """The requests that have waited for at least so long, the oldest first."""
        return [
            StalledRequest(
                requests[min(requests)], tuple(sorted(requests)), self._missing(key), waited
            )
            for key, requests in self._waiting.items()
            if (waited := now - self._since[key]) >= seconds
        ]

    def find_stalled(self, now: float, seconds: float) -> list[StalledRequest]:
        """The stalled requests that no earlier call has returned."""
        stalled = self.stalled(now, seconds)
        new = [each for each in stalled if each.request.key not in self._reported]
        self._reported.update(each.request.key for each in new)
        return new

    def _missing(self, key: Key) -> tuple[int, ...]:
        present = {*self._waiting[key], *self._joined}
        return tuple(rank for rank in key[0] if rank not in present)

    def _complete(self, key: Key) -> list[Response]:
        if len(self._waiting[key]) + len(self._joined) < len(key[0]) or self._missing(key):
            return []
        requests = self._waiting.pop(key)
        del self._since[key]
        self._reported.discard(key)
        return [_respond(requests, [rank for rank in key[0] if rank not in requests])]

    def _complete_join(self, request: Request) -> list[Response]:
        if len(self._joined) < self._size:
            return []
        last = self._joined[-1]
        self._joined.clear()
        return [Response(request, last=last)]


def _respond(requests: Mapping[int, Request], joined: list[int]) -> Response:
    """To the requests of all members but those that joined."""
    first = requests[min(requests)]
    error = _find_mismatch(requests)
    joinable = first.collective in _JOINABLE or first.op in ("sum", "mean")
    if error is None and joined and not joinable:
        error = _needs_joined_ranks(first, joined)
    if error is not None:
        return Response(first, error=error)
    given = [requests[rank] for rank in first.members if rank in requests]
    if first.collective == "alltoall":
        return Response(first, tuple(request.splits for request in given))
    if first.collective == "allgather":
        return Response(first, tuple(tuple(s[0] for s in request.shapes) for request in given))
    return Response(first)


def _needs_joined_ranks(request: Request, joined: list[int]) -> NegotiationError:
    what = f"{request.collective} ({request.op})" if request.op else request.collective
    return NegotiationError(
        f"{request.name} ({request.line}) is the collective {what}, and {format_ranks(joined)} "
        "already called join(): a rank that joined can only add zeros to sums and averages. "
        "Call it before any joins."
    )


def _find_mismatch(requests: Mapping[int, Request]) -> NegotiationError | None:
    """The first field in which the ranks differ."""
    if len({replace(request, line="") for request in requests.values()}) == 1:
        return None  # as nearly always
    for what, show, advice in _MUST_AGREE:
        seen = group_ranks({rank: show(request) for rank, request in requests.items()})
        if len(seen) > 1:
            name = requests[min(requests)].name
            return NegotiationError(str(DisagreementError(f"{what} of {name}", seen, advice)))
    return None


def _show_shapes(request: Request) -> str:
    ragged = request.collective in _RAGGED
    shapes = [("any", *shape[1:]) if ragged else shape for shape in request.shapes]
    return ", ".join(f"({', '.join(map(str, shape))})" for shape in shapes)


_MUST_AGREE: tuple[tuple[str, Callable[[Request], str], str], ...] = (
    ("the collective", lambda r: r.collective, "Give different collectives different names."),
    ("the dtype", lambda r: r.dtype, "Convert them to one."),
    ("the device", lambda r: r.device, "Move them to devices of one type."),
    ("the reduction", lambda r: r.op, "Give the same op on every rank."),
    ("the root", lambda r: f"root {r.root}", "Give the same root rank on every rank."),
    ("the number of tensors", lambda r: f"{len(r.shapes)} tensors", "Group the same ones."),
    ("the shape", _show_shapes, "Make them equal, or give different tensors different names."),
    (
        "the factors",
        lambda r: f"prescale {r.scales[0]:g} and postscale {r.scales[1]:g}",
        "Give the same ones on every rank.",
    ),
)
"""Fields on which requests of one name agree: how they are shown, and what to do about them."""
