"""The environment of each rank: what it is told, and what it must not hear."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from instep.launchers import FAILURE_FILE, JOB, STORE_FD, says_who


@dataclass(frozen=True)
class Meeting:
    """What all ranks of one job share."""

    job: str
    """The job's name, which no other job has."""
    size: int
    """How many ranks."""
    port: int
    """Where on 127.0.0.1 rank 0 listens."""
    threads: int
    """How many threads each rank may compute with."""


def place_variables(world: World) -> dict[str, str]:
    """The world in torch's names."""
    place = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "GROUP_RANK": world.node_rank,
        "GROUP_WORLD_SIZE": world.nodes,
    }
    return {name: str(value) for name, value in place.items()}


def job_name(environ: Mapping[str, str]) -> str:
    """A new name. A job started inside another one's rank carries that job's name in front."""
    name = os.urandom(8).hex()
    return f"{environ[JOB]}.{name}" if JOB in environ else name


def rank_environment(
    environ: Mapping[str, str],
    meeting: Meeting,
    *,
    rank: int,
    failure_file: Path,
    store_fd: int | None,
) -> dict[str, str]:
    """The user's environment as rank `rank` shall see it."""
    kept = {name: value for name, value in environ.items() if not says_who(name)}
    threads = str(meeting.threads)
    if "OMP_NUM_THREADS" not in kept:
        kept.setdefault("MKL_NUM_THREADS", threads)
    defaults = {
        "OMP_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONHASHSEED": "0",
    }
    place = {
        "RANK": rank,
        "WORLD_SIZE": meeting.size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": meeting.size,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": meeting.port,
        JOB: meeting.job,
        FAILURE_FILE: failure_file,
    }
    if store_fd is not None:
        place[STORE_FD] = store_fd
    return defaults | kept | {name: str(value) for name, value in place.items()}


def threads_per_rank(size: int) -> int:
    """The cores that this process may use, divided among `size` ranks; at least 1."""
    return max(1, _cores() // size)


def _cores() -> int:
    """Cores by affinity, or fewer where a container's quota says so."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, math.ceil(int(quota) / int(period)))
