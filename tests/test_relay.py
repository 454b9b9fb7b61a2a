"""What rank 0 does for all ranks: once, whatever its size, and whatever becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from instep.errors import CollectiveTimeoutError, DisagreementError, UneditedError
from instep.process import settings
from instep.unedited.rank0_relay import MESSAGE_BYTES, Relay

SIZE = 3


def on_all(body: Callable[[Relay, int], Any], store: dist.Store | None = None) -> list[Any]:
    """What `body(relay, rank)` returns or raises on each rank; the ranks are threads."""
    store = store or dist.HashStore()

    def of(rank: int) -> Any:
        try:
            return body(Relay(store, rank, SIZE), rank)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(SIZE) as ranks:
        return [done.result(20) for done in [ranks.submit(of, rank) for rank in range(SIZE)]]


@pytest.mark.parametrize(
    "size", [0, 1, MESSAGE_BYTES - 1, MESSAGE_BYTES, 3 * MESSAGE_BYTES + 1, 20 << 20]
)
def test_a_value_of_any_size_arrives_and_is_deleted(size: int) -> None:
    store = dist.HashStore()
    received = on_all(
        lambda relay, rank: relay.run_on_rank0("a command", lambda: bytes([rank]) * size), store
    )
    assert received == [bytes(size)] * SIZE
    assert store.num_keys() == 0


class Untold:
    def __reduce__(self) -> tuple[object, ...]:
        raise OSError("no way to say this")


class UnreadError(Exception):
    """Unpickling calls it with one argument."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("value", "kind"), [(Untold(), "Untold"), (lambda: 0, "function"), (threading.Lock(), "lock")]
)
def test_a_value_that_does_not_pickle_is_an_error_on_all_ranks(value: object, kind: str) -> None:
    for error in on_all(lambda relay, _: relay.run_on_rank0("a command", lambda: value)):
        assert isinstance(error, UneditedError)
        assert f"a value of type {kind}" in str(error)


@pytest.mark.parametrize(
    ("error", "theirs"),
    [
        (FileNotFoundError(2, "No such file", "x"), FileNotFoundError),
        (UnreadError(1, 2), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (SystemExit(3), SystemExit),
    ],
)
def test_an_exception_of_any_kind_is_raised_on_all_ranks(
    error: BaseException, theirs: type[BaseException]
) -> None:
    def fails() -> None:
        raise error

    store = dist.HashStore()
    first, *others = on_all(lambda relay, _: relay.run_on_rank0("a command", fails), store)
    assert first is error
    assert [type(other) for other in others] == [theirs] * 2
    assert store.num_keys() == 0


class Sync:
    """Counts the ranks that have applied the state of rank 0's files."""

    def __init__(self) -> None:
        self.applied: list[str] = []

    def capture(self) -> str:
        return "files"

    def apply(self, state: str) -> None:
        self.applied.append(state)


def test_rank_0_goes_on_when_the_others_have_applied_its_files() -> None:
    sync, store = Sync(), dist.HashStore()

    def body(relay: Relay, rank: int) -> int:
        for _ in range(3):
            relay.run_on_rank0("a command", lambda: 0, wait_first=True, sync=sync)
        return len(sync.applied)

    assert on_all(body, store)[0] == 3 * (SIZE - 1)
    assert store.num_keys() == 0


def test_rank_0_does_not_wait_for_others_that_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.unedited.rank0_relay.WAIT_SECONDS", 0.0)
    relay, sync = Relay(dist.HashStore(), 0, SIZE), Sync()
    monkeypatch.setattr(sync, "capture", lambda: pytest.fail("there are no others"))
    relay.before_waiting = relay.close
    channel = relay.channel("of a process")
    assert channel.run_on_rank0("polling", lambda: 7, sync=sync) == 7
    assert not channel.is_replicated()


def test_a_rank_waits_as_long_as_it_takes_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "timeout", lambda: timedelta(0))

    def body(relay: Relay, rank: int) -> int:
        relay.has_timeout = False
        if rank == 0:
            relay._wait([f"1/here{other}" for other in range(1, SIZE)], None)
        return relay.run_on_rank0("steps", lambda: 5)

    assert on_all(body) == [5] * SIZE


def test_lanes_have_numbers_of_their_own() -> None:
    def body(relay: Relay, rank: int) -> list[str]:
        channels = ("a", "b") if rank else ("b", "a")
        received = {
            name: relay.channel(name).run_on_rank0("reading", lambda n=name: f"{n}0")
            for name in channels
        }
        return [received["a"], received["b"]]

    assert on_all(body) == [["a0", "b0"]] * SIZE


@pytest.mark.parametrize(
    ("theirs", "mine", "alike"),
    [
        ("mkdir run-12:55:03", "mkdir run-12:55:04", True),
        ("rm /tmp/tmpabcdefgh/x", "rm /tmp/tmpijklmn_p/x", True),
        ("git add x", "git commit", False),
    ],
)
def test_ranks_mean_the_same_command_or_say_so(theirs: str, mine: str, alike: bool) -> None:
    def body(relay: Relay, rank: int) -> int:
        return relay.run_on_rank0("a command", lambda: rank, mine if rank else theirs)

    first, *others = on_all(body)
    assert first == 0
    if alike:
        assert others == [0, 0]
    for error in () if alike else others:
        assert isinstance(error, DisagreementError)
        assert f"a command {theirs} on rank 0" in str(error)


def test_a_rank_hears_what_rank_0_does_instead() -> None:
    def body(relay: Relay, rank: int) -> int:
        return relay.run_on_rank0("a command" if rank else "a line of input", lambda: 0)

    first, *others = on_all(body)
    assert first == 0
    for number, error in enumerate(others, 1):
        assert isinstance(error, DisagreementError)
        assert f"a line of input on rank 0; a command on rank {number}" in str(error)


def test_a_rank_hears_that_rank_0_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_TIMEOUT", "1")
    first, *others = on_all(lambda relay, rank: rank and relay.run_on_rank0("a command", lambda: 0))
    assert first == 0
    for error in others:
        assert isinstance(error, CollectiveTimeoutError)
        assert "rank 0" in str(error)
        assert "a command" in str(error)
