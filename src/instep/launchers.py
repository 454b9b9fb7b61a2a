"""One row per launcher: which of its variables say what. Detection is looking down the table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from instep.errors import LaunchVariablesError
from instep.identity import World

JOB = "INSTEP_JOB"
"""Set by `instep run` for its ranks: the name of the job."""
STORE_FD = "INSTEP_STORE_FD"
"""Set by `instep run` for rank 0: a socket that is bound to MASTER_ADDR:MASTER_PORT."""
FAILURE_FILE = "INSTEP_FAILURE_FILE"
"""Set by `instep run` for its ranks: where a rank that fails leaves its traceback."""


@dataclass(frozen=True)
class Launcher:
    """What one launcher calls things. `None`: it does not say, and one host is assumed."""

    name: str
    marker: str
    """The row holds for a process that has this variable."""
    rank: str
    size: str
    local_rank: str | None = None
    local_size: str | None = None
    node_rank: str | None = None
    nodes: str | None = None

    def describes(self, environ: Mapping[str, str]) -> bool:
        """Whether this launcher started the process with these variables."""
        return self.marker in environ

    def world(self, environ: Mapping[str, str]) -> World:
        """Read the row. Raises LaunchVariablesError for half-set or impossible variables."""
        pair = (self.rank, self.size)
        missing = [name for name in pair if name not in environ]
        if missing:
            present = {name: environ[name] for name in (self.marker, *pair) if name in environ}
            raise LaunchVariablesError.half_set(self.name, present, missing)
        rank, size = _number(environ, self.rank), _number(environ, self.size)
        return World(
            rank=rank,
            size=size,
            local_rank=_number(environ, self.local_rank, default=rank),
            local_size=_number(environ, self.local_size, default=size),
            node_rank=_number(environ, self.node_rank, default=0),
            nodes=_number(environ, self.nodes, default=1),
            source=self.name,
        )


def _number(environ: Mapping[str, str], name: str | None, default: int | None = None) -> int:
    if name is None or (default is not None and name not in environ):
        assert default is not None
        return default
    try:
        return int(environ[name])
    except ValueError:
        raise LaunchVariablesError.not_a_number(name, environ[name]) from None


def _torch_names(name: str, marker: str) -> Launcher:
    """Who speaks PyTorch's own dialect of the environment."""
    return Launcher(
        name,
        marker,
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
        nodes="GROUP_WORLD_SIZE",
    )


LAUNCHERS = (
    _torch_names("instep run", marker=JOB),
    _torch_names("torchrun", marker="TORCHELASTIC_RUN_ID"),
    _torch_names("RANK and WORLD_SIZE", marker="RANK"),
    _torch_names("RANK and WORLD_SIZE", marker="WORLD_SIZE"),
)
"""In the order of precedence: the innermost launcher first."""


def detect(environ: Mapping[str, str] = os.environ) -> World:
    """The world that these variables describe; a world of one where nobody launched anything."""
    for launcher in LAUNCHERS:
        if launcher.describes(environ):
            return launcher.world(environ)
    return World()
