"""The hosts of a job: which of them this is, where their supervisors meet, what they agree on."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from instep.distributed.identity import endpoints, launchers
from instep.distributed.identity.authentication import make_secret
from instep.distributed.rendezvous import listening, port_file
from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.errors import CommandLineError
from instep.launch.multihost.master import choose_master
from instep.launch.multihost.supervisor_rendezvous import Facts, Participant, join_rendezvous
from instep.process import settings

_NOWHERE_ELSE = endpoints.Address(port_file.LOOPBACK_HOST, 0, "")


@dataclass(frozen=True)
class NodeConfig:
    """One of the hosts on which `instep run` was started for one job."""

    node: int = 0
    """Which of them, from 0."""
    nodes: int = 1
    """How many."""
    place: endpoints.Endpoint = _NOWHERE_ELSE
    """Where the supervisors meet."""
    by_hand: bool = True
    """Whether every host has a terminal of its own, and not that of a launcher."""


ONE_NODE = NodeConfig()


@dataclass(frozen=True)
class JobInfo:
    """A job all of whose hosts have met."""

    name: str
    """The job's name on this host, which no other job has."""
    sizes: tuple[int, ...]
    """How many ranks each host has."""
    node: int
    """Which host this is."""
    master: str
    """An address of the first host."""
    port: int
    """A port of it that is free."""
    one_host: bool
    """Whether the ranks can talk over the loopback interface."""
    secret: bytes
    """What only the ranks of this job are told."""
    store: socket.socket | None = None
    """On the first host: bound to that port."""
    names: tuple[str, ...] = ()
    """The hosts' names."""
    lines: Mapping[int, socket.socket] = field(default_factory=dict)
    """To the other supervisors: from the first host to all, from the others to the first."""

    @property
    def size(self) -> int:
        """How many ranks the job has."""
        return sum(self.sizes)

    @property
    def first(self) -> int:
        """The first rank of this host."""
        return sum(self.sizes[: self.node])


def detect_nodes(environ: Mapping[str, str], ranks: int) -> NodeConfig:
    """The hosts of a launcher that started one task on each, as in `srun … instep run`.

    One host where there is no such launcher. Raises LaunchError where it started more than one
    task on this host, or does not say where they meet.
    """
    world = launchers.detect_tasks(environ)
    if world.size == 1:
        return ONE_NODE
    if world.local_size > 1:
        raise CommandLineError(
            f"{world.source} started {world.local_size} tasks on this host, and each would start "
            f"{ranks} ranks. Start one task per host (--ntasks-per-node=1), or the script itself "
            "without `instep run`; with --nnodes 1 each task is a job of its own."
        )
    both = ("MASTER_ADDR", "MASTER_PORT")
    if all(name in environ for name in both):
        place: endpoints.Endpoint = parse_address("{}:{}".format(*(environ[name] for name in both)))
    else:
        place = launchers.endpoint(world, environ)
    return NodeConfig(world.rank, world.size, place, by_hand=False)


def wrong_hosts(why: str) -> CommandLineError:
    """For --nnodes, --node-rank and --master that do not go together."""
    return CommandLineError(
        f"{why}. On every host: instep run --nnodes 2 --node-rank K --master HOST:PORT -n 2 "
        "script.py, with K from 0 up, and an address of host 0."
    )


def parse_address(text: str) -> endpoints.Address:
    """`host:port`. Raises CommandLineError for anything else."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.netloc != text or "@" in text:
        raise wrong_hosts(f"--master takes HOST:PORT, not {text!r}")
    return endpoints.Address(host, port, "")


def join_hosts(hosts: NodeConfig, ranks: int, card: JobFingerprint) -> JobInfo:
    """Meet the supervisors of the other hosts; returns at once on one host. Raises LaunchError."""
    job = os.urandom(8).hex()
    if hosts.nodes == 1:
        store = listening.bind(port_file.LOOPBACK_HOST)
        port = store.getsockname()[1]
        return JobInfo(
            _inside(job),
            (ranks,),
            0,
            port_file.LOOPBACK_HOST,
            port,
            True,
            secret=make_secret(),
            store=store,
        )
    held: list[socket.socket] = []

    def decide(participants: Sequence[Participant]) -> Facts:
        facts, store = choose_master(hosts.place, participants)
        held.append(store)
        sizes = [participant.ranks for participant in participants]
        return facts | {"job": job, "sizes": sizes, "names": [m.card.host for m in participants]}

    mine = Participant(hosts.node, hosts.nodes, card, ranks)
    result = join_rendezvous(hosts.place, mine, decide, float(int(settings.TIMEOUT)), "host")
    facts = result.facts
    return JobInfo(
        name=_inside(f"{facts['job']}-{hosts.node}"),
        sizes=tuple(facts["sizes"]),
        node=hosts.node,
        master=facts["master"],
        port=facts["port"],
        one_host=facts["one_host"],
        secret=result.secret,
        store=next(iter(held), None),
        names=tuple(facts["names"]),
        lines=result.lines,
    )


def _inside(name: str) -> str:
    """A job started inside another one's rank carries that job's name in front."""
    outer = os.environ.get(launchers.JOB)
    return name if outer is None else f"{outer}.{name}"
