"""What a watcher may say to the hub: which facts belong to which word (pure)."""

from __future__ import annotations

from instep.distributed.watchdog.connection import Said

_TEXT, _NUMBER, _FLAG = (str,), (int,), (bool,)
_NUMBER_OR_NONE = (int, type(None))
_FACTS: dict[str, dict[str, tuple[type, ...]]] = {
    "hello": {"rank": _NUMBER, "host": _TEXT, "token": _TEXT},
    "ended": {"code": _NUMBER_OR_NONE},
    "finished": {},
    "exits": {},
    "failed": {
        "rank": _NUMBER,
        "host": _TEXT,
        "code": _NUMBER_OR_NONE,
        "what": _TEXT,
        "silent": _FLAG,
    },
    "waits": {"op": _TEXT, "call": _TEXT, "line": _TEXT, "members": (list,)},
    "moves": {},
    "interrupt": {},
    "halted": {"begun": _NUMBER},
    "point": {"begun": _NUMBER, "line": _TEXT},
    "taken": {"line": _TEXT},
}
_MAY: dict[str, tuple[type, ...]] = {
    "follows": _FLAG,
    "missed": _NUMBER_OR_NONE,
    "told": _TEXT,
    "moment": (float, type(None)),
}
"""Facts that some say of a failure and some do not."""


def is_sound(said: Said, size: int, rank: int | None = None) -> bool:
    """Whether these are a word and facts that the watcher of `rank` may say among `size` ranks."""
    facts = _FACTS.get(said["word"])
    if facts is None or not all(type(said.get(name)) in types for name, types in facts.items()):
        return False
    if not all(type(said[name]) in types for name, types in _MAY.items() if name in said):
        return False
    if rank is not None and said.get("rank", rank) != rank:
        return False
    ranks = [*said.get("members", ()), *([said["rank"]] if "rank" in facts else ())]
    return all(type(each) is int and 0 <= each < size for each in ranks)
