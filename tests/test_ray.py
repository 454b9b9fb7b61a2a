"""`instep.spawn` on a Ray cluster, which a stand-in of Ray's calls plays here."""

import os
import sys
import types

import pytest

import instep
from instep.errors import PeerDiedError, RankFailedError


class Future:
    def __init__(self, ask):
        self.ask = ask


class Actor:
    def __init__(self, behind, node):
        self.behind, self.node_id = behind, node

    def __getattr__(self, name):
        """The method `name`, whose `remote` gives a future."""

        def answer(*args):
            cluster.running = self
            return getattr(self.behind, name)(*args)

        return types.SimpleNamespace(remote=lambda *args: Future(lambda: answer(*args)))


class Cluster(types.ModuleType):
    """The names of `ray` that instep uses: calls are answered when they are asked for."""

    def __init__(self, nodes):
        super().__init__("ray")
        self.nodes, self.options, self.killed, self.running = iter(nodes), None, [], None
        self.exceptions = types.SimpleNamespace(RayError=RuntimeError)
        self.util = types.SimpleNamespace(get_node_ip_address=lambda: f"ip-{self.running.node_id}")

    def remote(self, **options):
        self.options = options
        return lambda behind: types.SimpleNamespace(
            remote=lambda: Actor(behind(), next(self.nodes))
        )

    def get_runtime_context(self):
        return types.SimpleNamespace(get_node_id=lambda: self.running.node_id)

    def get(self, futures):
        one = isinstance(futures, Future)
        answers = [future.ask() for future in ([futures] if one else futures)]
        return answers[0] if one else answers

    def wait(self, futures):
        return futures[-1:], futures[:-1]

    def kill(self, actor):
        self.killed.append(actor.node_id)


@pytest.fixture(autouse=True)
def ray(monkeypatch):
    global cluster
    cluster = Cluster(["b", "a", "b"])
    monkeypatch.setitem(sys.modules, "ray", cluster)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", sys.argv)
    return cluster


def place(i, word):
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR")
    return i, word, [os.environ[name] for name in names], cluster.running.node_id


def test_ranks_of_a_node_have_consecutive_numbers_and_meet_at_the_first_one(ray):
    seen = instep.spawn(place, ("word",), nprocs=3, ray={"num_cpus": 2})
    assert seen == [
        (0, "word", ["0", "0", "2", "3", "ip-b"], "b"),
        (1, "word", ["1", "1", "2", "3", "ip-b"], "b"),
        (0, "word", ["2", "0", "1", "3", "ip-b"], "a"),
    ]
    assert ray.options == {"num_cpus": 2}
    assert sorted(ray.killed) == ["a", "b", "b"]


def fail(i):
    if os.environ["RANK"] == "2":  # it answers first
        error = RuntimeError("rank 1 has ended")
        error.cause = PeerDiedError.__new__(PeerDiedError, "rank 1 has ended")
        raise error
    if os.environ["RANK"] == "1":
        raise RuntimeError("boo")


def test_the_rank_that_failed_by_itself_is_named_and_no_actor_is_left(ray):
    with pytest.raises(RankFailedError, match="boo") as caught:
        instep.spawn(fail, nprocs=3, ray={})
    assert caught.value.rank == 1
    assert len(ray.killed) == 3
