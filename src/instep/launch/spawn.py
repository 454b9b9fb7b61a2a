"""`instep.spawn`: a function on several processes, from a script or a notebook."""

from __future__ import annotations

import linecache
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.launch import supervisor
from instep.launch.errors import CannotSendError, RankFailedError
from instep.launch.job import Job
from instep.launch.multihost.hosts import detect_nodes
from instep.launch.worker.spawned_call import CALL, result_file


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    *,
    output: str = "prefix",
) -> list[Any]:
    """Call `fn(i, *args)` on `nprocs` new processes of this host, as torch's mp.spawn does.

    Args:
        fn: any function, one of a notebook's cell too; `i` is the local rank, from 0. It finds
            its world in place: `instep.rank`, and init_process_group's variables.
        args: what else it is called with. Function and arguments are copied to the ranks.
        nprocs: how many ranks.
        output: `prefix`, `rank0` or a folder, as `--output` of `instep run`.

    Returns:
        What the ranks of this host returned, in their order.

    Under a launcher that started one task per host (`srun --ntasks-per-node=1`), the job is all
    hosts' and `instep.rank` counts through: the task's number times `nprocs` plus `i`.

    When it returns or raises, no process of the job is left on this host. Raises RankFailedError
    with the traceback of the rank that failed first; CannotSendError; LaunchError where the job
    cannot start; KeyboardInterrupt when this process gets SIGINT.
    """
    with tempfile.TemporaryDirectory(prefix="instep-") as name:
        folder = Path(name)
        (folder / CALL).write_bytes(_pickle_call(fn, tuple(args)))
        job = Job(
            nprocs,
            ("-m", "instep.launch.worker.spawned_call", name),
            output,
            plain=True,
            hosts=detect_nodes(os.environ, nprocs),
            card=JobFingerprint.of_this_process(),
        )
        result = supervisor.run_job(job, started=lambda: None, folder=folder)
        if result.requested_signal is not None:
            _raise_signal(result.requested_signal)
        if result.first is not None:
            raise RankFailedError(result.report.rstrip(), result.first.rank, result.code)
        return [pickle.loads(result_file(folder, i).read_bytes()) for i in range(nprocs)]


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """First what the ranks need to find modules, then the call."""
    import cloudpickle  # costs what `instep run` should not wait for

    cells = {name: entry for name, entry in linecache.cache.items() if _is_in_memory_only(entry)}
    try:
        call = cloudpickle.dumps((fn, args))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        name = getattr(fn, "__name__", repr(fn))
        raise CannotSendError.call(name, str(error)) from error
    return pickle.dumps((sys.path, sys.argv, cells)) + bytes(call)


def _is_in_memory_only(entry: tuple[Any, ...]) -> bool:
    """The text of a notebook's cell, which a traceback quotes."""
    return len(entry) == 4 and entry[1] is None


def _raise_signal(number: signal.Signals) -> None:
    """What the signal would have done to this process, had it not waited for the ranks."""
    if number is signal.SIGINT:
        raise KeyboardInterrupt
    signal.raise_signal(number)
