"""Scripts that call torch.distributed.init_process_group themselves.

torch's own store listens on every interface of the host. Here it listens at the address that the
ranks were told, on the socket that `instep run` holds if that is the one. A backend that cannot be
is answered with what to do.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from instep.distributed.errors import BackendError, PortInUseError, RendezvousError
from instep.distributed.identity import launchers
from instep.distributed.rendezvous import listening
from instep.process.import_hooks import after_import


def expect() -> None:
    """Step in as soon as the script has imported torch.distributed."""
    after_import("torch.distributed.rendezvous", _stores)
    after_import("torch.distributed.distributed_c10d", _backends)


def _stores(rendezvous: ModuleType) -> None:
    vars(rendezvous)["TCPStore"] = _on_one_address(rendezvous.TCPStore)


def _on_one_address(store: Callable[..., Any]) -> Callable[..., Any]:
    """TCPStore as torch's rendezvous calls it: by keywords."""

    def open_store(**told: Any) -> Any:
        from instep.distributed.rendezvous import (
            stores,  # needs torch, which the script has imported
        )

        if (met_before := stores.again(told["host_name"], told["port"])) is not None:
            return met_before
        if not told["is_master"]:
            return store(**told)
        try:
            listener = _listener(told["host_name"], told["port"])
        except RendezvousError:  # the address of a gateway, say: only torch's way can be right
            return store(**told)
        except PortInUseError as error:  # by an earlier store of this process, perhaps
            try:
                return store(**told)
            except RuntimeError:
                raise error from None
        host, port = listener.getsockname()[:2]
        return store(**told | {"host_name": host, "port": port}, master_listen_fd=listener.detach())

    return open_store


def _listener(host: str, port: int) -> socket.socket:
    listener = listening.handed_down(port)
    if listener is None:
        listener = listening.reserve(host, port, one_host=launchers.detect().one_host)
    listener.listen(socket.SOMAXCONN)
    return listener


def _backends(c10d: ModuleType) -> None:
    """torch.distributed takes its names from this module, a little later."""
    begin = c10d.init_process_group

    @wraps(begin)
    def init_process_group(backend: str | None = None, *rest: Any, **named: Any) -> None:
        _refuse(backend)
        begin(backend, *rest, **named)

    vars(c10d)["init_process_group"] = init_process_group


def _refuse(backend: str | None) -> None:
    import torch.distributed

    asked = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}
    if "nccl" in asked and not torch.cuda.is_available():
        raise BackendError.no_gpu(torch.__version__)
    if "mpi" in asked and not torch.distributed.is_mpi_available():
        raise BackendError.no_mpi(torch.__version__)
