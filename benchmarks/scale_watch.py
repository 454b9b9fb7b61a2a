"""Simulated watchers of many ranks, which speak to the real hub in a process of its own.

A watcher here is a socket of one process, with the messages that `watchdog/watcher.py` sends. The
hub is `watchdog/hub/hub.py` as rank 0's watcher runs it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import selectors
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.hub.hub import Hub
from instep.process.procfs import read_stat

TOKEN = "0123456789abcdef"
STEPS = [
    ["0:world", n, 7, f"all_reduce(SUM, float32, 1048576 elements) at /home/user/train.py:{n}"]
    for n in range(64)
]
"""What a flight record holds: as many collectives as a watcher sends."""
TICKS = os.sysconf("SC_CLK_TCK")


def serve(listener: socket.socket, size: int) -> None:
    """Run the hub until its work is done."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    loop = EventLoop()
    Hub(loop, size, listener, TOKEN)
    loop.run()


class Watchers:
    """The connections of all watchers of a job to its hub."""

    def __init__(self, port: int, size: int, limit: float, *, at_once: bool) -> None:
        """`at_once`: all connect before any of them says who it is."""
        self.size, self.limit = size, limit
        self.received: Counter[str] = Counter()
        """Messages from the hub since the last `reset`, by type."""
        self.bytes_in = self.bytes_out = self.messages_out = 0
        self.closed: set[int] = set()
        """The ranks whose connection the hub has closed."""
        self._selector = selectors.DefaultSelector()
        self._partial: dict[int, bytes] = {}
        self.sockets: dict[int, socket.socket] = {}
        for rank in range(size):
            sock = self.sockets[rank] = socket.create_connection(("127.0.0.1", port))
            self._selector.register(sock, selectors.EVENT_READ, rank)
            if not at_once:
                self.say_hello(rank)
                list(self.events(0))

    def say_hello(self, rank: int) -> None:
        """Which rank this watcher watches."""
        self.send(rank, "hello", rank=rank, host=f"host{rank // 8}", token=TOKEN)

    def send(self, of: int, message_type: str, **fields: object) -> None:
        """Send a message of the watcher of rank `of`."""
        if of in self.closed:
            return
        data = json.dumps({"type": message_type, **fields}).encode() + b"\n"
        self.bytes_out += len(data)
        self.messages_out += 1
        try:
            self.sockets[of].sendall(data)
        except OSError:
            self.close(of)

    def close(self, rank: int) -> None:
        """End one watcher."""
        if rank not in self.closed:
            self.closed.add(rank)
            self._selector.unregister(self.sockets[rank])
            self.sockets[rank].close()

    def events(self, seconds: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """What arrives within `seconds`: ranks and messages."""
        for key, _ in self._selector.select(seconds):
            rank = key.data
            try:
                data = self.sockets[rank].recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                self.close(rank)
                continue
            self.bytes_in += len(data)
            *lines, self._partial[rank] = (self._partial.get(rank, b"") + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self.received[message["type"]] += 1
                yield rank, message

    def reset(self) -> None:
        """Count anew."""
        self.received.clear()
        self.bytes_in = self.bytes_out = self.messages_out = 0


class Watched:
    """One job's hub and watchers, with the time that each exchange takes."""

    def __init__(self, process: Any, watchers: Watchers) -> None:
        self.process, self.watchers = process, watchers
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        self._before = ended.ru_utime + ended.ru_stime

    def measure(self, *exchange: Any) -> dict[str, Any]:
        """Seconds, the hub's processor seconds, messages and bytes of an exchange."""
        watchers = self.watchers
        watchers.reset()
        begin, ticks = time.perf_counter(), self._ticks()
        finished = exchange[0](self, *exchange[1:])
        seconds = time.perf_counter() - begin
        return {
            "seconds": round(seconds, 3) if finished else None,
            "hub_seconds": round((self._ticks() - ticks) / TICKS, 2),
            "to_hub": watchers.messages_out,
            "to_hub_bytes": watchers.bytes_out,
            "from_hub": sum(watchers.received.values()),
            "from_hub_bytes": watchers.bytes_in,
        }

    def _ticks(self) -> int:
        if self.process.is_alive():
            return read_stat(self.process.pid).cpu_ticks
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return round((ended.ru_utime + ended.ru_stime - self._before) * TICKS)

    def pump(self, done: Any) -> bool:
        """Handle messages until `done` says so; False where that takes longer than the limit."""
        end = time.monotonic() + self.watchers.limit
        while not done(None, None):
            if time.monotonic() > end:
                return False
            for rank, message in self.watchers.events(0.01):
                done(rank, message)
        return True

    def settle(self) -> bool:
        """Return when the hub has handled all that it was sent."""
        watchers = self.watchers
        reached: set[int] = set()
        asked = 0.0

        def done(rank: int | None, message: Any) -> bool:
            nonlocal asked
            if rank is not None and message["type"] == "check_often":
                reached.add(rank)
            if rank is None and time.monotonic() > asked + 0.2:
                asked = time.monotonic()
                open_ones = set(range(watchers.size)) - watchers.closed - reached
                watchers.send(min(open_ones, default=0), "at_exit")  # a hello may come after it
            return len(reached | watchers.closed) >= watchers.size

        return self.pump(done)


@contextmanager
def watched(size: int, limit: float, *, at_once: bool = False) -> Iterator[Watched]:
    """A job whose watchers have connected."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        process = multiprocessing.get_context("fork").Process(target=serve, args=(listener, size))
        process.start()
        port = listener.getsockname()[1]
    watchers = Watchers(port, size, limit, at_once=at_once)
    try:
        yield Watched(process, watchers)
    finally:
        for rank in range(size):
            watchers.close(rank)
        process.kill()
        process.join()


def meet(job: Watched) -> bool:
    """All watchers connect at once; then each says which rank it watches."""
    for rank in range(job.watchers.size):
        job.watchers.say_hello(rank)
    return job.settle()


def wait_in_vain(job: Watched) -> bool:
    """Rank 0 writes a file for some seconds; all others wait for it in a collective."""
    line = "/home/user/train.py:97"
    members = [[0, job.watchers.size - 1]]
    wait = {"op": "all_reduce in group 0", "call": "all_reduce", "line": line, "members": members}
    for rank in range(1, job.watchers.size):
        job.watchers.send(rank, "waits", **wait)
    for rank in range(1, job.watchers.size):
        job.watchers.send(rank, "resumed")
    return job.settle()


def report_stall(job: Watched) -> bool:
    """A rank has waited for long: each watcher describes its rank."""
    answered: set[int] = set()
    job.watchers.send(1, "stalled", level=1, waited=60.0, line="train.py:97")

    def done(rank: int | None, message: Any) -> bool:
        if rank is not None and message["type"] == "describe":
            answered.add(rank)
            fields: dict[str, Any] = {"what": "waits in all_reduce at train.py:97", "waited": 60.0}
            if rank == 0:
                fields = {"what": "is at save.py:12", "stacks": "x" * 4000}
            fields = {"request": message["request"], "stacks": ""} | fields
            job.watchers.send(rank, "state", **fields)
        return len(answered) >= job.watchers.size - len(job.watchers.closed)

    finished = job.pump(done) and job.settle()
    job.watchers.send(1, "stall_over", waited=61.0)
    return finished


def compare(job: Watched) -> bool:
    """A rank is late: each watcher says which collectives its rank has entered."""
    answered: set[int] = set()
    job.watchers.send(1, "is_late")

    def done(rank: int | None, message: Any) -> bool:
        if rank is not None and message["type"] == "get_collectives":
            answered.add(rank)
            job.watchers.send(rank, "collectives", steps=STEPS)
        return len(answered) >= job.watchers.size - len(job.watchers.closed)

    return job.pump(done) and job.settle()


def interrupt(job: Watched) -> bool:
    """Ctrl-C."""
    over: set[int] = set()
    job.watchers.send(0, "interrupt", signal=signal.SIGINT)

    def done(rank: int | None, message: Any) -> bool:
        if rank is not None and message["type"] == "pause":
            job.watchers.send(rank, "paused", signal=signal.SIGINT, count=100)
        elif rank is not None and message["type"] == "interrupt_at":
            over.add(rank)
            job.watchers.send(rank, "interrupted", signal=signal.SIGINT, line="train.py:97")
        return len(over) >= job.watchers.size - len(job.watchers.closed)

    return job.pump(done) and job.settle()


def end(job: Watched) -> bool:
    """Every rank comes to the end of its script, and exits."""
    for rank in range(job.watchers.size):
        job.watchers.send(rank, "finished")
    for rank in range(job.watchers.size):
        job.watchers.send(rank, "ended", code=0)
        if rank % 8:  # the others take a moment longer
            job.watchers.close(rank)

    return job.pump(lambda rank, message: not job.process.is_alive())


def fail(job: Watched) -> bool:
    """Rank 3 raises an error; the others are ended."""
    watchers = job.watchers
    steps = [*STEPS[:-1], [*STEPS[-1][:3], "all_reduce at train.py:1"]]
    failure = {"rank": 3, "host": "host0", "code": 1, "silent": False}
    watchers.send(3, "failed", **failure, description="failed (exit code 1)", is_consequence=False)

    def done(rank: int | None, message: Any) -> bool:
        if rank is None:
            return not job.process.is_alive()
        if message["type"] == "get_collectives":
            watchers.send(rank, "collectives", steps=steps if rank == 3 else STEPS)
        elif message["type"] == "failed" and rank == 3:
            watchers.send(3, "ended", code=1)
        elif message["type"] == "exit" and rank != 3:
            watchers.send(rank, "ended", code=1)
        elif message["type"] == "over" and rank == 0:
            for other in range(watchers.size):
                watchers.close(other)
            job.process.kill()  # rank 0's watcher stops the loop by now
        return False

    return job.pump(done)


def measure(size: int, limit: float) -> dict[str, Any]:
    """All exchanges of a job of `size` ranks."""
    rows: dict[str, Any] = {}
    with watched(size, limit, at_once=True) as job:
        rows["meet"] = job.measure(meet) | {"closed": len(job.watchers.closed)}
    exchanges: list[tuple[str, Any]] = [
        ("one rank is slow", wait_in_vain),
        ("a stall is reported", report_stall),
        ("collectives are compared", compare),
        ("Ctrl-C", interrupt),
        ("all ranks end", end),
        ("a rank fails", fail),
    ]
    for name, exchange in exchanges:
        with watched(size, limit) as job:
            job.settle()
            rows[name] = job.measure(exchange)
    return rows
