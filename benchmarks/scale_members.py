"""Simulated members of large jobs: of the coordinator, the rendezvous and the launcher.

Members are threads, sockets or small processes; the other side is the code of instep as it runs in
a job. The launcher has the open files that most systems allow a process at first.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from instep.distributed.identity import endpoints
from instep.distributed.negotiation import connections
from instep.distributed.negotiation.channels import encode
from instep.distributed.negotiation.message_table import Request
from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.launch import job_run
from instep.launch.job import Job
from instep.launch.multi_node.connections import HostResult, SupervisorConnections
from instep.launch.multi_node.hosts import JobInfo
from instep.launch.multi_node.supervisor_rendezvous import Participant, join_rendezvous
from instep.launch.ranks.rank_process import RankProcess, RankSpec
from instep.launch.remote.remote_job import RemoteOptions, run_on_hosts
from instep.process import settings
from instep.process.failures.record import RankExit

KEY = b"k" * 32
USUAL_FILES = 1024
"""What most systems let a process open before it asks for more."""
_MEMBERS, _CONNECTIONS = 128, 8
"""Ranks in a process, and its connections to the store."""
SSH = """#!/bin/sh
case "$*" in
  *import*) echo 12345 ;;
  *) echo "instep agent"; head -n 1 > /dev/null ;;
esac
"""


def in_threads(count: int, run: Callable[[int], None]) -> int:
    """Call `run` with 0 to `count` - 1 at once, and return how many of the calls failed."""
    failed = []

    def one(number: int) -> None:
        try:
            run(number)
        except Exception as error:
            failed.append(error)

    threading.stack_size(1 << 18)
    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(failed)


# ------------------------------------------------------------------------------- the coordinator


def _coordinate(listener: socket.socket, own: socket.socket, size: int, ready: Any) -> None:
    from instep.distributed.negotiation.channels import CoordinatorChannel
    from instep.distributed.negotiation.coordinator import StallCheck, _Coordinator

    ready.set()
    sockets = [own, *connections.accept_ranks(listener, size, KEY)]
    _Coordinator([CoordinatorChannel(each) for each in sockets], StallCheck(None, None)).run()


def coordinator(size: int, limit: float) -> dict[str, Any]:
    """Horovod's coordinator: all ranks connect at once, then submit one collective."""
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        forked = multiprocessing.get_context("fork")
        ready = forked.Event()
        serve = forked.Process(target=_coordinate, args=(listener, theirs, size, ready))
        serve.start()
        port = listener.getsockname()[1]
    theirs.close()
    sockets = {0: ours}
    try:
        ready.wait()  # it imports torch
        begin = time.perf_counter()

        def connect(number: int) -> None:
            rank = number + 1
            sockets[rank] = connections.connect_to_rank_0("127.0.0.1", port, rank, KEY)

        failed = in_threads(size - 1, connect)
        row: dict[str, Any] = {"connect_s": round(time.perf_counter() - begin, 3), "lost": failed}
        if not failed:
            row |= _one_collective(sockets, limit)
        return row
    finally:
        serve.kill()
        for each in sockets.values():
            each.close()


def _one_collective(sockets: dict[int, socket.socket], limit: float) -> dict[str, Any]:
    line = "/home/user/train.py:97"
    request = Request(
        "allreduce.layer1.weight", "allreduce", tuple(range(len(sockets))), "torch.float32", "cpu",
        ((1024, 1024),), "mean", line=line,
    )  # fmt: skip
    sent = encode(request)
    selector = selectors.DefaultSelector()
    received = dict.fromkeys(sockets, b"")
    begin = time.perf_counter()
    for rank, each in sockets.items():
        each.sendall(sent)
        selector.register(each, selectors.EVENT_READ, rank)
    waiting = set(sockets)
    while waiting and time.perf_counter() < begin + limit:
        for key, _ in selector.select(0.1):
            received[key.data] += sockets[key.data].recv(1 << 20)
            answer = received[key.data]
            if len(answer) >= 4 and len(answer) - 4 >= struct.unpack("!I", answer[:4])[0]:
                waiting.discard(key.data)
    seconds = time.perf_counter() - begin
    return {
        "collective_s": None if waiting else round(seconds, 3),
        "to_coordinator_bytes": len(sent) * len(sockets),
        "from_coordinator_bytes": sum(map(len, received.values())),
    }


# -------------------------------------------------------------------------------- the rendezvous


class CountedStore:
    """A store, with the messages to it and their bytes."""

    def __init__(self, store: Any) -> None:
        self.store, self.messages, self.bytes = store, 0, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        if not callable(method):
            return method

        def counted(*arguments: Any) -> Any:
            result = method(*arguments)
            self.messages += 1
            self.bytes += _length(arguments) + _length(result)
            return result

        return counted


def _length(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple):
        return sum(map(_length, value))
    return 8


def _join(ranks: range, size: int, port: int, limit: float, begin: Any, sums: Any) -> None:
    """The join check of some ranks, each in a thread of this process."""
    import torch.distributed as dist

    # To connect, torch looks up a name, which in one process all would do one after the other.
    seconds, count = timedelta(seconds=limit), min(len(ranks), _CONNECTIONS)
    connections = [
        dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=seconds)
        for _ in range(count)
    ]
    clients = [CountedStore(connections[k % count]) for k in range(len(ranks))]
    begin.wait()
    failed = in_threads(len(ranks), lambda k: _check_join(clients[k], ranks[k], size, seconds))
    sums.put((failed, *_counted(clients)))


def _check_join(store: CountedStore, rank: int, size: int, seconds: timedelta) -> None:
    from instep.distributed.identity.world import World
    from instep.distributed.rendezvous import join_check

    world = World(rank=rank, size=size, local_rank=rank, local_size=size, source="scale")
    join_check.check_join(store, world, seconds, secret=KEY)  # type: ignore[arg-type]


def _counted(clients: Sequence[CountedStore]) -> tuple[int, int]:
    return sum(each.messages for each in clients), sum(each.bytes for each in clients)


def store(size: int, limit: float) -> dict[str, Any]:
    """The join check of all ranks, in several processes, at the store of rank 0 in this one."""
    from instep.distributed.rendezvous import listening, stores

    listener = listening.bind("127.0.0.1")
    port = listener.getsockname()[1]
    forked = multiprocessing.get_context("fork")
    sums = forked.Queue()
    parts = [range(k, min(k + _MEMBERS, size)) for k in range(1, size, _MEMBERS)]
    begin = forked.Barrier(len(parts) + 1)
    members = [
        forked.Process(target=_join, args=(ranks, size, port, limit, begin, sums))
        for ranks in parts
    ]
    for each in members:
        each.start()
    seconds = timedelta(seconds=limit)
    own = CountedStore(stores.serve_store(listener, size, seconds))
    begin.wait()
    began = time.perf_counter()
    failed = in_threads(1, lambda rank: _check_join(own, rank, size, seconds))
    found = [(failed, *_counted([own])), *(sums.get(timeout=limit) for _ in members)]
    join_s = round(time.perf_counter() - began, 3)
    for each in members:
        each.join()
    failures, messages, sizes = zip(*found, strict=True)
    counted = {"failed": sum(failures), "messages": sum(messages), "bytes": sum(sizes)}
    return {"join_s": join_s} | counted


def supervisors(size: int, limit: float) -> dict[str, Any]:
    """The rendezvous of one supervisor, or rank, for each member; then their results."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    endpoint = endpoints.Address("127.0.0.1", port, "scale")
    fingerprint = JobFingerprint.of_command(["train.py"])
    joined: dict[int, Any] = {}

    def join(number: int) -> None:
        mine = Participant(number, size, fingerprint, 8)
        joined[number] = join_rendezvous(endpoint, mine, lambda all_of_them: {}, limit, "host")

    begin = time.perf_counter()
    failed = in_threads(size, join)
    row: dict[str, Any] = {"join_s": round(time.perf_counter() - begin, 3), "failed": failed}
    if failed:
        return row
    names = tuple(f"host{node}" for node in range(size))

    def end(node: int) -> None:
        info = JobInfo(
            "job", (8,) * size, node, "127.0.0.1", port, True, KEY, names=names,
            connections=joined[node].connections,
        )  # fmt: skip
        ends = [RankExit(8 * node + k, 1.7e9 + k / 7, 0, False, "", True) for k in range(8)]
        SupervisorConnections(info).exchange_results(HostResult(ends, []))

    if size <= 512:  # of 2,048 the results are of 16,384 ranks
        begin = time.perf_counter()
        row |= {"result_failed": in_threads(size, end)}
        row["result_s"] = round(time.perf_counter() - begin, 3)
    return row


# --------------------------------------------------------------------------------- the launcher


def _start_light(spec: RankSpec) -> RankProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            ["/bin/sh", "-c", "echo started; sleep 1"], stdin=subprocess.DEVNULL,
            stdout=spec.streams[0], stderr=spec.streams[1], start_new_session=True,
            pass_fds=[theirs.fileno()],
        )  # fmt: skip
    return RankProcess(spec, process, ours)


def one_host(size: int, limit: float) -> dict[str, Any]:
    """`instep run -n SIZE` with small processes for ranks, from start to end."""
    os.environ[settings.RANK_LIMIT.name] = "none"  # none of them imports PyTorch
    begin = time.perf_counter()
    out = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    started: list[float] = []
    try:
        result = job_run.run_job(
            Job(size, (__file__,)),
            started=lambda: started.append(time.perf_counter() - begin),
            start=_start_light,
        )
    finally:
        os.dup2(out, 1)
    return {
        "started_s": round(started[0], 3),
        "ended_s": round(time.perf_counter() - begin, 3),
        "code": result.code,
    }


def logins(size: int, limit: float) -> dict[str, Any]:
    """`instep run --hosts` with SIZE hosts, whose logins end at once."""
    with tempfile.TemporaryDirectory() as folder:
        ssh = Path(folder, "ssh")
        ssh.write_text(SSH)
        ssh.chmod(0o700)
        begin = time.perf_counter()
        # Numbers: to look up names takes the time of the network's name server.
        slots = {f"198.18.{node // 250}.{node % 250 + 1}": 8 for node in range(size)}
        code = run_on_hosts(RemoteOptions(slots, ("train.py",), ssh=(str(ssh),)))
        return {"seconds": round(time.perf_counter() - begin, 3), "code": code}


PARTS = {
    part.__name__: part for part in (coordinator, store, supervisors, one_host, logins)
}  # fmt: skip

if __name__ == "__main__":
    part, size, limit = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    if part in ("one_host", "logins"):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL_FILES, hard))
    print(json.dumps(PARTS[part](size, limit)))
