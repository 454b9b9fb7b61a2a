"""Horovod's interface for PyTorch, on maintained PyTorch.

    import instep.compat.horovod as hvd    # or, under `instep run`, import horovod.torch as hvd

Names and arguments are those of Horovod 0.28, the implementation is instep's. Collectives are
matched by name, not by the order of calls, and an average counts every rank alike, as in Horovod.
HOROVOD_TIMELINE names the file of a timeline for the whole job; `start_timeline` and
`stop_timeline` write one of a part of it, with the collectives of rank 0.
"""

from __future__ import annotations

import sys

from instep.compat.horovod import elastic
from instep.compat.horovod.basics import (
    ProcessSet,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
)
from instep.compat.horovod.collectives.gather_broadcast import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from instep.compat.horovod.collectives.handles import barrier, join, poll, synchronize
from instep.compat.horovod.collectives.reduce_scatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from instep.compat.horovod.collectives.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from instep.compat.horovod.compression import Compression
from instep.compat.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from instep.compat.horovod.ops import Adasum, Average, Max, Min, Product, Sum
from instep.compat.horovod.optimizer import DistributedOptimizer
from instep.compat.horovod.sync_batch_norm import SyncBatchNorm
from instep.distributed.flight_record import timeline_file
from instep.distributed.negotiation.errors import NegotiationError as HorovodInternalError

mpi_ops = sys.modules[__name__]
"""Where Horovod defines its collectives; libraries look for them there."""


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a timeline of rank 0's collectives from now on; other ranks do nothing.

    Args:
        file_path: replaced if it exists. `instep timeline FILE` shows it. A file that was started
            before is ended.
        mark_cycles: with an event CYCLE_START where rank 0 is told that all ranks are ready.

    Raises ValueError if rank 0 writes that of the whole job, OSError if it cannot write there.
    """
    if rank() == 0:
        timeline_file.start_part(file_path, marks_cycles=mark_cycles)


def stop_timeline() -> None:
    """End the timeline that was started; does nothing without one."""
    timeline_file.stop_part()


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
