"""horovodrun's flags of elastic jobs."""

from __future__ import annotations

import argparse
import os

from instep.errors import CommandLineError
from instep.launch.elastic.driver import ElasticOptions

_FLAGS = {
    ("--min-np", "--min-num-proc"): "ranks without which an elastic job cannot go on",
    ("--max-np", "--max-num-proc"): "ranks that an elastic job has at most",
    ("--slots-per-host", "--slots"): "slots of hosts for which the script prints none",
    ("--elastic-timeout",): "seconds for which the job waits for hosts (600)",
    ("--reset-limit",): "how often the ranks may meet again",
}
_SCRIPT = "--host-discovery-script"
_COOLDOWN = "--blacklist-cooldown-range"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add them to the parser of horovodrun."""
    for flags, text in _FLAGS.items():
        parser.add_argument(*flags, dest=_attribute(flags[0]), metavar="N", help=text)
    parser.add_argument(_SCRIPT, metavar="SCRIPT", help="prints a line HOST:SLOTS for each host")
    parser.add_argument(
        _COOLDOWN, nargs=2, metavar="X", help="seconds without ranks for a host with a failure"
    )


def is_elastic(asked: argparse.Namespace) -> bool:
    """Whether the job's ranks may change."""
    return bool(asked.min_np or asked.max_np or asked.host_discovery_script)


def parse(asked: argparse.Namespace, size: int) -> ElasticOptions:
    """The options of an elastic job of `size` ranks. Raises CommandLineError."""
    least = number(asked, "--min-np") or size
    most = number(asked, "--max-np")
    if least > size or (most is not None and most < size):
        raise CommandLineError(
            f"an elastic job begins with -np {size} ranks: --min-np is at most as many, and "
            "--max-np at least."
        )
    if asked.elastic_timeout is None:
        asked.elastic_timeout = os.environ.get("HOROVOD_ELASTIC_TIMEOUT")
    timeout = number(asked, "--elastic-timeout")
    return ElasticOptions(
        size,
        least,
        most,
        reset_limit=number(asked, "--reset-limit"),
        timeout=600.0 if timeout is None else float(timeout),
        cooldown=_cooldown(asked.blacklist_cooldown_range),
    )


def _cooldown(words: list[str] | None) -> tuple[float, float] | None:
    if words is None:
        return None
    try:
        shortest, longest = map(float, words)
        if 0 < shortest <= longest:
            return shortest, longest
    except ValueError:
        pass
    raise CommandLineError(
        f"{_COOLDOWN} takes two numbers of seconds, the smaller one first, not {' '.join(words)}."
    )


def number(asked: argparse.Namespace, flag: str) -> int | None:
    """The value of a flag; None without it. Raises CommandLineError for what is no number."""
    value = getattr(asked, _attribute(flag))
    if value is None:
        return None
    if not value.isdecimal():
        raise CommandLineError(f"{flag} is a whole number, not {value!r}.")
    return int(value)


def _attribute(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
