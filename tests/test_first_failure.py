"""Which of several failures the watch names as the first."""

from __future__ import annotations

from typing import Any

import pytest

from instep.distributed.watchdog.hub.first_failure import RESOLUTION, find_first_failure
from instep.distributed.watchdog.messages import failure_fields


def died(rank: int, code: int, time: float | None, host: str = "a") -> dict[str, Any]:
    return failure_fields(rank, host, code, silent=True) | {"time": time}


def failed(rank: int, **facts: Any) -> dict[str, Any]:
    return failure_fields(rank, "a", 1, "failed", silent=False) | facts


KILLED = "was killed by SIGKILL"
BOTH = f"{KILLED}, at the same moment as rank"


@pytest.mark.parametrize(
    ("news", "rank", "what"),
    [
        ([failed(1, is_consequence=True), failed(0)], 0, "failed"),
        ([failed(1, is_consequence=True)], 1, "failed"),
        ([failed(1), died(0, -9, 1.0)], 0, KILLED),
        # The launcher has killed rank 0, whose watcher was quicker to say so.
        ([died(0, -9, 1.02), died(1, -9, 1.0)], 1, KILLED),
        ([died(0, -9, 1.0), died(1, -11, 1.0)], 1, "was killed by SIGSEGV"),
        ([died(0, -15, 1.0), died(1, 3, None)], 1, "exited with code 3"),
        ([died(0, -9, 1.0 + RESOLUTION / 2), died(1, -9, 1.0)], 0, f"{BOTH} 1"),
        (
            [died(2, -9, None), died(1, -9, 1.0), died(0, -9, 1.1)],
            2,
            f"{BOTH} 1",
        ),
        ([died(1, -9, None), died(0, -9, None)], 1, f"{BOTH} 0"),
        ([died(1, -9, 5.0), died(0, -9, 1.0, host="b")], 1, KILLED),  # two hosts, two clocks
    ],
)
def test_the_failure_that_is_named(news: list[dict[str, Any]], rank: int, what: str) -> None:
    named = find_first_failure(news)
    assert (named["rank"], named["description"]) == (rank, what)
