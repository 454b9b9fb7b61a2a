"""Patches for scripts that call torch.distributed.init_process_group themselves.

torch's TCPStore listens on every interface of the host. Here it listens on MASTER_ADDR only, if
possible on the socket that `instep run` has bound. A backend that this host does not have is an
error with advice. A group for which the script gives no time limit takes INSTEP_TIMEOUT where that
is set. The ranks of the script's group are watched as those of instep's own are, and its
DistributedDataParallel models are compared between them. If instep has made the process group
before, as `hvd.init` does, the script gets that one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakSet

from instep.distributed.errors import BackendError, PortInUseError, RendezvousError
from instep.distributed.identity import launchers
from instep.distributed.rendezvous import listening
from instep.process.patching import Patch, PatchHandle

_shared: WeakSet[Any] = WeakSet()
"""Process groups that instep has made, and the script has as its own: it has called
init_process_group."""


def install_patches() -> None:
    """Patch torch.distributed as soon as the script imports it."""
    groups = "torch.distributed.distributed_c10d"
    PatchHandle(
        [
            Patch("torch.distributed.rendezvous", "TCPStore", _open_store),
            Patch(groups, "init_process_group", _init_process_group),
            Patch(groups, "destroy_process_group", _destroy_process_group),
            Patch(groups, "new_group", _new_group),
            Patch("torch.nn.parallel.distributed:DistributedDataParallel", "__init__", _make_ddp),
        ]
    )


def _open_store(store: Callable[..., Any], **options: Any) -> Any:
    """TCPStore, as torch's rendezvous calls it with keywords."""
    from instep.distributed.rendezvous import stores  # needs torch, which the script has imported

    if (met_before := stores.reopen(options["host_name"], options["port"])) is not None:
        return met_before
    if not options["is_master"]:
        return store(**options)
    try:
        listener = _listener(options["host_name"], options["port"])
    except RendezvousError:  # such as the address of a gateway: leave it to torch
        return store(**options)
    except PortInUseError as error:  # perhaps by an earlier store of this process
        try:
            return store(**options)
        except RuntimeError:
            raise error from None
    host, port = listener.getsockname()[:2]
    address = {"host_name": host, "port": port, "master_listen_fd": listener.detach()}
    return store(**options | address)


def _listener(host: str, port: int) -> socket.socket:
    listener = listening.inherited_listener(port)
    if listener is None:
        listener = listening.bind(host, port, one_host=launchers.detect().one_host)
    listener.listen(socket.SOMAXCONN)
    return listener


def _init_process_group(
    original: Callable[..., None],
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    from instep.distributed.rendezvous import bootstrap

    _check_backend(backend)
    group = bootstrap.own_group()
    if group is not None and group not in _shared:
        _check_numbers(*args, **kwargs)
        _shared.add(group)
        return
    original(backend, init_method, timeout or bootstrap.default_timeout(), *args, **kwargs)
    bootstrap.watch_group()


def _check_numbers(world_size: int = -1, rank: int = -1, *_: Any, **__: Any) -> None:
    """Raise RendezvousError for other numbers than those of the group that there is."""
    from instep.distributed.rendezvous import bootstrap

    world = bootstrap.current()
    if world_size in (-1, world.size) and rank in (-1, world.rank):
        return
    raise RendezvousError(
        f"this is rank {world.rank} of {world.size}, in a process group that instep has made; "
        f"init_process_group(rank={rank}, world_size={world_size}) asks for another one. Leave "
        "out both, or call it before what needs the other ranks (hvd.init, instep.replicate)."
    )


def _destroy_process_group(original: Callable[..., None], group: Any = None) -> None:
    from torch.distributed import group as groups

    world = groups.WORLD
    if world in _shared and group in (None, world):
        _shared.remove(world)  # it stays: Horovod's functions, say, go on
    else:
        original(group)


def _new_group(
    original: Callable[..., Any],
    ranks: Any = None,
    timeout: timedelta | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    from instep.distributed.rendezvous import bootstrap

    return original(ranks, timeout or bootstrap.default_timeout(), *args, **kwargs)


def _make_ddp(original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    from instep.training.drift import ddp

    ddp.follow(original, model, *args, **kwargs)


def _backends_here() -> str:
    """What to pass to init_process_group on this host."""
    from instep.distributed.identity import torch_devices

    row = torch_devices.current_row()
    if row is None or row.backend is None:
        return "'gloo' for CPUs"
    return f"'{row.backend}' for the {row.title}s that are here"


def _check_backend(backend: str | None) -> None:
    import torch.distributed

    from instep.distributed.identity import torch_devices
    from instep.distributed.identity.accelerators import ACCELERATORS

    asked = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}
    for name in asked:
        rows = [row for row in ACCELERATORS if row.backend == name]
        if rows and torch_devices.accelerator_type() not in {row.name for row in rows}:
            title, variable = rows[0].title, rows[0].variable()
            raise BackendError(
                f"the backend {name!r} needs {title}s, and torch {torch.__version__} sees none on "
                f"this host. Pass {_backends_here()}, or no backend: then torch chooses by the "
                f"host's devices. On a host with {title}s, check {variable} and the build of torch."
            )
    if "mpi" in asked and not torch.distributed.is_mpi_available():
        raise BackendError(
            "the backend 'mpi' needs a torch that was built from source with MPI; torch "
            f"{torch.__version__} was not. Pass {_backends_here()}; mpirun can still start the "
            "ranks."
        )
