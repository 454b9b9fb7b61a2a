"""`horovod.run(fn, np=2)`, by `instep.spawn`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.distributed.rendezvous import bootstrap
from instep.errors import CommandLineError
from instep.launch.remote.host_slots import is_this_host, parse_hosts, read_hosts, take_slots
from instep.launch.spawn import spawn

_ELASTIC = (
    *("min_num_proc", "max_num_proc", "min_np", "max_np", "slots", "reset_limit"),
    *("cooldown_range", "host_discovery_script"),
)


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on `num_proc` new processes of this host; see `instep.spawn`.

    Args:
        func: copied to the ranks with its arguments, also if it is one of a notebook's cell.
        num_proc: the number of ranks; `np` is its older name.
        hosts, hostfile: as for `horovodrun -H` and `--hostfile`; they may only name this host.
        output_filename: a folder for the ranks' output, else each line begins with its rank.

    Arguments about ssh, MPI, network interfaces, caches, time limits and verbosity have no effect.

    Returns:
        The results, in the order of ranks.

    Raises CommandLineError for elastic jobs, other hosts, another `executable`, and inside of a job
    of several ranks; CannotSendError; RankFailedError with the traceback of the rank that failed
    first.
    """
    given = locals()
    for name in _ELASTIC:
        if given[name] is not None:
            raise CommandLineError(
                f"horovod.run does not take {name}: an elastic job is started by "
                "`instep horovodrun -np N --min-np M python train.py`."
            )
    if executable is not None and Path(executable).resolve() != Path(sys.executable).resolve():
        raise CommandLineError(
            f"horovod.run does not take executable: ranks are run by {sys.executable}. Start the "
            "script with the other Python."
        )
    if use_gloo and use_mpi:
        raise CommandLineError("horovod.run takes use_gloo or use_mpi, not both.")
    size = num_proc if np is None else np
    _check_hosts(hosts, hostfile, size)
    if bootstrap.current().size > 1:
        raise CommandLineError(
            "horovod.run starts ranks, but this process is one of several already. Start the "
            "script once, by `instep run -n 1 train.py`, or call the function itself."
        )
    output = "prefix" if output_filename is None else os.fspath(output_filename)
    return spawn(_call, (func, tuple(args), dict(kwargs or {})), size, output=output)


def _call(
    local_rank: int, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    return func(*args, **kwargs)


def _check_hosts(hosts: str | None, hostfile: str | None, size: int) -> None:
    """Raises CommandLineError unless they have `size` slots on this host."""
    if hosts is not None and hostfile is not None:
        raise CommandLineError("horovod.run takes hosts or hostfile, not both.")
    if hostfile is not None:
        found = read_hosts(hostfile)
    elif hosts is not None:
        found = parse_hosts(hosts)
    else:
        return
    others = [host for host in take_slots(found, size) if not is_this_host(host)]
    if others:
        raise CommandLineError(
            f"horovod.run starts ranks on this host only, not on {', '.join(others)}. Start the "
            f"script by `instep horovodrun -H {others[0]}:N,... python train.py`."
        )
