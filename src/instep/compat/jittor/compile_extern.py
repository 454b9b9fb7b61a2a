"""`jittor.compile_extern`: whether there is MPI, which scripts ask here."""

from __future__ import annotations

from instep.compat.jittor import mpi as mpi
from instep.distributed.rendezvous import bootstrap

has_mpi = True
"""Ranks communicate, whatever started them."""


def inside_mpi() -> bool:
    """Whether the job has several processes."""
    return bootstrap.current().parallel
