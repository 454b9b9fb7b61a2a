"""A process that does not know the job's secret says nothing in its name, and ends nothing."""

from __future__ import annotations

import ipaddress
import json
import multiprocessing
import os
import pickle
import random
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

import instep
from instep.distributed import interfaces
from instep.distributed.errors import PeerLeftError
from instep.distributed.identity import authentication, endpoints, launchers
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import (
    bootstrap,
    port_file,
    secret_handover,
    signed_pickle,
    stores,
)
from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.distributed.rendezvous.verified_store import VerifiedStore
from instep.errors import AuthenticationError, LaunchVariablesError, RendezvousError
from instep.launch.multi_node.supervisor_rendezvous import Participant, join_rendezvous
from instep.process.failures.tracebacks import awaited_rank
from launching import LAUNCHER_VARIABLES, free_port, wait_until
from pool import ranks

pytestmark = pytest.mark.slow

forked = multiprocessing.get_context("fork")
KEY = authentication.make_secret()


class Code:
    """Runs where it is unpickled."""

    ran: list[str] = []  # noqa: RUF012

    def __reduce__(self):
        return self.ran.append, ("ran",)


# ---------------------------------------------------------------------------- a verified store


def test_what_a_rank_writes_is_read_back_by_python_and_by_torch():
    store = VerifiedStore(dist.HashStore(), KEY)
    prefixed = dist.PrefixStore("torch", store)  # C++ above, which calls back
    for name, ours in (("python", store), ("c++", prefixed)):
        ours.set("text", name)
        ours.set("empty", b"")
        ours.multi_set(["a", "b"], [b"1", b"2"])
        ours.wait(["text", "empty"])
        assert ours.get("text") == name.encode()
        assert ours.get("empty") == b""
        assert ours.multi_get(["b", "a"]) == [b"2", b"1"]
        assert ours.compare_set("new", "", "first") == b"first"
        assert ours.compare_set("new", "first", "second") == b"second"
        assert ours.compare_set("new", "first", "third") == b"second"
        assert ours.add("count", 2) == 2
        assert ours.check(["a", "count"])
        assert ours.delete_key("a")
        assert not ours.check(["a"])
        assert ours.num_keys() > 3
        assert not ours.has_extended_api()


def test_a_store_whose_process_has_ended_names_its_rank_and_logs_nothing(capfd):
    """torch logs 20 lines of C++ for each call, and says no rank."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    below = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    store = VerifiedStore(below, KEY, keeper=0)
    store.set("here", "x")
    del server
    for call in (lambda: store.get("here"), lambda: store.check(["here"]), store.num_keys):
        with pytest.raises(PeerLeftError, match="rank 0 has ended") as raised:
            call()
        assert awaited_rank(raised.value) == 0
    with pytest.raises(dist.DistNetworkError):
        VerifiedStore(below, KEY).wait(["here"])
    assert capfd.readouterr().err == ""
    with pytest.raises(dist.DistNetworkError):
        below.check(["here"])
    assert "frame #1" in capfd.readouterr().err  # others' warnings are logged as before


def test_what_a_stranger_writes_is_not_read():
    below = dist.HashStore()
    store = VerifiedStore(below, KEY)
    below.set("bare", pickle.dumps(Code()))
    store.set("mine", "old")
    below.set("moved", below.get("mine"))  # the right mark, of another key's value
    VerifiedStore(below, authentication.make_secret()).set("guessed", "x")
    below.set("torch/bare", pickle.dumps(Code()))
    with pytest.raises(AuthenticationError):
        dist.PrefixStore("torch", store).get("bare")
    for key in ("bare", "moved", "guessed"):
        with pytest.raises(AuthenticationError, match=f"'{key}' was not written by this job"):
            store.get(key)
        with pytest.raises(AuthenticationError):
            store.multi_get([key])
        with pytest.raises(AuthenticationError):
            store.compare_set(key, "", "mine")


# ------------------------------------------------------------------------------------- objects


@ranks(2)
def test_a_pickle_without_the_jobs_mark_is_not_loaded():
    for received in (pickle.dumps(Code()), authentication.sign(KEY, pickle.dumps(Code())), b""):
        with pytest.raises(AuthenticationError, match="an object of another rank"):
            signed_pickle.loads(received)
    assert Code.ran == []
    assert instep.all_gather_object((instep.rank, "x" * instep.rank)) == [(0, ""), (1, "x")]


@ranks(2)
def test_all_ranks_of_a_job_have_one_key_and_a_verified_store():
    assert len(set(instep.all_gather_object(bootstrap.key()))) == 1
    store, bare = bootstrap.store(), dist.distributed_c10d._get_default_store()
    if instep.rank == 0:
        bare.set("strangers/told", pickle.dumps(Code()))
        store.set("strangers/mine", "mine")
    assert store.get("strangers/mine") == b"mine"
    with pytest.raises(AuthenticationError):
        store.get("strangers/told")


# ------------------------------------------------------------------------------------- secrets


def test_where_a_secret_comes_from(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert authentication.read_secret({}) is None
    of_mpirun = {"OMPI_MCA_orte_precondition_transports": "0123456789abcdef-0123456789abcdef"}
    found = {authentication.read_secret(of_mpirun)}
    (tmp_path / ".instep").mkdir()
    file = tmp_path / ".instep" / "secret"
    file.touch(0o600)
    file.write_text("correct horse battery\n")
    found.add(authentication.read_secret(of_mpirun))
    found.add(authentication.read_secret({"INSTEP_SECRET": "staple correct horse"}))
    assert len(found) == 3
    assert None not in found
    with pytest.raises(LaunchVariablesError, match=r"INSTEP_SECRET is too short: it takes 16"):
        authentication.read_secret({"INSTEP_SECRET": "guess"})
    file.chmod(0o640)
    with pytest.raises(LaunchVariablesError, match=r"other users may open it.*chmod 600"):
        authentication.read_secret({})


def test_a_note_is_read_from_a_private_file_only(tmp_path):
    fifo, other, open_to_all = tmp_path / "fifo", tmp_path / "other", tmp_path / "open"
    os.mkfifo(fifo, 0o600)  # to read it would wait for a writer
    with pytest.raises(RendezvousError, match="it is no regular file"):
        port_file.read(str(fifo))
    open_to_all.write_text("1 00 127.0.0.1")
    open_to_all.chmod(0o644)
    with pytest.raises(RendezvousError, match="other users may open it"):
        port_file.read(str(open_to_all))
    other.touch(0o600)
    other.write_text("no note \udc80", errors="surrogateescape")
    with pytest.raises(RendezvousError, match="it is no port file"):
        port_file.read(str(other))


# -------------------------------------------------------------- ranks of one host, and only they


@pytest.fixture
def nothing_given(tmp_path, monkeypatch):
    """As bare processes are started: nobody has told them a secret."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in list(os.environ):
        if name.startswith(LAUNCHER_VARIABLES) or name == "INSTEP_SECRET":
            monkeypatch.delenv(name)


def opened_by_each(port, size=3):
    """What each of so many ranks meets with at this port of the loopback interface."""

    def come(rank):
        world, method = World(rank, size, rank, size), f"tcp://127.0.0.1:{port}"
        return stores.open_store(method, world, timedelta(seconds=30))

    with ThreadPoolExecutor(size) as threads:
        return [*threads.map(come, range(size))]


def test_bare_ranks_of_one_host_mark_what_they_write_before_they_have_met(nothing_given):
    found = opened_by_each(free_port())
    keys = {each.key for each in found}
    assert len(keys) == 1
    assert None not in keys
    written = [found[0].store.get(key) for key in ("instep/fingerprint1", "instep/join")]
    assert [text.startswith(authentication.MAGIC) for text in written] == [True, True]


def test_without_a_secret_for_all_hosts_nothing_is_marked(nothing_given, monkeypatch):
    monkeypatch.setattr(interfaces, "is_loopback", lambda _: False)
    assert [each.key for each in opened_by_each(free_port())] == [None] * 3


def test_which_ranks_are_known_to_be_of_one_host():
    bare = {"RANK": "0", "WORLD_SIZE": "2"}
    for told, known in ((bare, False), (bare | {"LOCAL_WORLD_SIZE": "2"}, True)):
        assert launchers.is_one_host(launchers.detect(told), told) is known
    told = bare | {"LOCAL_WORLD_SIZE": "1"}
    assert not launchers.is_one_host(launchers.detect(told), told)
    assert not launchers.is_one_host(World(0, 2, 0, 2), bare | {"LOCAL_WORLD_SIZE": "2"})
    hosts = ("127.0.0.1", "::1", "localhost", "10.0.0.1", socket.gethostname())
    assert [interfaces.is_loopback(host) for host in hosts] == [True] * 3 + [False] * 2


@contextmanager
def another_user(body, port):
    """What comes of it in a process of another user, which is there inside of the block."""
    ours, theirs = forked.Pipe()

    def live():
        os.setuid(65534)
        theirs.send(body(port))
        theirs.recv()

    process = forked.Process(target=live)
    process.start()
    try:
        assert ours.poll(30)
        yield ours.recv()
    finally:
        ours.send("end")
        process.join()


def called(port):
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(f"\0instep/127.0.0.1:{port}")
        return line.recv(64)


held: list[socket.socket] = []


def held_by_a_stranger(port):
    held.append(socket.socket(socket.AF_UNIX))
    held[0].bind(f"\0instep/127.0.0.1:{port}")
    held[0].listen()


@pytest.mark.skipif(os.getuid() != 0, reason="takes two users")
def test_the_secret_is_handed_to_this_user_only_and_taken_from_no_other():
    port, secret = free_port(), authentication.make_secret()
    with secret_handover.serve_secret("127.0.0.1", port, secret):
        assert secret_handover.request_secret("127.0.0.1", port) == secret
        with another_user(called, port) as told:
            assert told == b""
        assert secret_handover.request_secret("127.0.0.1", port) == secret
    with pytest.raises(ConnectionRefusedError):
        secret_handover.request_secret("127.0.0.1", port)
    with another_user(held_by_a_stranger, port):
        with pytest.raises(AuthenticationError, match="belongs to another process"):
            secret_handover.request_secret("127.0.0.1", port)
        with pytest.raises(AuthenticationError, match="or take another port"):
            secret_handover.serve_secret("127.0.0.1", port, secret).__enter__()


def test_a_rank_to_which_rank_0_hands_nothing_is_told_so(nothing_given, monkeypatch):
    port = free_port()
    method, seconds = f"tcp://127.0.0.1:{port}", timedelta(seconds=50)
    monkeypatch.setenv("INSTEP_SECRET", "known to rank 0 only")
    with ThreadPoolExecutor() as threads:
        first = threads.submit(stores.open_store, method, World(0, 2, 0, 2), seconds)
        while not port_file.is_listening("127.0.0.1", port):
            assert not first.done()
        monkeypatch.delenv("INSTEP_SECRET")
        with pytest.raises(
            AuthenticationError, match=r"rank 0 hands no secret.*the same INSTEP_SECRET"
        ):
            stores.open_store(method, World(1, 2, 1, 2), seconds)
        monkeypatch.setenv("INSTEP_SECRET", "known to rank 0 only")
        stores.open_store(method, World(1, 2, 1, 2), seconds)
        first.result()


@ranks(2)
def test_torchruns_ranks_meet_again_at_its_store_and_after_a_restart():
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = instep.broadcast_object(agent.port)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    keys = set()
    for attempt in range(2):
        with pytest.MonkeyPatch.context() as environ:
            environ.setattr(stores, "_stores", {})  # as in a new process
            for name, value in told.items():
                environ.setenv(name, value)
            environ.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
            world = World(instep.rank, 2, instep.rank, 2)
            for _ in range(2):
                opened = stores.open_store(None, world, timedelta(seconds=20))
                keys.add(opened.key)
    instep.barrier()
    assert len(keys) == 4
    assert None not in keys
    assert len(set(instep.all_gather_object(frozenset(keys)))) == 1


# ------------------------------------------------------------------- whoever reaches a socket


def garbage(draw: random.Random) -> bytes:
    """What somebody may say at a socket that is not meant for it."""
    value = draw.choice([None, True, -1, 1, 10**30, 1.5, "", "x" * 99, [], [1], {}, {"a": [{}]}])
    fields = (
        "job",
        "number",
        "count",
        "fingerprint",
        "ranks",
        "master",
        "rank",
        "host",
        "token",
        "code",
    )
    words = ("hello", "ended", "failed", "waits", "resumed", "finished", "", "no word")
    said = {"type": draw.choice([*words, value]), "job": ""}
    said |= dict.fromkeys(draw.sample(fields, draw.randrange(len(fields))), value)
    return draw.choice(
        [
            b"hello\n",
            b"[1]\n",
            b"\xff\xfe\0\n",
            b"\n\n\n",
            b"[" * 30_000 + b"\n",
            b'{"type":' * 5_000 + b"\n",
            b"1" * 5_000 + b"\n",
            draw.randbytes(draw.randrange(200)) + b"\n",
            draw.randbytes(draw.randrange(200)),  # and no end of the line
            json.dumps(value).encode() + b"\n",
            *[json.dumps(said).encode() + b"\n"] * 4,
        ]
    )


def pester(port: int, messages: int, seed: int) -> list[socket.socket]:
    """Say so many things, one to a connection; returns connections that are held, in silence and
    in the middle of a word, and one over which an endless line was said."""
    draw = random.Random(seed)
    for _ in range(messages):
        with socket.create_connection(("127.0.0.1", port)) as line, suppress(OSError):
            line.sendall(garbage(draw))
    held = []
    for _ in range(100):
        held.append(socket.create_connection(("127.0.0.1", port)))
        with suppress(OSError):
            held[-1].sendall(draw.choice([b"", b'{"type": "hel']))
    endless = socket.create_connection(("127.0.0.1", port))
    endless.settimeout(30)
    with suppress(ConnectionError):  # hung up on, before all of it was said
        for _ in range(64):
            endless.sendall(b"x" * (1 << 20))
        raise AssertionError("an endless line was heard")
    return [*held, endless]


WATCHED = """
import os, sys
import torch
import instep
instep.all_reduce(torch.ones(1))
print("ready", flush=True)
os.read(0, 1)
os.kill(os.getpid(), 9)
"""


@pytest.mark.launch
@pytest.mark.nightly
def test_the_watch_goes_on_after_ten_thousand_messages_of_strangers(tmp_path):
    (tmp_path / "train.py").write_text(WATCHED)
    with ExitStack() as held, (tmp_path / "err").open("w+") as err:
        port = free_port()
        job = [held.enter_context(bare_rank(rank, port, tmp_path, err)) for rank in range(2)]
        for process in job:
            assert process.stdout.readline() == b"ready\n"
        (watched,) = ports_of(psutil.Process(job[0].pid).children())
        for line in pester(watched, 10_000, seed=19):
            held.enter_context(line)
        job[1].stdin.write(b".")
        job[1].stdin.close()
        assert job[1].wait(30) == -9
        assert job[0].wait(30) == 137
        said = "rank 1 of 2 was killed by SIGKILL"  # by the watcher, which may outlive the ranks
        wait_until(lambda: said in (tmp_path / "err").read_text())


def bare_rank(rank, port, folder, err):
    told = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    told |= {"MASTER_PORT": str(port), "INSTEP_SECRET": "a secret of this test"}
    kept = {n: v for n, v in os.environ.items() if not n.startswith(LAUNCHER_VARIABLES)}
    return subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=folder,
        env=kept | told,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=err,
    )


def ports_of(processes):
    """At which these listen."""
    found = [each for process in processes for each in process.net_connections("inet")]
    return sorted({each.laddr.port for each in found if each.status == psutil.CONN_LISTEN})


@pytest.mark.parametrize("secret", ["", "a secret of this test"])
def test_members_meet_in_spite_of_strangers(monkeypatch, secret):
    monkeypatch.setenv("INSTEP_SECRET", secret)
    port, card = free_port(), JobFingerprint("h", "n", "v", "s", ())
    place = endpoints.Address("127.0.0.1", port, "")
    with ThreadPoolExecutor() as threads:
        first = threads.submit(
            join_rendezvous, place, Participant(0, 2, card, 1), lambda _: {"said": 1}, 60.0, "host"
        )
        while not port_file.is_listening("127.0.0.1", port):
            assert not first.done()
        held = pester(port, 500, seed=20)
        other = join_rendezvous(place, Participant(1, 2, card, 1), lambda _: {}, 60.0, "host")
        found = first.result(30)
    assert found.values == other.values == {"said": 1}
    assert found.secret == other.secret
    for line in [*held, *found.connections.values(), *other.connections.values()]:
        line.close()


@pytest.mark.parametrize("secrets", [("", "known to the other"), ("known to the other", "")])
def test_a_member_without_the_secret_is_told_so(monkeypatch, secrets):
    port, card = free_port(), JobFingerprint("h", "n", "v", "s", ())
    place = endpoints.Address("127.0.0.1", port, "")
    monkeypatch.setenv("INSTEP_SECRET", secrets[0])
    with ThreadPoolExecutor() as threads:
        first = threads.submit(
            join_rendezvous, place, Participant(0, 2, card, 1), lambda _: {}, 50.0, "host"
        )
        while not port_file.is_listening("127.0.0.1", port):
            assert not first.done()
        monkeypatch.setenv("INSTEP_SECRET", secrets[1])
        with pytest.raises(AuthenticationError, match="Give all ranks the same one"):
            join_rendezvous(place, Participant(1, 2, card, 1), lambda _: {}, 50.0, "host")
        monkeypatch.setenv("INSTEP_SECRET", secrets[0])
        other = join_rendezvous(place, Participant(1, 2, card, 1), lambda _: {}, 50.0, "host")
        found = first.result(50)
    for line in [*found.connections.values(), *other.connections.values()]:
        line.close()


UNEDITED = """
import subprocess, sys
import torch
# Rank 1 reports its failure soon, though rank 0 waits for its input and does not end.
failure_reports = sys.modules["instep.unedited.processes.failure_reports"]
failure_reports.WAIT_SECONDS, failure_reports.LONGEST_WAIT_SECONDS = 0.1, 600.0
model = torch.nn.Linear(2, 2)
model(torch.ones(4, 2)).sum().backward()
print("ready", flush=True)
print(input())
"""


@pytest.mark.launch
def test_nothing_that_another_user_writes_is_run_by_a_job(tmp_path):
    (tmp_path / "train.py").write_text(UNEDITED)
    kept = {n: v for n, v in os.environ.items() if not n.startswith(LAUNCHER_VARIABLES)}
    with subprocess.Popen(
        [sys.executable, "-m", "instep", "run", "-n", "2", "train.py"],
        cwd=tmp_path,
        env=kept,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as job:
        assert job.stdout.readline() == b"ready\n"
        processes = psutil.Process(job.pid).children(recursive=True)
        told = [process.environ().get("MASTER_PORT") for process in processes]
        master = int(next(filter(None, told)))
        path = str(tmp_path / "ran")
        stranger = forked.Process(target=be_a_stranger, args=(ports_of(processes), master, path))
        stranger.start()
        stranger.join()
        assert stranger.exitcode == 0
        said = job.stderr.read().decode()
    assert job.returncode == 1
    assert "was not written by this job: a stranger's process" in said
    assert not (tmp_path / "ran").exists()


LISTENING = """
import signal
import torch
import instep
instep.all_reduce(torch.ones(1))
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.nightly
@pytest.mark.launch
def test_two_nodes_on_one_host_listen_on_loopback_only(tmp_path):
    (tmp_path / "train.py").write_text(LISTENING)
    kept = {n: v for n, v in os.environ.items() if not n.startswith(LAUNCHER_VARIABLES)}
    command = [sys.executable, "-m", "instep", "run", "-n", "1", "--nnodes", "2"]
    command += ["--master", f"{socket.gethostname()}:{free_port()}", "--node-rank"]
    with ExitStack() as running:
        nodes = [
            running.enter_context(
                subprocess.Popen(
                    [*command, str(node), "train.py"],
                    cwd=tmp_path,
                    env=kept,
                    stdout=subprocess.PIPE,
                )
            )
            for node in range(2)
        ]
        assert [b"ready" in node.stdout.readline() for node in nodes] == [True, True]
        found = [each for node in nodes for each in listening(psutil.Process(node.pid))]
        for node in nodes:
            node.terminate()
    assert found
    assert {ipaddress.ip_address(each.laddr.ip).is_loopback for each in found} == {True}


def listening(process):
    """The sockets of a process and of all that it has started."""
    family = [process, *process.children(recursive=True)]
    found = [each for member in family for each in member.net_connections("inet")]
    return [each for each in found if each.status == psutil.CONN_LISTEN]


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def be_a_stranger(ports, master, path):
    """Of another user where that is possible: speak to all ports, and write whatever ranks read."""
    "localhost".encode("idna")  # imported while it can be
    if os.getuid() == 0:
        os.setuid(65534)
    draw, evil = random.Random(21), pickle.dumps((None, Touch(path)))
    for port in ports:
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", port)) as line, suppress(OSError):
                line.sendall(garbage(draw))
    seconds = timedelta(seconds=10)
    store = dist.TCPStore("127.0.0.1", master, timeout=seconds, wait_for_workers=False)
    keys = store.list_keys()
    (told,) = (key.removesuffix("started") for key in keys if key.endswith("/started"))
    for key in [*keys, f"{told}part0"]:
        store.set(key, evil)
    store.set(f"{told}done", "1")
