"""What the ranks of the pool keep from one test to the next: nothing."""

from __future__ import annotations

import math

import pytest

from pool import run


def replaced_pi(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(math, "pi", 3.0)
    return math.pi


def pi() -> float:
    return math.pi


def test_what_a_rank_changes_by_monkeypatch_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(2, replaced_pi, monkeypatch=monkeypatch) == [3.0, 3.0]
    assert run(2, pi) == [math.pi, math.pi]
