"""The hosts of a job: their numbers, and the rendezvous of their supervisors."""

from __future__ import annotations

import os
import socket
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from urllib.parse import urlsplit

from instep.distributed.identity import endpoints, launchers
from instep.distributed.identity.authentication import make_secret
from instep.distributed.rendezvous import listening, port_file
from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.errors import CommandLineError
from instep.launch.multi_node.master import choose_master
from instep.launch.multi_node.supervisor_rendezvous import Participant, Values, join_rendezvous
from instep.process import settings

_LOCAL_ENDPOINT = endpoints.Address(port_file.LOOPBACK_HOST, 0, "")


@dataclass(frozen=True)
class NodeConfig:
    """This host's place among the hosts of a job."""

    node: int = 0
    """The number of this host, from 0."""
    nodes: int = 1
    """The number of hosts."""
    endpoint: endpoints.Endpoint = _LOCAL_ENDPOINT
    """The endpoint of the supervisors' rendezvous."""
    has_own_terminal: bool = True
    """Whether the user started each host by hand, in a terminal of its own, without a launcher."""


ONE_NODE = NodeConfig()


@dataclass(frozen=True)
class JobInfo:
    """What every supervisor knows of the job after the rendezvous."""

    name: str
    """The job's unique name on this host."""
    sizes: tuple[int, ...]
    """The number of ranks on each host."""
    node: int
    """The number of this host."""
    master: str
    """An address of the first host."""
    port: int
    """A free port there."""
    one_host: bool
    """Whether all ranks run on one host, and use the loopback interface."""
    secret: bytes
    """The secret that only the ranks of this job get."""
    store: socket.socket | None = None
    """On the first host: the socket that is bound to that port."""
    names: tuple[str, ...] = ()
    """The names of the hosts."""
    connections: Mapping[int, socket.socket] = field(default_factory=dict)
    """Connections to other supervisors: the first host has one to each, the others one to it."""

    @property
    def size(self) -> int:
        """The number of ranks of the job."""
        return sum(self.sizes)

    @property
    def first(self) -> int:
        """The first rank of this host."""
        return sum(self.sizes[: self.node])

    def host_of(self, rank: int) -> str:
        """The name of this rank's host."""
        return self.names[bisect_right([*accumulate(self.sizes)], rank)]


def detect_nodes(environ: Mapping[str, str], ranks: int) -> NodeConfig:
    """The hosts, if a launcher started one task on each of them, as `srun … instep run` does.

    Otherwise one host. Raises LaunchError if the launcher started several tasks on this host, or
    if its variables give no endpoint.
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
        endpoint: endpoints.Endpoint = parse_address(
            "{}:{}".format(*(environ[name] for name in both))
        )
    else:
        endpoint = launchers.endpoint(world, environ)
    return NodeConfig(world.rank, world.size, endpoint, has_own_terminal=False)


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


def join_hosts(hosts: NodeConfig, ranks: int, fingerprint: JobFingerprint) -> JobInfo:
    """Rendezvous with the supervisors of the other hosts, if any. Raises LaunchError."""
    job = os.urandom(8).hex()
    if hosts.nodes == 1:
        store = listening.bind(port_file.LOOPBACK_HOST)
        port = store.getsockname()[1]
        return JobInfo(
            name=_nested_name(job),
            sizes=(ranks,),
            node=0,
            master=port_file.LOOPBACK_HOST,
            port=port,
            one_host=True,
            secret=make_secret(),
            store=store,
        )
    held: list[socket.socket] = []

    def decide(participants: Sequence[Participant]) -> Values:
        values, store = choose_master(hosts.endpoint, participants)
        held.append(store)
        sizes = [participant.ranks for participant in participants]
        return values | {
            "job": job,
            "sizes": sizes,
            "names": [m.fingerprint.host for m in participants],
        }

    participant = Participant(hosts.node, hosts.nodes, fingerprint, ranks)
    result = join_rendezvous(
        hosts.endpoint, participant, decide, settings.timeout().total_seconds(), "host"
    )
    values = result.values
    return JobInfo(
        name=_nested_name(f"{values['job']}-{hosts.node}"),
        sizes=tuple(values["sizes"]),
        node=hosts.node,
        master=values["master"],
        port=values["port"],
        one_host=values["one_host"],
        secret=result.secret,
        store=next(iter(held), None),
        names=tuple(values["names"]),
        connections=result.connections,
    )


def _nested_name(name: str) -> str:
    """A job inside another job's rank has a name that begins with that job's name."""
    outer = os.environ.get(launchers.JOB)
    return name if outer is None else f"{outer}.{name}"
