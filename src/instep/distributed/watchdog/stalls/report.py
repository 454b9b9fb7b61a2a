"""The report about a stall: the states of all ranks in one text (pure).

A state has "what", a predicate about one rank ("waits in all_reduce at train.py:97"), and perhaps
"waited", the seconds of its wait, and "stacks".
"""

from __future__ import annotations

from collections.abc import Mapping

from instep.distributed.watchdog.connection import Message
from instep.process.exit_status import format_ranks, group_ranks

_PLURALS = {"is": "are", "waits": "wait", "runs": "run", "has": "have", "sleeps": "sleep"} | {
    "does": "do"
}
_MIB = 1 << 20
SHORTEST_RANGE = 3
"""So many ranks without a gap, or more, are shown as a range in a report."""


def format_states(states: Mapping[int, Message]) -> str:
    """One line about all ranks; like states are merged, those that wait come first."""
    parts = []
    for group in merge(states):
        first = states[group[0]]
        what = first["what"]
        if len(group) > 1:
            verb, space, rest = what.partition(" ")
            what = _PLURALS.get(verb, verb) + space + rest
        waited = max((states[rank].get("waited") or 0.0 for rank in group), default=0.0)
        duration = f" for {format_seconds(waited)}" if first.get("waited") is not None else ""
        parts.append(f"{format_ranks(group, shortest_range=SHORTEST_RANGE)} {what}{duration}")
    return "; ".join(parts)


def merge(states: Mapping[int, Message]) -> list[list[int]]:
    """The ranks in groups of equal states, those that wait first."""
    groups = group_ranks(
        {rank: (state.get("waited") is None, state["what"]) for rank, state in states.items()}
    )
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], groups[key][0]))]


def format_seconds(seconds: float) -> str:
    """ "0.4 s", "31 s", "2 min 5 s"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes >= 2 else f"{round(seconds)} s"


def format_stacks(states: Mapping[int, Message]) -> str:
    """The stacks of the ranks that sent some; equal ones once."""
    sent = {rank: state["stacks"] for rank, state in states.items() if state.get("stacks")}
    texts = []
    for stacks, ranks in group_ranks(sent).items():
        about = states[ranks[0]]["what"]
        shown = format_ranks(ranks, shortest_range=SHORTEST_RANGE)
        texts.append(f"---- {shown}: {about}\n{stacks.rstrip()}\n")
    return "\n".join(texts)


def are_slow(states: Mapping[int, Message]) -> bool:
    """Whether all ranks that others wait for are slow, and not stuck: also those that have entered
    a collective only now."""
    longest = max((state.get("waited") or 0.0 for state in states.values()), default=0.0)
    awaited = [state for state in states.values() if (state.get("waited") or 0.0) < longest / 2]
    return bool(awaited) and all(
        state.get("is_slow") or state.get("waited") is not None for state in awaited
    )


def ranks_with_stacks(states: Mapping[int, Message]) -> list[int]:
    """The ranks that sent stacks."""
    return [rank for rank, state in sorted(states.items()) if state.get("stacks")]


def format_progress(states: Mapping[int, Message]) -> str:
    """A table: for each rank its step, steps per second, the share of its time in collectives, and
    its memory. The rank that waits least is the slowest."""
    rows = []
    shares = {
        rank: state["waiting_share"]
        for rank, state in states.items()
        if state.get("waiting_share") is not None
    }
    slowest = min(shares, key=lambda rank: shares[rank]) if len(shares) > 1 else None
    clear = slowest is not None and max(shares.values()) - shares[slowest] > 0.1
    for rank, state in sorted(states.items()):
        rate, unit = state.get("rate"), state.get("rate_unit", "steps")
        share = shares.get(rank)
        rows.append(
            f"  rank {rank}: epoch {state.get('epoch', 0)}, step {state.get('step', 0)}"
            + ("" if rate is None else f", {rate:.3g} {unit}/s")
            + ("" if share is None else f", {share:.0%} of its time in collectives")
            + f", {state.get('memory', 0) // _MIB} MiB"
            + (" (the slowest)" if clear and rank == slowest else "")
        )
    return "\n".join(rows)
