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
_Interval = tuple[float, float, str]
"""Begin and end in microseconds, and a phase's name, or none for a wait in a collective."""
_SLOW, _STRAGGLES = 0.1, 2.0
"""A rank for which the others wait this fraction of the time, and so many times as long as for all
others together, is a straggler."""


@dataclass
class RankTimes:
    """What one rank did, in seconds."""

    rank: int
    span: float
    """From the moment at which all ranks have come to the job's last event."""
    waited: float = 0.0
    """In collectives, while the program stood still."""
    waited_for_late: float = 0.0
    """The part of it before the last rank of the collective had come."""
    hidden: float = 0.0
    """In collectives, while the program went on."""
    made_wait: float = 0.0
    """How long the first to come to a collective has waited for this rank, where it came last."""
    longest: tuple[float, str] = (0.0, "")
    """The longest of these waits, and for which call."""
    last: int = 0
    """In how many collectives it came last."""
    collectives: int = 0
    """The collectives with other ranks in which it was."""
    phases: dict[str, float] = field(default_factory=dict)
    """The time in each phase, that in collectives and in other phases within it included."""
    computed_in: dict[str, float] = field(default_factory=dict)
    """The time in each phase without that in collectives and in phases within it."""


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
    return sorted(found, key=_time)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
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


def group_by_collective(events: Iterable[Event]) -> dict[tuple[str, int], list[Event]]:
    """The events of each collective, one per rank, in the order in which the ranks came."""
    found: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["cat"] == "collective":
            found[event["args"]["group"], event["args"]["sequence"]].append(event)
    return {key: sorted(members, key=_time) for key, members in found.items()}


def begin_of(events: Iterable[Event]) -> float:
    """The first event of the rank that came last: what was before is the start of the ranks."""
    first: dict[int, float] = {}
    for event in events:
        first[event["pid"]] = min(first.get(event["pid"], event["ts"]), event["ts"])
    return max(first.values(), default=0.0)


def sum_up(events: Iterable[Event]) -> list[RankTimes]:
    """Where the time of each rank went, from the first event of the rank that came last."""
    events = list(events)
    begin = begin_of(events)
    end = max((event["ts"] + event["dur"] for event in events), default=0.0)
    ranks = sorted({event["pid"] for event in events})
    times = {rank: RankTimes(rank, (end - begin) / 1e6) for rank in ranks}
    intervals: dict[int, list[_Interval]] = {rank: [] for rank in ranks}
    for event in events:
        if event["cat"] == "phase":
            stop = event["ts"] + event["dur"]
            intervals[event["pid"]].append((max(begin, event["ts"]), stop, event["name"]))
    for members in group_by_collective(events).values():
        first, last = members[0], members[-1]
        for event in members:
            of_rank, seconds = times[event["pid"]], _seconds(event, begin)
            waited = min(seconds, event["args"]["waited_us"] / 1e6)
            since = event["ts"] + event["dur"] - waited * 1e6
            of_rank.waited += waited
            intervals[event["pid"]].append((max(begin, since), event["ts"] + event["dur"], ""))
            of_rank.waited_for_late += min(waited, max(0.0, last["ts"] - since) / 1e6)
            of_rank.hidden += max(0.0, seconds - waited)
            of_rank.collectives += len(members) > 1
        if len(members) > 1:
            late, seconds = times[last["pid"]], max(0.0, last["ts"] - max(begin, first["ts"])) / 1e6
            late.last += 1
            late.made_wait += seconds
            late.longest = max(late.longest, (seconds, last["args"]["call"]))
    for rank, of_rank in times.items():
        of_rank.computed_in = _innermost_seconds(intervals[rank])
        for name in dict.fromkeys(name for *_, name in intervals[rank] if name):
            of_name = [each for each in intervals[rank] if each[-1] == name]
            # one within another of its name counts once
            of_rank.phases[name] = _innermost_seconds(of_name).get(name, 0.0)
    return [*times.values()]


def _innermost_seconds(intervals: Iterable[_Interval]) -> dict[str, float]:
    """The seconds in each named interval, of which those in intervals within it are not counted."""
    found: dict[str, float] = defaultdict(float)
    entered: list[tuple[float, str]] = []
    now = 0.0

    def advance(to: float) -> None:
        nonlocal now
        if entered and to > now:
            found[entered[-1][1]] += (to - now) / 1e6
        now = max(now, to)

    for start, stop, name in sorted(intervals, key=lambda each: (each[0], -each[1])):
        while entered and entered[-1][0] <= start:
            advance(entered[-1][0])
            entered.pop()
        advance(start)
        entered.append((stop, name))
    while entered:
        advance(entered[-1][0])
        entered.pop()
    found.pop("", None)
    return dict(found)


def find_slow(times: Sequence[RankTimes]) -> RankTimes | None:
    """The rank for which the others have waited for long, and twice as long as for all others
    together; None if there is none."""
    slowest = max(times, key=lambda each: each.made_wait, default=None)
    if slowest is None or not slowest.span or slowest.made_wait / slowest.span <= _SLOW:
        return None
    others = sum(each.made_wait for each in times) - slowest.made_wait
    return slowest if slowest.made_wait >= _STRAGGLES * others else None


def format_summary(times: Sequence[RankTimes]) -> list[str]:
    """The lines to print: a table, and what to change."""
    if not times:
        return format_result(times)
    lines = [f"{'rank':>5} {'seconds':>9} {'waited':>8} {'hidden':>8} {'came last':>10}  made wait"]
    for each in times:
        lines.append(
            f"{each.rank:>5} {each.span:>9.2f} {_percent(each.waited, each):>8} "
            f"{_percent(each.hidden, each):>8} {each.last:>10}  {each.made_wait:.2f} s"
        )
        if each.phases:
            parts = sorted(each.phases.items(), key=lambda part: -part[1])
            lines.append("      " + ", ".join(f"{n} {_percent(s, each)}" for n, s in parts))
    return [*lines, *format_result(times)]


def format_result(times: Sequence[RankTimes]) -> list[str]:
    """What the times mean, and what to change: a line or two."""
    if not times:
        return ["no collective has ended; there is nothing to sum up"]
    if slow := find_slow(times):
        seconds, call = slow.longest
        return [
            f"Rank {slow.rank} is the straggler: others waited {slow.made_wait:.2f} s for it "
            f"({_percent(slow.made_wait, slow)} of the time; the longest wait was "
            f"{_duration(seconds)}, in {call}). It came last to {slow.last} of {slow.collectives} "
            "collectives.",
            _cause(slow, [each for each in times if each is not slow]),
        ]
    spans = [each for each in times if each.span]
    if min((each.waited_for_late / each.span for each in spans), default=0.0) > _SLOW:
        return [
            "The ranks wait for one another in turn, and none is the straggler: their steps take "
            "unequal time. Give every rank samples of like size, for instance sorted by length."
        ]
    waited = min((each.waited / each.span for each in spans), default=0.0)
    if waited > _SLOW:
        return [
            f"Every rank spends at least {waited:.0%} in collectives, and none is late: larger "
            "batches, gradient accumulation with no_sync, or compression send less."
        ]
    return ["No rank is late, and collectives take little of the time."]


def _cause(slow: RankTimes, others: Sequence[RankTimes]) -> str:
    """Why the straggler is late, as far as its times tell, and what to change."""
    if slow.longest[0] > slow.made_wait / 2:
        return (
            "Most of it is that one wait, not every step: look at what the rank did just before, "
            "such as the first step's preparations, a checkpoint, or a pause of its host. In a "
            "longer run it counts for less."
        )
    most = {
        name: seconds - max((each.phases.get(name, 0.0) for each in others), default=0.0)
        for name, seconds in slow.phases.items()
    }
    name = max(most, key=lambda phase: most[phase], default="")
    if not name or most[name] < slow.made_wait / 2:
        return (
            "Its own code takes longer in every step: look for work that only this rank does, "
            "larger samples, and other processes on its host or its cores."
        )
    share = max((each.phases.get(name, 0.0) for each in others), default=0.0)
    text = (
        f"The phase {name} takes {_percent(slow.phases[name], slow)} of its time, and at most "
        f"{_percent(share, slow)} of the other ranks'"
    )
    if name == "data":
        return (
            f"{text}: give its DataLoader more workers (num_workers), samples of the same size as "
            "the others', or data on a disk as fast as theirs."
        )
    return f"{text}: look for work that only this rank does there."


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


def _time(event: Event) -> float:
    return float(event["ts"])


def _seconds(event: Event, begin: float) -> float:
    """The part of the event after `begin`."""
    return float(max(0.0, event["ts"] + event["dur"] - max(begin, event["ts"])) / 1e6)


def _percent(seconds: float, of_rank: RankTimes) -> str:
    return f"{seconds / of_rank.span:.1%}" if of_rank.span else "-"
