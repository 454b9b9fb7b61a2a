"""The events of a timeline: read, brought to one clock, and summed up. Pure but for the reading."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instep.errors import CommandLineError

Event = Mapping[str, Any]
_SLOW = 0.1
"""A rank for which the others wait this fraction of the time is a straggler."""


@dataclass
class RankTimes:
    """What one rank did, in seconds."""

    rank: int
    span: float
    """From the moment at which all ranks have come to the job's last event."""
    waited: float = 0.0
    """In collectives, while the program stood still."""
    hidden: float = 0.0
    """In collectives, while the program went on."""
    made_wait: float = 0.0
    """How long the first to come to a collective has waited for this rank, where it came last."""
    longest: tuple[float, str] = (0.0, "")
    """The longest of these waits, and for which call."""
    last: int = 0
    """In how many collectives it came last."""
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def computed(self) -> float:
        """All of the rest."""
        return max(0.0, self.span - self.waited)


def read_events(path: Path) -> list[Event]:
    """The events of a file and those of the files of other hosts beside it, on one clock.

    Times are microseconds from the first event on. Raises CommandLineError.
    """
    files = [path, *sorted(path.parent.glob(f"{path.stem}.node*{path.suffix}"))]
    found: list[dict[str, Any]] = []
    reference: float | None = None
    for file in files:
        events = _read(file)
        offsets = [e["args"]["offset_us"] for e in events if e["name"] == "clock"]
        offset = min(offsets, default=0)
        reference = offset if reference is None else reference
        for event in events:
            if event["ph"] == "X":
                found.append({**event, "ts": event["ts"] + offset - reference})
    start = min((event["ts"] for event in found), default=0.0)
    for event in found:
        event["ts"] -= start
    return sorted(found, key=lambda event: float(event["ts"]))


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise CommandLineError(f"cannot read {path}: {error.strerror}.") from None
    if lines[:1] != ["["]:
        raise CommandLineError(f"{path} is no timeline; see INSTEP_TIMELINE.")
    events = []
    for line in lines[1:]:
        try:
            events.append(json.loads(line.rstrip(",")))
        except ValueError:  # the rank was killed while it wrote
            continue
    return events


def sum_up(events: Iterable[Event]) -> list[RankTimes]:
    """Where the time of each rank went, from the first event of the rank that came last."""
    events = list(events)
    first_of: dict[int, float] = {}
    for event in events:
        first_of[event["pid"]] = min(first_of.get(event["pid"], event["ts"]), event["ts"])
    begin = max(first_of.values(), default=0.0)
    end = max((event["ts"] + event["dur"] for event in events), default=0.0)
    times = {rank: RankTimes(rank, (end - begin) / 1e6) for rank in sorted(first_of)}
    meetings: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in events:
        of_rank = times[event["pid"]]
        stop = event["ts"] + event["dur"]
        seconds = max(0.0, stop - max(begin, event["ts"])) / 1e6
        if event["cat"] == "phase":
            of_rank.phases[event["name"]] = of_rank.phases.get(event["name"], 0.0) + seconds
            continue
        waited = min(seconds, event["args"]["waited_us"] / 1e6)
        of_rank.waited += waited
        of_rank.hidden += max(0.0, seconds - waited)
        meetings[event["args"]["group"], event["args"]["sequence"]].append(event)
    for members in meetings.values():
        if len(members) > 1:
            first, *_, last = sorted(members, key=lambda event: float(event["ts"]))
            late, seconds = times[last["pid"]], max(0.0, last["ts"] - max(begin, first["ts"])) / 1e6
            late.last += 1
            late.made_wait += seconds
            late.longest = max(late.longest, (seconds, last["args"]["call"]))
    return [*times.values()]


def format_summary(times: Sequence[RankTimes]) -> list[str]:
    """The lines to print: a table, and what to change."""
    if not times:
        return ["no collective has ended; there is nothing to sum up"]
    lines = [f"{'rank':>5} {'seconds':>9} {'waited':>8} {'hidden':>8} {'came last':>10}  made wait"]
    for each in times:
        lines.append(
            f"{each.rank:>5} {each.span:>9.2f} {_percent(each.waited, each):>8} "
            f"{_percent(each.hidden, each):>8} {each.last:>10}  {each.made_wait:.2f} s"
        )
        if each.phases:
            parts = sorted(each.phases.items(), key=lambda part: -part[1])
            lines.append("      " + ", ".join(f"{n} {_percent(s, each)}" for n, s in parts))
    return [*lines, *_advice(times)]


def _advice(times: Sequence[RankTimes]) -> list[str]:
    slowest = max(times, key=lambda each: each.made_wait)
    waited = min(each.waited / each.span for each in times if each.span) if times[0].span else 0.0
    if slowest.span and slowest.made_wait / slowest.span > _SLOW:
        return [
            f"Rank {slowest.rank} is the straggler: others waited {slowest.made_wait:.2f} s for it "
            f"({_percent(slowest.made_wait, slowest)} of the time; the longest wait was "
            f"{slowest.longest[0]:.2f} s, in {slowest.longest[1]}). Look at its loading and its "
            "host's other processes."
        ]
    if waited > _SLOW:
        return [
            f"Every rank spends at least {waited:.0%} in collectives, and none is late: larger "
            "batches, gradient accumulation with no_sync, or compression send less."
        ]
    return ["No rank is late, and collectives take little of the time."]


def _percent(seconds: float, of_rank: RankTimes) -> str:
    return f"{seconds / of_rank.span:.1%}" if of_rank.span else "-"
