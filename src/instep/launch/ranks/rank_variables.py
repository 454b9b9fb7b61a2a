"""The environment variables of each rank."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from instep.distributed.identity.launchers import (
    FAILURE_FILE,
    HOST_CORES,
    JOB,
    STORE_FD,
    is_launcher_variable,
)
from instep.distributed.identity.world import World, world_variables
from instep.launch.multi_node.hosts import JobInfo
from instep.launch.multi_node.master import interface_variables
from instep.process import settings


def rank_environment(
    environ: Mapping[str, str],
    job_info: JobInfo,
    *,
    local_rank: int,
    failure_file: Path,
    store_fd: int | None,
) -> dict[str, str]:
    """The user's environment for one rank of this host, without an outer launcher's variables."""
    kept = {
        name: value for name, value in environ.items() if not is_launcher_variable(name, environ)
    }
    kept.pop("PYTHONINSPECT", None)  # a rank would wait at the prompt, or fail at the end of stdin
    here = job_info.sizes[job_info.node]
    threads = str(threads_per_rank(here))
    if "OMP_NUM_THREADS" not in kept:
        kept.setdefault("MKL_NUM_THREADS", threads)
    if (kept.get("PYTHONHASHSEED") or "random") == "random":
        kept["PYTHONHASHSEED"] = "0"
    defaults = {"OMP_NUM_THREADS": threads}
    if "OMP_NUM_THREADS" not in kept:
        defaults[HOST_CORES] = str(count_cores())
    world = World(
        rank=job_info.first + local_rank,
        size=job_info.size,
        local_rank=local_rank,
        local_size=here,
        node_rank=job_info.node,
        nodes=len(job_info.sizes),
    )
    assigned = {
        "MASTER_ADDR": job_info.master,
        "MASTER_PORT": str(job_info.port),
        JOB: job_info.name,
        FAILURE_FILE: str(failure_file),
        settings.SECRET.name: job_info.secret.hex(),
    }
    if store_fd is not None:
        assigned[STORE_FD] = str(store_fd)
    interface = interface_variables(job_info.master, one_host=job_info.one_host)
    return defaults | interface | kept | world_variables(world) | assigned


def threads_per_rank(size: int) -> int:
    """The cores that this process may use, divided by `size` ranks; at least 1."""
    return max(1, count_cores() // size)


def count_cores() -> int:
    """The cores of this process by its CPU affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, math.ceil(int(quota) / int(period)))
