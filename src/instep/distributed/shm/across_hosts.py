"""A process group over several hosts that all have the same number of ranks.

all_reduce is hierarchical. Each rank of a host reduces one slice of the tensor over its host, in
shared memory; the ranks with the same slice reduce it between the hosts, over Gloo; the ranks of a
host gather the slices. So a tensor crosses the network once per host, not once per rank. All other
collectives are left to Gloo.
"""

# mypy: disable-error-code="override"
# torch's stubs list overloads for callers; c10d itself calls the one that is defined here.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, ReduceOp, Store

from instep.distributed.flight_record.recorder import recorder
from instep.distributed.shm.exchange import Exchange
from instep.distributed.shm.memory.flat import is_plain
from instep.distributed.shm.memory.reduction import Reduction, find_reduction
from instep.distributed.shm.memory.signals import signature_of
from instep.distributed.shm.over_gloo import ProcessGroupOverGloo
from instep.distributed.shm.overloads import accept_overloads
from instep.distributed.shm.work_queue import Collective, WorkQueue
from instep.process.torch_private import AllreduceOptions, Work, skip_methods

_SMALL_BYTES = 16 << 10
"""Up to this size a tensor is not sliced: each rank reduces all of it with the other hosts."""
_SEGMENT_BYTES = 8 << 20
"""While one segment of a tensor is on the network, the next is reduced on the host."""


@dataclass(frozen=True)
class _Segment:
    """A range of a tensor, cut into one slice for each rank of a host."""

    values: Tensor
    padded: Tensor
    """The same memory, or a longer copy if the values cannot be divided."""
    slices: Sequence[Tensor]
    work: Work
    """The reduction of one slice between the hosts."""


@skip_methods
@accept_overloads
class ProcessGroupAcrossHosts(ProcessGroupOverGloo):
    """The group of `init_process_group("instep")` where the ranks of each host share memory."""

    def __init__(self, store: Store, gloo: ProcessGroupGloo, name: str, exchange: Exchange) -> None:
        """`exchange` joins the ranks of this host. Collective."""
        super().__init__(store, gloo, name)
        self._exchange = exchange
        self._queue = WorkQueue(exchange.signals.abort, exchange.signals.leave)
        group = self._recorded_as
        exchange.signals.describe = lambda: recorder.describe(group)
        self._inter_host = _inter_host_group(store, gloo, name, exchange)

    def allreduce(self, tensors: list[Tensor], opts: AllreduceOptions) -> Work:
        """all_reduce of one tensor; in the calling thread, if that waits for it."""
        if len(tensors) != 1 or (reduction := _reduction(opts.reduceOp, tensors[0])) is None:
            return super().allreduce(tensors, opts)
        chosen = reduction

        def step(values: list[Tensor], *_: object) -> None:
            self._all_reduce(values[0], chosen, opts)

        shape, dtype = tensors[0].shape, tensors[0].dtype
        signature = ("all_reduce", shape, dtype, self._recorded_as, None, reduction.name)
        collective = Collective(step, tensors, signature=signature)
        return self._queue.issue(collective, "all_reduce", tensors, opts.asyncOp)

    def shutdown(self) -> None:
        """Leave the group: peers that still wait for this rank get an error. Called by torch."""
        self._queue.close()
        super().shutdown()

    def _all_reduce(self, whole: Tensor, reduction: Reduction, opts: AllreduceOptions) -> None:
        timeout = opts.timeout if opts.timeout.days >= 0 else None
        if whole.numel() * whole.itemsize > _SMALL_BYTES:
            self._reduce_by_slices(whole, reduction, opts, timeout)
        else:
            self._exchange.all_reduce(whole, reduction, timeout)
            self._inter_host.allreduce([whole], opts).wait()

    def _reduce_by_slices(
        self, whole: Tensor, reduction: Reduction, opts: AllreduceOptions, timeout: timedelta | None
    ) -> None:
        here = self._exchange
        signature = signature_of("all_reduce", whole.dtype, whole.numel(), reduction.name)
        longest = _SEGMENT_BYTES // whole.itemsize // here.size * here.size
        pending = []
        for values in whole.split(longest):
            padded = _padded(values, here.size)
            slices = padded.view(here.size, padded.numel() // here.size).unbind()
            mine = slices[here.rank]
            here.reduce_scatter(mine, slices, reduction, timeout, signature)
            work = self._inter_host.allreduce([mine], opts)
            pending.append(_Segment(values, padded, slices, work))
        for segment in pending:
            segment.work.wait()
            here.all_gather(segment.slices, segment.slices[here.rank], timeout, signature)
            if segment.padded is not segment.values:
                segment.values.copy_(segment.padded[: segment.values.numel()])


def _inter_host_group(
    store: Store, gloo: ProcessGroupGloo, name: str, exchange: Exchange
) -> ProcessGroup:
    """A group of the ranks that have the same rank on their hosts."""
    prefix = PrefixStore(f"between{exchange.rank}/", store)
    host, hosts = gloo.rank() // exchange.size, gloo.size() // exchange.size
    gloo_group = ProcessGroupGloo(prefix, host, hosts, gloo.options._timeout)
    name = f"{name}/between{exchange.rank}"
    return ProcessGroupOverGloo(prefix, gloo_group, name, is_recorded=False)


def _reduction(op: ReduceOp, tensor: Tensor) -> Reduction | None:
    """The reduction on a host and between hosts, or None to leave all of it to Gloo."""
    # Gloo leaves 2 in a bool, and knows complex numbers only as pairs of real ones.
    if not is_plain(tensor) or tensor.dtype is torch.bool or tensor.is_complex():
        return None
    op_type: ReduceOp.RedOpType = op.op  # type: ignore[attr-defined]
    return find_reduction(op_type, tensor.dtype)


def _padded(values: Tensor, unit: int) -> Tensor:
    """The values, with zeros behind them up to a multiple of `unit`."""
    missing = -values.numel() % unit
    return torch.cat([values, values.new_zeros(missing)]) if missing else values
