"""A process that exits waits for the threads of Gloo that run, and for no others."""

import hashlib
import threading
from pathlib import Path

import pytest

from instep.distributed import gloo_threads


def start_gloo_thread(work):
    """A thread of the name that torch gives to Gloo's; returns it once it is at work."""
    at_work = threading.Event()

    def run():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        at_work.set()
        work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert at_work.wait(60)
    return thread


def test_the_exit_waits_until_a_thread_of_gloo_has_released_what_it_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gloo_threads, "_SECONDS", 100)
    released = []
    content = bytes(1 << 28)

    def work():
        hashlib.sha256(content)  # without the GIL
        released.append(True)  # with it

    thread = start_gloo_thread(work)
    gloo_threads._wait()
    assert released == [True]
    thread.join()


def test_the_exit_does_not_wait_for_a_thread_of_gloo_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gloo_threads, "_SECONDS", 1000)
    peer_answers = threading.Event()
    thread = start_gloo_thread(peer_answers.wait)
    gloo_threads._wait()
    assert thread.is_alive()
    peer_answers.set()
    thread.join()
