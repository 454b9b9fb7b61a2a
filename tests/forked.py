"""Ranks of a script under `instep verify`, forked from a process that has imported torch."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic

from instep.distributed.identity.launchers import STORE_FD
from instep.errors import ScriptFailedError, ScriptLateError
from instep.verify.recording.records import read_run
from instep.verify.runs import REPEATABLE
from pool import forkserver

LIMIT = 45.0
"""Seconds that a run may take."""


@dataclass(frozen=True)
class Place:
    """What the ranks of a run are told."""

    size: int
    port: int
    folder: str
    variables: Mapping[str, str]

    def environment(self, rank: int) -> dict[str, str]:
        """As a launcher says it."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "TMPDIR": self.folder,
        }


class Forked:
    """A Starter: as `instep run`, without the seconds that a fresh interpreter costs."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        """`variables`: additional ones of the environment."""
        self._variables = dict(variables or {})

    def __call__(self, n: int, folder: Path, command: Sequence[str], limit: float | None) -> None:
        size = max(n, 1)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            place = Place(size, listener.getsockname()[1], str(folder), self._variables)
            processes = [
                forkserver.Process(
                    target=_rank, args=(rank, place, tuple(command), None if rank else listener)
                )
                for rank in range(size)
            ]
            for process in processes:
                process.start()
        deadline = monotonic() + min(limit or LIMIT, LIMIT)
        try:
            while alive := [process for process in processes if process.exitcode is None]:
                wait([process.sentinel for process in alive], max(0.0, deadline - monotonic()))
                if any(process.exitcode for process in processes):
                    break
                if monotonic() > deadline:
                    made = [len(rank.steps) for rank in read_run(folder, size, 0.0).ranks]
                    raise ScriptLateError(n, limit or LIMIT, made)
        finally:
            for process in processes:
                process.kill()
                process.join()
        if any(process.exitcode for process in processes):
            words = "".join(path.read_text() for path in sorted(folder.glob("failed*")))
            made = [len(rank.steps) for rank in read_run(folder, size, 0.0).ranks]
            raise ScriptFailedError(n, words, made)


def _rank(
    rank: int, place: Place, command: tuple[str, ...], listener: socket.socket | None
) -> None:
    import torch

    from instep.distributed.communication import rank_local
    from instep.distributed.rendezvous import bootstrap
    from instep.launch.worker.static_opt_out import find_opt_out
    from instep.verify.recording import entry

    gc.freeze()  # what is imported is not looked through
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(devnull, stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (as long as the process)
    torch.set_num_threads(1)
    os.chdir(place.folder)
    os.environ |= REPEATABLE | {"INSTEP_WATCH": "off"} | dict(place.variables)
    multiprocessing.process._parent_process = None  # this is a rank, and no worker of one
    rank_local._depth.value = 0
    multiprocessing.set_start_method("fork", force=True)  # as in a fresh interpreter
    try:
        if place.size > 1:
            os.environ |= place.environment(rank)
            if listener is not None:
                os.environ[STORE_FD] = str(listener.detach())
            if find_opt_out(command):
                bootstrap.init()
        try:
            entry.main(place.folder, *command)
        finally:
            atexit._run_exitfuncs()  # multiprocessing does not
    except Exception:
        Path(place.folder, f"failed{rank}").write_text(traceback.format_exc())
        raise
