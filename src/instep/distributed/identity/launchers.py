"""The launchers: one row of a table for each, with the names of its variables.

The first row that matches holds. Two launchers are often visible at once; the innermost comes
first: torchrun inside srun, or mpirun inside salloc, leaves in SLURM_PROCID the node's number.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property

from instep.distributed.identity import endpoints, nodelist
from instep.distributed.identity.local_ranks import LocalRanks, find_launcher_process
from instep.distributed.identity.world import World, read_number
from instep.process import settings
from instep.process.errors import LaunchVariablesError
from instep.process.procfs import read_environ, read_stat

JOB = "INSTEP_JOB"
"""Set by `instep run` for its ranks: the name of the job."""
STORE_FD = "INSTEP_STORE_FD"
"""Set by `instep run` for rank 0: a socket that is bound to MASTER_ADDR:MASTER_PORT."""
ELASTIC_FD = "INSTEP_ELASTIC_FD"
"""Set by `instep horovodrun` for the ranks of an elastic job: a socket to the job's driver."""
SOURCE = "INSTEP_SOURCE"
"""Set by `python -m instep script.py` for its script: the launcher whose numbers it repeats."""
FAILURE_FILE = "INSTEP_FAILURE_FILE"
"""Set by `instep run` for its ranks: the file for the traceback of a rank that fails."""
HOST_CORES = "INSTEP_HOST_CORES"
"""Set by `instep run` for its ranks: the cores that it has divided among those of this host, unless
OMP_NUM_THREADS was set."""
RESTARTS = "INSTEP_RESTARTS"
"""Set by `instep run` for its ranks: how often it has started the job again after a failure."""


@dataclass(frozen=True)
class Launcher:
    """The names of one launcher's variables. `None`: it has none, and one host is assumed."""

    name: str
    markers: tuple[str, ...]
    """The row matches a process that has all of these variables."""
    rank: str
    size: str
    local_rank: str | None = None
    local_size: str | None = None
    tasks_per_node: str | None = None
    """Instead of `local_size`: how many ranks each host has, as Slurm writes it."""
    node_rank: str | None = None
    nodes: str | None = None
    """Without it, all hosts have as many ranks, and are filled one after the other."""
    endpoint: endpoints.FindEndpoint = endpoints.mpi_endpoint
    """The endpoint without MASTER_ADDR and MASTER_PORT."""
    starts_all: bool = True
    """Whether one process starts the ranks of a host at once, so that a missing one has ended."""
    on_behalf: str | None = None
    """The variable with the name of the launcher whose numbers this one repeats."""

    @cached_property
    def variables(self) -> set[str]:
        """The variables that this row reads."""
        columns = (self.rank, self.size, self.local_rank, self.local_size, self.tasks_per_node)
        return {*self.markers, *filter(None, (*columns, self.node_rank, self.nodes))}

    def matches(self, variables: set[str]) -> bool:
        """Whether this launcher started the process that has these variables."""
        return variables.issuperset(self.markers)

    def world(self, environ: Mapping[str, str]) -> World:
        """Read the row. Raises LaunchVariablesError for half-set or impossible variables."""
        pair = (self.rank, self.size)
        missing = [name for name in pair if name not in environ]
        if missing:
            present = {n: environ[n] for n in (*self.markers, *pair) if n in environ}
            raise LaunchVariablesError.incomplete(self.name, present, missing)
        rank, size = read_number(environ, self.rank), read_number(environ, self.size)
        node_rank = (
            None if self.node_rank is None else read_number(environ, self.node_rank, default=0)
        )
        local_size = self._local_size(environ, node_rank or 0, size)
        per_host = max(local_size, 1)
        return World(
            rank=rank,
            size=size,
            local_rank=read_number(environ, self.local_rank, default=rank),
            local_size=local_size,
            node_rank=rank // per_host if node_rank is None else node_rank,
            nodes=read_number(environ, self.nodes, default=-(-size // per_host)),
            source=self.name if self.on_behalf is None else environ[self.on_behalf],
        )

    def _local_size(self, environ: Mapping[str, str], node: int, size: int) -> int:
        if self.tasks_per_node is not None and self.tasks_per_node in environ:
            return nodelist.count_tasks(environ[self.tasks_per_node], node)
        return read_number(environ, self.local_size, default=size)


def _torch_launcher(
    name: str, *markers: str, starts_all: bool = True, on_behalf: str | None = None
) -> Launcher:
    """A launcher that sets PyTorch's own variables."""
    return Launcher(
        name,
        markers,
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
        nodes="GROUP_WORLD_SIZE",
        endpoint=endpoints.require_master,
        starts_all=starts_all,
        on_behalf=on_behalf,
    )


LAUNCHERS = [
    _torch_launcher("instep run", JOB, "RANK"),
    _torch_launcher("python -m instep", SOURCE, "RANK", on_behalf=SOURCE),
    _torch_launcher("torchrun", "TORCHELASTIC_RUN_ID"),
    _torch_launcher("RANK and WORLD_SIZE", "RANK", "WORLD_SIZE", starts_all=False),
    Launcher(
        "horovodrun",
        ("HOROVOD_RANK",),
        rank="HOROVOD_RANK",
        size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_size="HOROVOD_LOCAL_SIZE",
        node_rank="HOROVOD_CROSS_RANK",
        nodes="HOROVOD_CROSS_SIZE",
        endpoint=endpoints.horovodrun_endpoint,
        starts_all=False,
    ),
    Launcher(
        "jsrun",
        ("JSM_NAMESPACE_RANK",),
        rank="JSM_NAMESPACE_RANK",
        size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
    ),
    Launcher(  # OMPI_COMM_WORLD_NODE_RANK is a rank on the node, not the node's
        "mpirun of Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "mpirun of MPICH or Intel MPI",
        ("MPI_LOCALNRANKS",),
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
    ),
    Launcher(  # neither an sbatch script nor a salloc shell has SLURM_STEP_ID
        "srun",
        ("SLURM_STEP_ID",),
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        tasks_per_node="SLURM_STEP_TASKS_PER_NODE",
        node_rank="SLURM_NODEID",
        nodes="SLURM_STEP_NUM_NODES",
        endpoint=endpoints.slurm_endpoint,
    ),
    # After srun, whose --mpi=pmi2 sets PMI_RANK too, and no local rank by this name.
    Launcher("PMI_RANK and PMI_SIZE", ("PMI_RANK",), rank="PMI_RANK", size="PMI_SIZE"),
    _torch_launcher("RANK and WORLD_SIZE", "RANK", starts_all=False),
    _torch_launcher("RANK and WORLD_SIZE", "WORLD_SIZE", starts_all=False),
]
"""In the order of precedence: the innermost launcher first, half of a pair last."""


def register(launcher: Launcher, before: str | None = None) -> None:
    """Add a row to the table, in this process, before its ranks meet.

    Args:
        launcher: the new row.
        before: the name of the row that it precedes; the first row by default.

    Raises ValueError if no row has that name.
    """
    names = [row.name for row in LAUNCHERS]
    if before is not None and before not in names:
        raise ValueError(f"there is no launcher {before!r}; the table has {', '.join(names)}.")
    LAUNCHERS.insert(0 if before is None else names.index(before), launcher)


_PREFIXES = (
    *("HYDI_", "JSM_NAMESPACE_", "MPI_LOCAL", "MV2_COMM_WORLD_", "OMPI_", "PMIX_", "PMI_"),
    *("SLURM_STEP", "TORCHELASTIC_"),
)
_NAMES = frozenset(
    {
        *(ELASTIC_FD, FAILURE_FILE, HOST_CORES, RESTARTS, settings.SECRET.name, STORE_FD),
        *("MASTER_ADDR", "MASTER_PORT"),
        *("NODE_RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
        *(f"SLURM_{name}" for name in ("GTIDS", "NPROCS", "NTASKS", "TASKS_PER_NODE", "TASK_PID")),
    }
)
"""Variables that launchers set for their ranks, beyond those in the table."""
_MPI_SETTINGS = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_", "PMIX_MCA_")
"""Among these, those of the MPI library, which users set for any process with MPI: a library of the
script may start MPI, and the script `mpirun`."""
_MPI_SETTINGS_OF_RANKS = (
    *("OMPI_MCA_ess", "OMPI_MCA_initial_wdir", "OMPI_MCA_mpi_oversubscribe", "OMPI_MCA_orte_"),
    *("OMPI_MCA_pmix", "OMPI_MCA_shmem_RUNTIME_QUERY_hint"),
)
"""Of which a launcher sets these for its ranks."""
_OF_RANKS_WITH_MPI = {"OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "SLURM_STEP_ID"}


def is_launcher_variable(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has set this variable of `environ` for a rank's numbers or endpoint.

    The name of the job is none of them: `instep run` finds the processes of its ranks by it.
    """
    if name.startswith(_MPI_SETTINGS):
        return name.startswith(_MPI_SETTINGS_OF_RANKS) and any(
            each in environ for each in _OF_RANKS_WITH_MPI
        )
    read = name != JOB and any(name in row.variables for row in LAUNCHERS)
    return read or name in _NAMES or name.startswith(_PREFIXES)


def launcher_process() -> int | None:
    """The process that has started the ranks of this host, which does not end before them.

    It is the nearest ancestor without this rank's variables, as the rank may be started by a script
    of the user's. None where the launcher's row does not say that one process starts all of them,
    or where none is found.
    """
    environ = read_environ("self")
    launcher = _launcher(environ)
    if launcher is None or not launcher.starts_all:
        return None
    found = find_launcher_process(environ, *launcher.markers, launcher.rank)
    return None if found is None or found[0] == 1 else found[0]


@cache
def note_launcher() -> tuple[int, int] | None:
    """Remember from the first call on which process `launcher_process` is: its id and its start
    time. None under `instep run`, which ends the ranks itself if its supervisor is killed."""
    with suppress(OSError):
        if JOB not in os.environ and (pid := launcher_process()) is not None:
            return pid, read_stat(pid).start_time
    return None


def has_lost_launcher() -> bool:
    """Whether that process has ended."""
    launcher = note_launcher()
    if launcher is None:
        return False
    pid, start = launcher
    with suppress(OSError):
        stat = read_stat(pid)
        return stat.start_time != start or not stat.is_alive()
    return True


def has_chosen_threads(environ: Mapping[str, str]) -> bool:
    """Whether the launcher has set OMP_NUM_THREADS, and not its user: `instep run` divides the
    cores, torchrun gives 1 to each rank."""
    one_each = "TORCHELASTIC_RUN_ID" in environ and environ.get("OMP_NUM_THREADS") == "1"
    return one_each or HOST_CORES in environ


def detect(environ: Mapping[str, str] = os.environ) -> World:
    """The world that these variables describe; a world of one where no launcher did.

    Raises LaunchVariablesError for half-set or contradictory variables.
    """
    launcher = _launcher(environ)
    if launcher is None:
        return World()
    world = launcher.world(environ)
    _check_consistent(world, launcher, environ)
    return world


def detect_tasks(environ: Mapping[str, str] = os.environ) -> World:
    """As `detect`, of a launcher that starts tasks (srun, mpirun); others make a world of one.

    A launcher with torch's variables has started ranks, inside of which a new job may begin.
    """
    launcher = _launcher(environ)
    return World() if launcher is None or launcher.rank == "RANK" else detect(environ)


def endpoint(world: World, environ: Mapping[str, str] = os.environ) -> endpoints.Endpoint:
    """Where the ranks of this world meet: the user's file, or derived from launcher variables.

    Raises LaunchVariablesError or RendezvousError where neither is enough.
    """
    if path := environ.get(settings.DIST_FILE.name):
        return endpoints.dist_file_endpoint(path, world)
    launcher = _launcher(environ)
    if launcher is None or launcher.name != world.source:
        return endpoints.require_master(environ, world)
    return launcher.endpoint(environ, world)


def is_one_host(world: World, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher's variables say that all ranks are on this host. World.one_host is true,
    too, for a launcher without such a variable, and may be wrong then."""
    launcher = _launcher(environ)
    if launcher is None or not world.one_host:
        return False
    names = filter(None, (launcher.local_size, launcher.tasks_per_node))
    return any(name in environ for name in names) and launcher.world(environ) == world


def master_port(environ: Mapping[str, str]) -> int:
    """MASTER_PORT. Raises LaunchVariablesError unless it is a port."""
    port = read_number(environ, "MASTER_PORT")
    if not 0 < port < 2**16:
        raise LaunchVariablesError(
            f"MASTER_PORT takes a port from 1 to 65535, not '{port}'. Where rank 0 listens."
        )
    return port


def local_ranks(world: World) -> LocalRanks | None:
    """The ranks of this host; None where their launcher's variables do not have their numbers.

    The launcher is found by the environment with which this process was started: `python -m instep`
    adds variables. None, too, if the launcher gave this process another rank than `world` does, or
    may do so later.
    """
    environ = read_environ("self")
    if ELASTIC_FD in environ:
        return None
    launcher = _launcher(environ)
    ranks = _ranks_here(world, environ)
    if launcher is None or len(ranks) != world.local_size:
        return None
    with suppress(LaunchVariablesError):
        found = launcher.world(environ)
        if (found.rank, found.size) == (world.rank, world.size):
            return LocalRanks(ranks, launcher.rank, environ, at_once=launcher.starts_all)
    return None


def _ranks_here(world: World, environ: Mapping[str, str]) -> Collection[int]:
    if world.one_host:
        return range(world.size)
    if numbers := environ.get("SLURM_GTIDS"):
        return [int(rank) for rank in numbers.split(",")]
    first = world.rank - world.local_rank  # hosts may have unequal numbers of ranks
    return range(first, first + world.local_size)


def _launcher(environ: Mapping[str, str]) -> Launcher | None:
    names = {*environ}  # looked up faster than in os.environ
    return next((row for row in LAUNCHERS if row.matches(names)), None)


def _check_consistent(world: World, launcher: Launcher, environ: Mapping[str, str]) -> None:
    """Batch scripts export a lone WORLD_SIZE for their srun: then it must be the right one."""
    for name, variable, ours in (
        ("RANK", launcher.rank, world.rank),
        ("WORLD_SIZE", launcher.size, world.size),
    ):
        if variable != name and not {"RANK", "WORLD_SIZE"} <= environ.keys():
            given = read_number(environ, name, default=ours)
            if given != ours:
                raise LaunchVariablesError.inconsistent(
                    launcher.name, f"{name}={given}, but {variable}={ours}"
                )
