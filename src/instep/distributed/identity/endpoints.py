"""Where the ranks of a job meet when the launcher sets no MASTER_ADDR and MASTER_PORT.

On one host that is a private file: rank 0 listens on a free port of the loopback interface and
writes it there; the file is removed as soon as all have joined. Its name is derived from values
that the launcher gives to every rank of this job and to no other. On several hosts it is an
address: the first host of the allocation, or mpirun's, and a port that is derived from the job's
name; or a file that the user names.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from instep.distributed.errors import RendezvousError
from instep.distributed.identity import nodelist
from instep.distributed.identity.local_ranks import find_launcher_process
from instep.distributed.identity.world import World, read_number
from instep.process.errors import LaunchVariablesError
from instep.process.procfs import namespace

FIRST_PORT, PORTS = 20_000, 12_763
"""Below Linux's ephemeral ports, which any outgoing connection may hold. PORTS is a prime."""
_ADVICE = (
    "Export MASTER_ADDR (an address of rank 0's host) and MASTER_PORT on every rank, or "
    "INSTEP_DIST_FILE with the path of a file on a file system that all hosts share."
)


@dataclass(frozen=True)
class Address:
    """Rank 0 listens here."""

    host: str
    """A name or address of rank 0's host that every host knows."""
    port: int
    """Its port there."""
    job: str
    """The name of the job, unlike every other one's."""


@dataclass(frozen=True)
class PrivateFile:
    """Rank 0 writes here the port at which it listens. One host only."""

    path: str
    """No other job has the same."""


@dataclass(frozen=True)
class SharedFile:
    """A file where ranks meet, on a file system that all hosts of the job share."""

    path: str
    """Given by the user, for one job at a time."""


Endpoint = Address | PrivateFile | SharedFile
FindEndpoint = Callable[[Mapping[str, str], World], Endpoint]
"""The endpoint of a launcher's ranks. Raises LaunchError where they cannot know it."""


def require_master(environ: Mapping[str, str], world: World) -> Endpoint:
    """For launchers with PyTorch's variables: MASTER_ADDR and MASTER_PORT are among them."""
    missing = ["MASTER_ADDR", "MASTER_PORT"]
    raise LaunchVariablesError.incomplete(world.source, {"WORLD_SIZE": str(world.size)}, missing)


def mpi_endpoint(environ: Mapping[str, str], world: World) -> Endpoint:
    """On one host a file that is named after the process which started all of its ranks.

    On several, the first host of the allocation, where mpirun puts rank 0.
    """
    if not world.one_host:
        return _allocation_address(environ, world)
    launcher = find_launcher_process(environ)
    if launcher is None:
        raise RendezvousError(
            f"{world.source} started {world.size} ranks, but does not say where they meet. "
            f"{_ADVICE}"
        )
    return _private_file(f"mpi-{environ.get('PMIX_NAMESPACE', '')}-{launcher[1]}")


def horovodrun_endpoint(environ: Mapping[str, str], world: World) -> Endpoint:
    """On one host a file that is named after the server of horovodrun, as each of its ranks has a
    parent of its own. On several, as under mpirun."""
    host, port = (environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}") for name in ("ADDR", "PORT"))
    if port is None or not world.one_host:
        return mpi_endpoint(environ, world)
    return _private_file(f"horovod-{host}-{port}")


def dist_file_endpoint(path: str, world: World) -> Endpoint:
    """The file of INSTEP_DIST_FILE or --dist-file."""
    path = os.path.abspath(path)
    return PrivateFile(path) if world.one_host else SharedFile(path)


def slurm_endpoint(environ: Mapping[str, str], world: World) -> Endpoint:
    """The first host of the step's node list; on one host, a file.

    The port is 20000 + (251 job + 17 step + restarts) mod 12763: after `scontrol requeue` the
    job's and the step's ids are what they were, and only SLURM_RESTART_COUNT is not.
    """
    job, step, restarts = (
        read_number(environ, name, default=0)
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    )
    key = f"slurm-{environ.get('SLURM_CLUSTER_NAME', '')}-{job}.{step}.{restarts}"
    if world.one_host:
        return _private_file(key)
    name = "SLURM_STEP_NODELIST"
    if name not in environ:
        present = {"SLURM_STEP_ID": environ["SLURM_STEP_ID"]}
        raise LaunchVariablesError.incomplete(world.source, present, [name])
    host = next(nodelist.expand_hosts(environ[name]))
    return Address(host, FIRST_PORT + (251 * job + 17 * step + restarts) % PORTS, key)


def _allocation_address(environ: Mapping[str, str], world: World) -> Endpoint:
    """The first host of a batch system's job, and a port that follows from the job's name.

    jsrun's list begins with the host that the batch script runs on, which holds no ranks. Where
    there is no batch system, the host of Open MPI's mpirun, if rank 0 is there.
    """
    by_jsrun = "JSM_NAMESPACE_RANK" in environ
    found = (
        _slurm_host(environ)
        or _listed_host(environ, "PBS_JOBID", "PBS_NODEFILE", first=0)
        or _listed_host(environ, "LSB_JOBID", "LSB_DJOB_RANKFILE", first=int(by_jsrun))
        or _mpirun_host(environ)
    )
    if found is None:
        raise RendezvousError(
            f"{world.source} started {world.size} ranks on several hosts ({world.local_size} on "
            f"this one), but does not say where they meet. {_ADVICE}"
        )
    host, job = found
    key = f"mpi-{job}-{environ.get('PMIX_NAMESPACE', '')}"
    return Address(host, FIRST_PORT + zlib.crc32(key.encode()) % PORTS, key)


def _slurm_host(environ: Mapping[str, str]) -> tuple[str, str] | None:
    listed = environ.get("SLURM_JOB_NODELIST")
    if listed is None:
        return None
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    return next(nodelist.expand_hosts(listed)), f"{environ.get('SLURM_JOB_ID', '')}.{restarts}"


def _listed_host(
    environ: Mapping[str, str], job: str, listing: str, first: int
) -> tuple[str, str] | None:
    """PBS has the file on the first host only, some sites on all."""
    if job not in environ or listing not in environ:
        return None
    try:
        with open(environ[listing]) as file:
            hosts = file.read().split()
    except OSError:
        return None
    return (hosts[first], environ[job]) if len(hosts) > first else None


def _mpirun_host(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Open MPI 4 sets `job.0;tcp://address,address:port` of mpirun for its ranks, and the same of
    the daemon that started them: job.0 is mpirun itself. Only rank 0 knows whether it is on
    another host; then it fails, and mpirun ends the others."""
    mpirun = environ.get("OMPI_MCA_orte_hnp_uri", "")
    job, _, addresses = mpirun.partition(";tcp://")
    own = environ.get("OMPI_MCA_orte_local_daemon_uri", "").partition(";")[0]
    if not addresses or (environ.get("OMPI_COMM_WORLD_RANK") == "0" and own != job):
        return None
    return addresses.partition(":")[0].partition(",")[0], mpirun


def _private_file(key: str) -> PrivateFile:
    """The name has the user that may write it, the host and the process namespace."""
    plain = "".join(c if c.isalnum() or c in "-." else "_" for c in key)
    name = f"instep-{os.getuid()}-{os.uname().nodename}-{namespace('pid')}-{plain}"
    return PrivateFile(os.path.join(tempfile.gettempdir(), name))
