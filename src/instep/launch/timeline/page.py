"""One self-contained HTML page that draws a timeline: no script or style from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

from instep.launch.timeline.events import (
    Event,
    RankTimes,
    begin_of,
    find_slow,
    format_result,
    group_by_collective,
)
from instep.launch.timeline.template import PAGE

MOST = 200_000
"""The page draws this many blocks, the longest."""
_LANES = 4
"""Of collectives in the background, which run beside one another."""


class _Kind(NamedTuple):
    """A kind of block. The colors are told apart by the colour-blind, too (Okabe and Ito)."""

    key: str
    title: str
    words: str
    """The color of words on it."""
    light: str
    dark: str


_KINDS = (
    _Kind("late", "waits for a late rank", "#fff", "#c04f00", "#d55e00"),
    _Kind("comm", "communicates, and waits for it", "#fff", "#0072b2", "#2b8fd0"),
    _Kind("aside", "communicates in the background", "#000", "#56b4e9", "#7cc6f0"),
    _Kind("data", "loads data", "#000", "#cc79a7", "#d68db5"),
    _Kind("forward", "forward", "#fff", "#007f5c", "#009e73"),
    _Kind("backward", "backward", "#000", "#7fcfb6", "#66c2a5"),
    _Kind("optimizer", "optimizer", "#000", "#e6c619", "#f0e442"),
    _Kind("other", "evaluation, checkpoint, and other phases", "#fff", "#6b5b95", "#8f7fc0"),
)
_NUMBERS = {kind.key: number for number, kind in enumerate(_KINDS)}
_LATE, _COMM, _ASIDE = range(3)


class _Block(NamedTuple):
    """What is drawn for an event, or for a part of it."""

    start: float
    length: float
    kind: int
    event: Event
    collective: int = -1
    """Its number, equal on all of its ranks; -1: none."""
    late: int = -1
    """The rank that came last; -1: nobody is late."""


def format_html(title: str, events: Iterable[Event], times: Sequence[RankTimes]) -> str:
    """The page."""
    straggler = find_slow(times)
    data = _page_data([*events], straggler)
    # "</script>" in a string would end the script.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return PAGE.substitute(
        title=escape(title),
        summary=_summary(times, straggler),
        legend=_legend(sorted({int(block[3]) for block in data["events"]})),
        data=text,
        classes="\n".join(f".k-{k.key} {{ background: var(--{k.key}) }}" for k in _KINDS[1:]),
        light="; ".join([f"--{k.key}: {k.light}" for k in _KINDS] + ["--late2: #f0a878"]),
        dark="; ".join([f"--{k.key}: {k.dark}" for k in _KINDS] + ["--late2: #7a3500"]),
    )


def _page_data(events: Sequence[Event], straggler: RankTimes | None) -> dict[str, Any]:
    """What the page draws. A rank has a lane for its main thread and below it, where it has
    collectives in the background, lanes for these."""
    blocks = _blocks(events)
    lanes: list[dict[str, Any]] = []
    names: dict[str, int] = {}
    calls: dict[str, int] = {"": 0}
    drawn: list[list[float]] = []
    lane = 0
    for rank in sorted({event["pid"] for event in events}):
        count = 1
        ends = [0.0] * _LANES
        for start, length, kind, event, collective, late in blocks.get(rank, ()):
            below = 0
            if kind == _ASIDE:
                below = next((k for k, stop in enumerate(ends) if stop <= start), _LANES - 1)
                ends[below] = start + length
                below += 1
                count = max(count, below + 1)
            of_call = event.get("args", {})
            drawn.append(
                [
                    *(lane + below, round(start, 1), round(length, 1), kind),
                    names.setdefault(event["name"], len(names)),
                    calls.setdefault(of_call.get("call", ""), len(calls)),
                    *(collective, late, of_call.get("epoch", -1), of_call.get("step", -1)),
                ]
            )
        is_late = straggler is not None and straggler.rank == rank
        lanes.append({"rank": rank, "lanes": count, "late": is_late})
        lane += count
    return {
        "ranks": lanes,
        "events": drawn,
        "names": [*names],
        "calls": [*calls],
        "kinds": [kind[:3] for kind in _KINDS],
        "begin": begin_of(events),
        "end": max(1.0, *(event["ts"] + event["dur"] for event in events)) if events else 1.0,
    }


def _blocks(events: Sequence[Event]) -> dict[int, list[_Block]]:
    """The blocks of each rank by their begin, phases first."""
    found: list[_Block] = []
    for event in events:
        if event["cat"] == "phase":
            kind = _kind_of_phase(event["name"])
            found.append(_Block(event["ts"], event["dur"], kind, event))
    for number, members in enumerate(group_by_collective(events).values()):
        last = members[-1]
        for event in members:
            stop = event["ts"] + event["dur"]
            since = max(event["ts"], stop - event["args"]["waited_us"])
            come = min(stop, max(since, last["ts"]))
            if since > event["ts"]:
                found.append(_Block(event["ts"], event["dur"], _ASIDE, event, number))
            if come > since:
                found.append(_Block(since, come - since, _LATE, event, number, last["pid"]))
            if stop > come:
                found.append(_Block(come, stop - come, _COMM, event, number))
    if len(found) > MOST:
        found = sorted(found, key=lambda block: -block.length)[:MOST]
    blocks: dict[int, list[_Block]] = {}
    for block in sorted(found, key=lambda block: (block.start, block.kind <= _ASIDE)):
        blocks.setdefault(block.event["pid"], []).append(block)
    return blocks


def _kind_of_phase(name: str) -> int:
    return _NUMBERS.get(name, _NUMBERS["other"])


def _legend(kinds: Iterable[int]) -> str:
    shown = [f'<span><i class="k-{_KINDS[k].key}"></i>{_KINDS[k].title}</span>' for k in kinds]
    own = '<i style="background: var(--own)"></i>'
    return "".join([*shown, f"<span>{own}all other code of the script</span>"])


def _summary(times: Sequence[RankTimes], straggler: RankTimes | None) -> str:
    advice = "".join(f'<p class="advice">{escape(line)}</p>\n' for line in format_result(times))
    rows = "".join(_row(each, each is straggler) for each in times[:64])
    if not rows:
        return advice
    more = f"<p>The first 64 of {len(times)} ranks.</p>" if len(times) > 64 else ""
    heads = "<th>rank</th><th class=bar>where its time went</th><th>waited for late ranks</th>"
    heads += "<th>communicated</th><th>came last</th><th>made others wait</th>"
    return f"{advice}<table><tr>{heads}</tr>{rows}</table>{more}"


def _row(times: RankTimes, is_late: bool) -> str:
    span = times.span or 1.0
    late, communicated = times.waited_for_late, times.waited - times.waited_for_late
    parts = [(_KINDS[_LATE], late), (_KINDS[_COMM], communicated)]
    computed = [(_kind_of_phase(name), seconds) for name, seconds in times.computed_in.items()]
    parts += [(_KINDS[number], seconds) for number, seconds in sorted(computed)]
    bar = "".join(
        f'<span class="k-{kind.key}" style="width: {seconds / span:.2%}" '
        f'title="{kind.title}: {seconds:.2f} s"></span>'
        for kind, seconds in parts
    )
    return (
        f"<tr{' class=late' if is_late else ''}><td>{times.rank}{' (late)' if is_late else ''}</td>"
        f"<td class=bar><div>{bar}</div></td><td>{late:.2f} s ({late / span:.0%})</td>"
        f"<td>{communicated:.2f} s ({communicated / span:.0%})</td>"
        f"<td>{times.last} of {times.collectives}</td><td>{times.made_wait:.2f} s</td></tr>"
    )
