"""Several ranks on this host's one GPU, which instep and NCCL refuse outside of tests.

NCCL is told that each rank has a host of its own (NCCL_HOSTID), so that its ranks talk through
sockets of the loopback interface. It is real in everything but its speed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

NAME = "cuda"


@dataclass
class Host:
    """Where the host waits for the GPU, as `file:line: what PyTorch says of it`."""

    reads: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    """None are told apart from reads here."""


def install(rank: int) -> None:
    """Let this process, which is this rank, share the GPU with the others."""
    from instep.distributed.rendezvous import bootstrap

    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    bootstrap.check_devices_differ = lambda *_: None


@contextmanager
def counted() -> Iterator[Host]:
    """What the host waits for inside, by PyTorch's own account."""
    host = Host()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield host
        finally:
            torch.cuda.set_sync_debug_mode("default")
    host.reads += [
        f"{each.filename}:{each.lineno}: {each.message}"
        for each in caught
        if "synchronizing CUDA operation" in str(each.message)
    ]
