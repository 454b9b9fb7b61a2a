"""World: the rank of this process, and the size of its job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from instep.process.errors import LaunchVariablesError


@dataclass(frozen=True)
class World:
    """The place of one process in its job.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of processes of the job: the *world size*.
        local_rank: the number of this process on its host, from 0.
        local_size: the number of processes on this host.
        node_rank: the number of this host, from 0.
        nodes: the number of hosts.
        source: the launcher, or another source of these numbers.

    Raises LaunchVariablesError when the numbers contradict each other.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    nodes: int = 1
    source: str = "plain Python"

    def __post_init__(self) -> None:
        for what, index, count in (
            ("rank", self.rank, self.size),
            ("local rank", self.local_rank, self.local_size),
            ("node rank", self.node_rank, self.nodes),
        ):
            if not 0 <= index < count:
                raise LaunchVariablesError.inconsistent(
                    self.source, f"{what} {index} of {count} ({what}s count from 0)"
                )
        if self.local_size > self.size:
            raise LaunchVariablesError.inconsistent(
                self.source, f"{self.local_size} ranks on this host, but {self.size} in all"
            )

    @property
    def parallel(self) -> bool:
        """Whether the job has several processes."""
        return self.size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def one_host(self) -> bool:
        """Whether all ranks run on one machine."""
        return self.local_size == self.size

    def __str__(self) -> str:
        where = "" if self.one_host else f", local rank {self.local_rank} of {self.local_size}"
        return f"rank {self.rank} of {self.size}{where} ({self.source})"


def read_number(environ: Mapping[str, str], name: str | None, default: int | None = None) -> int:
    """A variable's number; the default where there is one and the variable is not set.

    Raises LaunchVariablesError for anything but a number.
    """
    if name is None or (default is not None and name not in environ):
        assert default is not None
        return default
    try:
        return int(environ[name])
    except ValueError:
        raise LaunchVariablesError(
            f"{name}={environ[name]!r} is not a whole number. Set it to one, or unset it."
        ) from None


def world_variables(world: World) -> dict[str, str]:
    """A world in the variables that torch reads."""
    place = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "GROUP_RANK": world.node_rank,
        "GROUP_WORLD_SIZE": world.nodes,
    }
    return {name: str(value) for name, value in place.items()}
