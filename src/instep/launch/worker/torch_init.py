"""Scripts that call torch.distributed.init_process_group themselves.

torch's own store listens on every interface of the host. Here it listens at the address that the
ranks were told, on the socket that `instep run` holds if that is the one. A backend that cannot be
is answered with what to do.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from instep.distributed.errors import BackendError, PortInUseError, RendezvousError
from instep.distributed.identity import launchers
from instep.distributed.rendezvous import listening
from instep.process.patching import Patch, PatchHandle


def install_patches() -> None:
    """Answer for torch's functions as soon as the script has imported torch.distributed, which
    takes their names from these modules a little later."""
    PatchHandle(
        [
            Patch("torch.distributed.rendezvous", "TCPStore", _open_store),
            Patch("torch.distributed.distributed_c10d", "init_process_group", _init_process_group),
        ]
    )


def _open_store(store: Callable[..., Any], **options: Any) -> Any:
    """TCPStore as torch's rendezvous calls it: by keywords."""
    from instep.distributed.rendezvous import stores  # needs torch, which the script has imported

    if (met_before := stores.reopen(options["host_name"], options["port"])) is not None:
        return met_before
    if not options["is_master"]:
        return store(**options)
    try:
        listener = _listener(options["host_name"], options["port"])
    except RendezvousError:  # the address of a gateway, say: only torch's way can be right
        return store(**options)
    except PortInUseError as error:  # by an earlier store of this process, perhaps
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
    original: Callable[..., None], backend: str | None = None, *args: Any, **kwargs: Any
) -> None:
    _check_backend(backend)
    original(backend, *args, **kwargs)


def _check_backend(backend: str | None) -> None:
    import torch.distributed

    asked = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}
    if "nccl" in asked and not torch.cuda.is_available():
        raise BackendError(
            f"the backend 'nccl' needs GPUs, and torch {torch.__version__} sees none on this host. "
            "Say 'gloo' for CPUs, or no backend at all: then torch takes what the host has. "
            "On a GPU host, look at CUDA_VISIBLE_DEVICES and at which build of torch this is."
        )
    if "mpi" in asked and not torch.distributed.is_mpi_available():
        raise BackendError(
            "the backend 'mpi' needs a torch that was built from source with MPI; torch "
            f"{torch.__version__} was not. Say 'nccl' (GPUs) or 'gloo' (CPUs): mpirun may start "
            "the ranks all the same."
        )
