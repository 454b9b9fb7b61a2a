"""Process sets: some of the ranks, between whom collectives take place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from instep.compat.horovod.errors import NotThereError, WrongArgumentError
from instep.compat.horovod.session import rank, session, size
from instep.distributed.communication import groups
from instep.distributed.communication.forbid_collectives import line_of_script
from instep.distributed.negotiation.message_table import Wish
from instep.distributed.negotiation.negotiator import Task


class ProcessSet:
    """Some of the ranks. Registered by `add_process_set` or `init(process_sets=...)`."""

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise NotThereError.communicator()
        ranks = list(ranks_or_comm)
        if len(set(ranks)) < len(ranks) or not all(isinstance(r, int) for r in ranks):
            raise WrongArgumentError.ranks(ranks)
        self.ranks: list[int] | None = sorted(ranks)
        """Ascending: the order of gathered results."""
        self.process_set_id: int | None = None
        """0 for all ranks; None before it is registered and after it was removed."""

    def size(self) -> int | None:
        """How many ranks it has; None where it is not registered."""
        return None if self.process_set_id is None else len(self.members)

    def rank(self) -> int | None:
        """Which of them this one is; None where it is not registered. (Roots are global ranks.)

        Raises ValueError on ranks that are not in it.
        """
        return None if self.process_set_id is None else self.members.index(rank())

    def included(self) -> bool | None:
        """Whether this rank is in it; None before init()."""
        return None if self.ranks is None else rank() in self.ranks

    @property
    def members(self) -> tuple[int, ...]:
        """Its ranks. Raises WrongArgumentError where it is not registered."""
        if self.process_set_id is None or self.ranks is None:
            raise WrongArgumentError.no_set(self.ranks)
        return tuple(self.ranks)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        return self


global_process_set = ProcessSet([])
"""All ranks."""
global_process_set.ranks = None

_registered: list[ProcessSet] = []
_added = 0


def begin() -> None:
    """init() was called."""
    global_process_set.ranks = list(range(size()))
    global_process_set.process_set_id = 0


def end() -> None:
    """shutdown() was called: no set is registered any more."""
    for process_set in (*_registered, global_process_set):
        process_set.process_set_id = None
    _registered.clear()
    global_process_set.ranks = None


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set and return it.

    Collective: every rank calls it with the same ranks, members or not. Raises WrongArgumentError
    for ranks that do not exist or have a set already, NegotiationError where the ranks disagree.
    """
    global _added
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = added.ranks or []
    if not ranks or ranks[0] < 0 or ranks[-1] >= size():
        raise WrongArgumentError.ranks(ranks)
    if any(known.ranks == ranks for known in (*_registered, global_process_set)):
        raise WrongArgumentError.same_set(ranks)
    _all_here("add_process_set", ranks)
    session().negotiator.admit(groups.group(ranks))
    _added += 1
    added.process_set_id = _added
    _registered.append(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a set from the register; False where it is not in there, or is that of all ranks.

    Collective. Raises NegotiationError where the ranks disagree.
    """
    if process_set not in _registered:
        return False
    ranks = list(process_set.members)
    _all_here("remove_process_set", ranks)
    session().negotiator.dismiss(tuple(ranks))
    process_set.process_set_id = None
    _registered.remove(process_set)
    return True


def _all_here(name: str, ranks: list[int]) -> None:
    """Return when every rank has come with the same ranks."""
    members = session().negotiator.world.ranks
    wish = Wish(name, "barrier", members, shapes=(tuple(ranks),), line=line_of_script())
    session().negotiator.submit(Task(wish)).wait()
