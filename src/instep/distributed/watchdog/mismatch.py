"""Collectives in which the ranks disagree, found in what each of them has entered (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from instep.distributed.flight_record.record_format import MESSAGES, FlightRecord
from instep.process.exit_status import group_ranks

Step = list[object]
"""A collective as a message has it: group, sequence in the group, tag, description."""
LAST = 64
"""Collectives of a rank that are compared."""


def recorded_steps(record: FlightRecord) -> list[Step]:
    """The last collectives of a flight record; none if the rank reports the disagreement itself.

    Of torch's own groups it has instep's collectives only: see `torch_trace`.
    """
    if record.is_reported:
        return []
    return [
        [entry.group, entry.sequence, entry.tag, entry.describe()]
        for entry in record.entries[-LAST:]
        if not entry.group.startswith(("torch-", MESSAGES))
    ]


def has_line(description: object) -> bool:
    """Whether a step's description has the line of the script."""
    return " at " in str(description)


def are_steps(value: object) -> bool:
    """Whether a value is a list of such steps."""
    return isinstance(value, list) and all(
        isinstance(step, list) and [type(part) for part in step] == [str, int, int, str]
        for step in value
    )


class EnteredCollectives:
    """What the ranks have entered, one rank's steps after the other's.

    The work for a step does not depend on the number of ranks that have told theirs before.
    """

    def __init__(self) -> None:
        self._entered: dict[tuple[Any, Any], dict[int, tuple[object, str]]] = {}
        """By group and sequence: the tag and the description of each rank."""
        self._differing: set[tuple[Any, Any]] = set()
        """The groups and sequences at which not all tags are equal."""
        self._texts: dict[str, str] = {}
        """Equal descriptions are kept once."""

    def add(self, rank: int, steps: Iterable[Step]) -> None:
        """Add the steps of a rank; a later description of a step replaces an earlier one."""
        for group, sequence, tag, text in steps:
            by_rank = self._entered.setdefault((group, sequence), {})
            if any(known != tag for known, _ in islice(by_rank.values(), 1)):
                self._differing.add((group, sequence))
            by_rank[rank] = tag, self._texts.setdefault(str(text), str(text))

    def find_mismatch(self) -> dict[str, list[int]]:
        """The ranks of each description where ranks first disagree in a group; empty if they agree.

        A rank that has not entered a collective yet disagrees with none.
        """
        for step in sorted(self._differing):
            entered = self._entered[step]
            if len({tag for tag, _ in entered.values()}) > 1:
                return group_ranks({rank: text for rank, (_, text) in entered.items()})
        return {}
