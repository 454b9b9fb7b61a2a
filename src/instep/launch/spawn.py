"""`instep.spawn`: a function on several processes, from a script or a notebook."""

from __future__ import annotations

import inspect
import linecache
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.launch import job_run
from instep.launch.errors import CannotSendError, RankFailedError
from instep.launch.job import Job, check_size
from instep.launch.multi_node.hosts import detect_nodes
from instep.launch.ray.actors import run_actors
from instep.launch.worker.spawned_call import CALL, result_file


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    *,
    output: str = "prefix",
    ray: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Call `fn(i, *args)` on `nprocs` new processes of this host, as torch's mp.spawn does.

    Args:
        fn: any function, also one of a notebook's cell; `i` is the local rank, from 0. In it
            `instep.rank` and the variables of init_process_group are set.
        args: further arguments. The function and its arguments are copied to the ranks.
        nprocs: the number of ranks.
        output: `prefix`, `rank0` or a folder, as `--output` of `instep run`.
        ray: options of ray.remote, as in `{"num_cpus": 2}`, or `{}`: the ranks are then actors of
            the Ray cluster to which this process is connected, on any of its nodes, and Ray shows
            their output.

    Returns:
        The results of this host's ranks, in the order of their numbers.

    Under a launcher that started one task per host (`srun --ntasks-per-node=1`), one job runs on
    all hosts, and `instep.rank` is the task's number times `nprocs` plus `i`.

    When it returns or raises, no process of the job is left on this host. Raises RankFailedError
    with the traceback of the rank that failed first, CannotSendError, LaunchError if the job
    cannot start, KeyboardInterrupt if this process gets SIGINT, and TypeError if `fn` is no
    function or does not take these arguments.
    """
    check_size(nprocs, "nprocs")
    if not callable(fn):
        raise TypeError(
            f"instep.spawn calls a function, not {fn!r}. A script is started on the command line, "
            f"or in a notebook's cell: !instep run -n {nprocs} train.py"
        )
    _check_arguments(fn, args)
    if ray is not None:
        return run_actors(fn, args, nprocs, ray)
    with tempfile.TemporaryDirectory(prefix="instep-") as name:
        folder = Path(name)
        (folder / CALL).write_bytes(_pickle_call(fn, tuple(args)))
        job = Job(
            nprocs,
            ("-m", "instep.launch.worker.spawned_call", name),
            output,
            plain=True,
            hosts=detect_nodes(os.environ, nprocs),
            fingerprint=JobFingerprint.of_this_process(),
        )
        result = job_run.run_job(job, started=lambda: None, folder=folder)
        if result.requested_signal is not None:
            _raise_signal(result.requested_signal)
        if result.first is not None:
            raise RankFailedError(result.report.rstrip(), result.first.rank, result.code)
        return [pickle.loads(result_file(folder, i).read_bytes()) for i in range(nprocs)]


def _check_arguments(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # unknown, as of many functions written in C
        return
    try:
        signature.bind(0, *args)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"{name}: {error}. instep.spawn calls it with the local rank, and then with args."
        ) from None


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle what the ranks need to find modules, and then the call."""
    import cloudpickle  # takes time that `instep run` must not wait for

    cells = {name: entry for name, entry in linecache.cache.items() if _is_in_memory_only(entry)}
    try:
        call = cloudpickle.dumps((fn, args))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        name = getattr(fn, "__name__", repr(fn))
        raise CannotSendError(
            f"{name} and its arguments cannot be sent to the ranks: {error}. Open files, locks and "
            "connections inside the function instead."
        ) from error
    return pickle.dumps((sys.path, sys.argv, cells)) + bytes(call)


def _is_in_memory_only(entry: tuple[Any, ...]) -> bool:
    """Whether it is the text of a notebook's cell, which tracebacks quote."""
    return len(entry) == 4 and entry[1] is None


def _raise_signal(number: signal.Signals) -> None:
    """Do what the signal would have done if this process had not been waiting for its ranks."""
    if number is signal.SIGINT:
        raise KeyboardInterrupt
    signal.raise_signal(number)
