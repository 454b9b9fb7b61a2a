"""Collectives in which the ranks disagree, found in what each of them has entered (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from instep.distributed.flight_record.record_format import MESSAGES, FlightRecord
from instep.process.exit_status import format_ranks

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


def find_mismatch(steps: Mapping[int, Iterable[Step]]) -> dict[str, list[int]]:
    """The ranks of each description where ranks first disagree in a group; empty if they agree.

    A rank that has not entered a collective yet disagrees with none.
    """
    entered: dict[tuple[object, object], dict[int, tuple[object, str]]] = {}
    for rank, own in sorted(steps.items()):
        for group, sequence, tag, text in own:
            entered.setdefault((group, sequence), {})[rank] = tag, str(text)
    differing = {
        step: by_rank
        for step, by_rank in entered.items()
        if len({tag for tag, _ in by_rank.values()}) > 1
    }
    if not differing:
        return {}
    group = min(step[0] for step in differing)  # type: ignore[type-var]
    sequence = min(step[1] for step in differing if step[0] == group)  # type: ignore[type-var]
    sides: dict[str, list[int]] = {}
    for rank, (_, text) in differing[group, sequence].items():
        sides.setdefault(text, []).append(rank)
    return sides


def format_mismatch(sides: Mapping[str, Iterable[int]]) -> str:
    """The sides of a disagreement, with their ranks, in one sentence."""
    listed = "; ".join(f"{text} on {format_ranks(ranks)}" for text, ranks in sides.items())
    return (
        f"the ranks disagree about which collective comes next: {listed}. Every rank must call the "
        "same collectives in the same order, with equal shapes, dtypes and roots."
    )
