"""The messages from a watcher to the hub: their types and fields (pure)."""

from __future__ import annotations

import signal

from instep.distributed.watchdog.connection import Message
from instep.distributed.watchdog.mismatch import are_steps
from instep.process.exit_status import describe_exit

COMMON_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Those that take effect at the same point of the program on every rank: the first always, the
others where an unedited script handles them."""
_TEXT, _NUMBER, _FLAG = (str,), (int,), (bool,)
_NUMBER_OR_NONE, _SECONDS = (int, type(None)), (float, int)
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "hello": {"rank": _NUMBER, "host": _TEXT, "token": _TEXT},
    "ended": {"code": _NUMBER_OR_NONE},
    "finished": {},
    "at_exit": {},
    "failing": {},
    "fails_alike": {},
    "failed": {
        "rank": _NUMBER,
        "host": _TEXT,
        "code": _NUMBER_OR_NONE,
        "description": _TEXT,
        "silent": _FLAG,
    },
    "waits": {"op": _TEXT, "call": _TEXT, "line": _TEXT, "members": (list,)},
    "resumed": {},
    "is_late": {},
    "collectives": {"steps": (list,)},
    "interrupt": {"signal": _NUMBER},
    "paused": {"signal": _NUMBER, "count": _NUMBER},
    "progress": {"signal": _NUMBER, "count": _NUMBER, "line": _TEXT},
    "interrupted": {"signal": _NUMBER, "line": _TEXT},
    "stalled": {"level": _NUMBER, "waited": _SECONDS, "line": _TEXT},
    "stall_over": {"waited": _SECONDS},
    "state": {"request": _NUMBER, "what": _TEXT, "stacks": _TEXT},
    "question": {"number": _NUMBER, "kind": _TEXT},
}
_OPTIONAL_FIELDS: dict[str, tuple[type, ...]] = {
    "is_consequence": _FLAG,
    "awaited_rank": _NUMBER_OR_NONE,
    "last_position": _TEXT,
    "time": (float, type(None)),
    "waited": _SECONDS,
    "waiting_share": _SECONDS,
    "rate": _SECONDS,
    "rate_unit": _TEXT,
    "epoch": _NUMBER,
    "step": _NUMBER,
    "memory": _NUMBER,
    "is_slow": _FLAG,
}
"""Of "failed" and "state"."""


def is_valid(message: Message, size: int, rank: int | None = None) -> bool:
    """Whether the watcher of `rank` may send this message in a job of `size` ranks."""
    fields = _FIELDS.get(message["type"])
    if fields is None or not all(type(message.get(key)) in types for key, types in fields.items()):
        return False
    if not all(type(message[k]) in types for k, types in _OPTIONAL_FIELDS.items() if k in message):
        return False
    if not are_steps(message.get("steps", [])):
        return False
    if message.get("signal", signal.SIGINT) not in COMMON_SIGNALS:
        return False
    if rank is not None and message.get("rank", rank) != rank:
        return False
    if not all(_is_range(each, size) for each in message.get("members", ())):
        return False
    return "rank" not in fields or 0 <= message["rank"] < size


def _is_range(value: object, size: int) -> bool:
    """Whether it is the first and the last of some ranks of the job."""
    if not isinstance(value, list) or [type(each) for each in value] != [int, int]:
        return False
    return bool(0 <= value[0] <= value[1] < size)


def failure_fields(
    rank: int, host: str, code: int | None, description: str | None = None, *, silent: bool
) -> Message:
    """The fields of "failed"; `silent`: the rank could not report its failure itself."""
    description = describe_exit(code) if description is None else description
    return {
        "rank": rank,
        "host": host,
        "code": code,
        "description": description,
        "silent": silent,
    }
