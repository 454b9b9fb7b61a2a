"""What a job of many ranks sends, opens and computes: it does not grow faster than the job."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from itertools import count

import pytest
import torch.distributed as dist

from counted import counted_calls
from instep.distributed.errors import AuthenticationError, SharedMemoryError
from instep.distributed.identity.world import World
from instep.distributed.negotiation import connections
from instep.distributed.negotiation.channels import encode
from instep.distributed.negotiation.message_table import MessageTable, Request
from instep.distributed.rendezvous import arrival_wait, join_check
from instep.distributed.rendezvous.arrival_wait import ArrivalWait
from instep.distributed.watchdog.connection import Connection
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.hub.deadlocks import SUSPECT_SECONDS, find_deadlock
from instep.distributed.watchdog.hub.hub import Hub
from instep.distributed.watchdog.messages import is_valid
from instep.distributed.watchdog.mismatch import EnteredCollectives
from instep.launch.multi_node.clients import ClientListener
from instep.launch.multi_node.connections import SupervisorConnections
from instep.launch.multi_node.hosts import JobInfo
from instep.launch.remote import remote_job
from instep.launch.remote.remote_job import RemoteOptions, run_on_hosts
from instep.process.exit_status import format_ranks, rank_ranges, ranks_of

pytestmark = pytest.mark.slow

MANY = 150
KEY = b"k" * 32


# --------------------------------------------------------------------------------------- the hub


class Timers(EventLoop):
    """An event loop whose timers the test runs itself."""

    def __init__(self) -> None:
        super().__init__()
        self.due: list[tuple[float, object]] = []

    def call_later(self, seconds: float, callback: object) -> None:  # type: ignore[override]
        self.due.append((seconds, callback))


class Watched:
    """A hub, and the sockets of its watchers, which the test lets it read."""

    def __init__(self, size: int) -> None:
        self.loop = Timers()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.hub = Hub(self.loop, size, self.listener, "token")
        self.ours: list[socket.socket] = []
        self.theirs: list[socket.socket] = []
        for _ in range(size):
            ours, theirs = socket.socketpair()
            ours.settimeout(20)
            self.ours.append(ours)
            self.theirs.append(theirs)
            self.hub.new_connections.add(theirs)

    def tell(self, of: int, message_type: str, **fields: object) -> None:
        """Let the hub handle a message of the watcher of rank `of`."""
        Connection(self.ours[of]).send(message_type, **fields)
        self.loop._selector.get_key(self.theirs[of]).data()

    def say_hello(self) -> None:
        """All watchers say which rank they watch."""
        for rank in range(len(self.ours)):
            self.tell(rank, "hello", rank=rank, host="a", token="token")

    def said_to(self, rank: int) -> list[dict[str, object]]:
        """What the hub has sent to a watcher since the last time."""
        self.ours[rank].setblocking(False)
        try:
            return Connection(self.ours[rank]).recv() or []
        except BlockingIOError:
            return []

    def close(self) -> None:
        for each in (self.listener, *self.ours, *self.theirs):
            each.close()


@pytest.fixture
def watched() -> Iterator[Watched]:
    job = Watched(MANY)
    yield job
    job.close()


def test_watchers_that_all_connect_before_any_says_who_it_is_are_not_taken_for_strangers(
    watched: Watched,
) -> None:
    watched.say_hello()
    assert watched.hub.job.connected_ranks() == set(range(MANY))


def test_strangers_are_limited_once_all_ranks_are_connected(watched: Watched) -> None:
    watched.say_hello()
    ends = [socket.socketpair() for _ in range(65)]
    for _, theirs in ends:
        watched.hub.new_connections.add(theirs)
    assert [theirs.fileno() < 0 for _, theirs in ends] == [True] + [False] * 64
    for pair in ends:
        for each in pair:
            each.close()


def test_the_ends_of_many_ranks_are_told_together(watched: Watched) -> None:
    watched.say_hello()
    for rank in range(1, MANY):
        watched.tell(rank, "ended", code=0)
    told = [m["ranks"] for m in watched.said_to(0) if m["type"] == "ended"]
    assert told == [[[1, 1]]]  # the first at once
    for _, callback in watched.loop.due:
        if callback == watched.hub.ends._tell:
            watched.hub.ends._tell()
            break
    told = [m["ranks"] for m in watched.said_to(0) if m["type"] == "ended"]
    assert told == [[[2, MANY - 1]]]


def test_waits_of_many_ranks_are_looked_at_once(watched: Watched) -> None:
    watched.say_hello()
    wait = {"op": "barrier", "call": "barrier", "line": "a:1", "members": [[0, MANY - 1]]}
    for rank in range(1, MANY):
        watched.tell(rank, "waits", **wait)
    assert [seconds for seconds, _ in watched.loop.due].count(SUSPECT_SECONDS) == 1


def test_what_a_rank_has_entered_is_read_once() -> None:
    read = count()

    class Steps(list[list[object]]):
        def __iter__(self) -> Iterator[list[object]]:
            next(read)
            return super().__iter__()

    entered = EnteredCollectives()
    for rank in range(MANY):
        entered.add(rank, Steps([["0", 1, 7, "barrier at a:1"]]))
        assert entered.find_mismatch() == {}
    entered.add(MANY, Steps([["0", 1, 8, "broadcast at a:2"]]))
    assert entered.find_mismatch() == {
        "barrier at a:1": [*range(MANY)],
        "broadcast at a:2": [MANY],
    }
    assert next(read) == MANY + 1


def test_what_ranks_tell_after_a_disagreement_was_reported_is_not_compared_again(
    watched: Watched, capfd: pytest.CaptureFixture[str]
) -> None:
    watched.say_hello()
    watched.tell(0, "failed", rank=0, host="a", code=1, description="failed", silent=False)
    for rank, op in enumerate(("barrier", "broadcast", "barrier")):
        watched.tell(rank, "collectives", steps=[["0", 1, len(op), f"{op} at a:{rank}"]])
    assert "barrier at a:0 on rank 0; broadcast at a:1 on rank 1" in capfd.readouterr().err
    entered = watched.hub._mismatch._entered
    assert entered.find_mismatch() == {"barrier at a:0": [0], "broadcast at a:1": [1]}


def test_members_are_ranges() -> None:
    assert rank_ranges(range(10_000)) == [[0, 9999]]
    assert rank_ranges([7, 3, 4, 5, 9]) == [[3, 5], [7, 7], [9, 9]]
    assert ranks_of([[3, 5], [7, 7]]) == {3, 4, 5, 7}
    wait = {"type": "waits", "op": "barrier", "call": "barrier", "line": "a:1"}
    assert is_valid(wait | {"members": [[0, 9999]]}, 10_000)
    for wrong in ([[0, 10_000]], [[-1, 0]], [[2, 1]], [0, 1], [[0]], [[0, True]], ["01"]):
        assert not is_valid(wait | {"members": wrong}, 10_000), wrong


def test_ranks_of_one_collective_are_looked_at_together() -> None:
    members = [[0, 9999]]
    waits = {rank: {"op": f"op{rank % 2}", "members": members} for rank in range(10_000)}
    assert find_deadlock(waits) == [*range(10_000)]
    del waits[17]
    assert find_deadlock(waits) == []


@pytest.mark.parametrize("is_ring", [False, True])
def test_a_chain_of_ranks_is_looked_at_once(is_ring: bool) -> None:
    calls: list[int] = []
    for size in (100, 200, 400):
        next_to = {rank: [*sorted({rank, (rank + 1) % size})] for rank in range(size - 1 + is_ring)}
        waits = {
            rank: {"op": "barrier", "members": rank_ranges(members)}
            for rank, members in next_to.items()
        }
        with counted_calls() as counted:
            found = find_deadlock(waits)
        assert found == ([*range(size)] if is_ring else [])
        calls.append(counted.python + counted.c)
    assert calls[2] - calls[1] == pytest.approx(2 * (calls[1] - calls[0]), rel=0.1)


def test_many_ranks_are_shown_as_ranges() -> None:
    assert format_ranks([0, 1, 2, 5]) == "ranks 0, 1, 2, 5"
    assert format_ranks({*range(10_000)} - {3}) == "ranks 0, 1, 2, 4-9999"


# ---------------------------------------------------------------------------------- negotiation


def test_ranks_that_all_connect_before_any_is_known_are_not_taken_for_strangers() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=MANY) as listener:
        port = listener.getsockname()[1]
        accepted: list[list[socket.socket]] = []
        accepting = threading.Thread(
            target=lambda: accepted.append(connections.accept_ranks(listener, MANY, KEY))
        )
        accepting.start()
        sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(1, MANY)]
        known = []
        for rank, each in enumerate(sockets, start=1):
            end = connections.Connection(each.detach())
            connections.answer_challenge(end, KEY)
            connections.deliver_challenge(end, KEY)
            end.send_bytes(str(rank).encode())
            known.append(end)
        accepting.join(20)
    assert len(accepted[0]) == MANY - 1
    for each in (*known, *accepted[0]):
        each.close()


def test_a_request_of_many_ranks_is_as_short_as_one_of_few() -> None:
    few, many = (
        Request("weight", "allreduce", tuple(range(size)), op="sum") for size in (2, 10_000)
    )
    assert len(encode(many)) < len(encode(few)) + 8
    assert many.key == Request("weight", "broadcast", range(10_000)).key
    assert Request("weight", "allreduce", (0, 2, 5)).members == (0, 2, 5)


def test_a_request_that_others_wait_for_costs_no_look_at_all_members(monkeypatch) -> None:
    looks = []
    missing = MessageTable._missing
    monkeypatch.setattr(
        MessageTable, "_missing", lambda table, key: looks.append(key) or missing(table, key)
    )
    table = MessageTable(MANY)
    request = Request("weight", "allreduce", tuple(range(MANY)), op="sum")
    responses = [table.add(rank, request, 0.0) for rank in range(MANY)]
    assert [len(each) for each in responses] == [0] * (MANY - 1) + [1]
    assert len(looks) == 1


# ------------------------------------------------------------------------------- the rendezvous


class Counted:
    """A store that counts the bytes of one rank."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.bytes = store, 0

    def set(self, key: str, value: bytes) -> None:
        self.bytes += len(value)
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self.store.get(key)
        self.bytes += len(value)
        return value

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


def join_all(store: dist.Store, size: int) -> tuple[list[bytes | None], int]:
    """The keys of all ranks, and the bytes of the last one."""
    counted = [Counted(store) for _ in range(size)]
    keys: list[bytes | None] = [None] * size

    def join(rank: int) -> None:
        world = World(rank=rank, size=size, local_rank=rank, local_size=size, source="test")
        keys[rank] = join_check.check_join(
            counted[rank],
            world,
            timedelta(seconds=20),
            secret=KEY,  # type: ignore[arg-type]
        ).key

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return keys, counted[-1].bytes


def test_what_a_rank_reads_to_join_does_not_grow_with_the_job() -> None:
    few, many = (join_all(dist.HashStore(), size) for size in (3, 40))
    for keys, _ in (few, many):
        assert len(set(keys)) == 1
        assert keys[0] is not None
    assert few[0][0] != many[0][0]
    assert many[1] < few[1] + 100


def test_the_result_of_an_earlier_job_is_refused(monkeypatch) -> None:
    store = dist.HashStore()
    join_all(store, 2)
    world = World(rank=1, size=2, local_rank=1, local_size=2, source="test")
    with pytest.raises(AuthenticationError, match="instep/join"):
        join_check.check_join(store, world, timedelta(seconds=5), secret=KEY)


def test_many_ranks_ask_less_often_each(monkeypatch) -> None:
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(arrival_wait.time, "sleep", sleep)
    monkeypatch.setattr(arrival_wait.time, "monotonic", lambda: now[0])
    ArrivalWait(100_000, 1000.0, prints=False).until(lambda: True if now[0] > 500 else None)
    assert max(pauses) * arrival_wait._ATTEMPTS_PER_SECOND >= 100_000


# ---------------------------------------------------------------------------- several supervisors


def test_participants_that_all_connect_before_any_speaks_are_not_taken_for_strangers() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=MANY) as listener:
        clients = ClientListener(listener, None, MANY)
        sockets = [socket.create_connection(listener.getsockname()) for _ in range(MANY)]
        while len(clients._clients) < MANY:
            assert clients.next_request() is None
        found = []
        for number, each in enumerate(sockets):
            each.sendall(json.dumps({"number": number}).encode() + b"\n")
            request = clients.next_request()
            assert request is not None
            found.append(request.message["number"])
            request.connection.close()
            each.close()
        clients.close()
    assert found == [*range(MANY)]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def test_the_answer_to_a_supervisor_that_asks_goes_to_it_alone() -> None:
    pairs = {node: tcp_pair() for node in (1, 2)}
    info = JobInfo(
        "job", (1, 1, 1), 0, "127.0.0.1", 1, True, KEY, names=("a", "b", "c"),
        connections={node: ours for node, (ours, _) in pairs.items()},
    )  # fmt: skip
    supervisor = SupervisorConnections(info)
    pairs[1][1].sendall(b'{"asks": true}\n')
    assert supervisor.receive(1) == []
    assert pairs[1][1].recv(100) == b'{"answers": true}\n'
    pairs[2][1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pairs[2][1].recv(100)
    for pair in pairs.values():
        for each in pair:
            each.close()


def test_a_host_name_is_looked_up_once(monkeypatch) -> None:
    asked: list[str] = []

    class Agent:
        def __init__(self, host: str, command: list[str], request: object) -> None:
            assert command[0] == "ssh"

        def close(self) -> None:
            pass

    monkeypatch.setattr(remote_job, "is_this_host", lambda host: bool(asked.append(host)))
    monkeypatch.setattr(remote_job, "_choose_endpoint", lambda options: ("a", 1))
    monkeypatch.setattr(remote_job, "_Agent", Agent)
    monkeypatch.setattr(remote_job, "_wait", lambda agents, signals: 0)
    slots = {f"host{node}": 8 for node in range(5)}
    assert run_on_hosts(RemoteOptions(slots, ("train.py",))) == 0
    assert asked == [*slots]


# -------------------------------------------------------------------------------------- open files

GROUP = """
import os, sys, threading
from datetime import timedelta
import torch, torch.distributed as dist
from instep.distributed.gloo_connections import connect_when_used
connect_when_used(int(sys.argv[1]))
below, reads = dist.HashStore(), []
class Store(dist.Store):
    def set(self, key, value):
        below.set(key, value)
    def get(self, key):
        reads.append(key)
        return below.get(key)
    def wait(self, keys, timeout=None):
        below.wait(keys)
stores = [Store() for _ in range(6)]
def run(rank):
    group = dist.ProcessGroupGloo(stores[rank], rank, 6, timedelta(seconds=20))
    made.wait()
    if rank == 0:
        print(len(reads), flush=True)
    made.wait()
    ones = torch.ones(3)
    group.allreduce([ones]).wait()
    assert ones.tolist() == [6.0] * 3
    made.wait()
made = threading.Barrier(6)
threads = [threading.Thread(target=run, args=(rank,)) for rank in range(6)]
[each.start() for each in threads], [each.join() for each in threads]
os._exit(0 if len(reads) <= 36 else 1)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "reads"), [(6, "36"), (1000, "0")])
def test_ranks_of_a_large_world_connect_when_they_have_something_to_say(size, reads) -> None:
    environ = {name: value for name, value in os.environ.items() if "GLOO" not in name}
    done = subprocess.run(
        [sys.executable, "-c", GROUP, str(size)], capture_output=True, text=True, env=environ
    )
    assert (done.returncode, done.stdout.strip()) == (0, reads), done.stderr


@pytest.mark.launch
@pytest.mark.parametrize("starts", ["run", "ranks"])
def test_a_job_whose_files_may_not_grow_is_told_of_the_limit(tmp_path, starts) -> None:
    (tmp_path / "train.py").write_text("import instep\ninstep.barrier()\n")
    command = ["-m", "instep", "run", "-n", "2", "train.py"] if starts == "run" else ["train.py"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 20; exec "$@"', "sh", sys.executable, *command], cwd=tmp_path,
        env=os.environ | ({} if starts == "run" else {"RANK": "0", "WORLD_SIZE": "2"}),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert "a file may have 10240 bytes here (ulimit -f), and the memory" in done.stderr


def test_memory_that_a_limit_forbids_is_not_blamed_on_buckets() -> None:
    assert "Raise `ulimit -f` on this host." in str(SharedMemoryError(9, 2, "File too large"))
    assert "Use smaller buckets" in str(SharedMemoryError(9, 2, "No space left on device"))


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (40, int(sys.argv[1])))
from instep.distributed.file_limit import allow_open_files
for count in 30, 200:
    allow_open_files(count)
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("most", "allowed", "line"),
    [
        (400, ["40 400", "200 400"], ""),
        (90, ["40 90", "90 90"], "instep: this process may open 90 files (ulimit -Hn); a job of"),
    ],
)
def test_a_process_may_open_as_many_files_as_its_job_needs(most, allowed, line) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < most:
        pytest.skip("the hard limit of this process is lower")
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES, str(most)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == allowed
    assert done.stderr.startswith(line)
    assert bool(done.stderr) == bool(line)


def test_a_supervisor_starts_more_ranks_than_it_may_open_files_for_at_first(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('here')\n")
    few = "import resource as r; n = r.RLIMIT_NOFILE; r.setrlimit(n, (32, r.getrlimit(n)[1]))"
    start = f"{few}; from instep.cli import main; import sys; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", start, "run", "-n", "6", "--plain", script],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    others = [f"[{rank}] here" for rank in range(1, 6)]
    assert sorted(done.stdout.splitlines()) == [*others, "here"]
