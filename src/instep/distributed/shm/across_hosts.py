"""A process group over several hosts, most of which have several ranks.

all_reduce is hierarchical. Each rank of a host reduces one slice of the tensor over its host, in
shared memory; the ranks with the same slice reduce it between the hosts, over Gloo; the ranks of a
host gather the slices. Where the hosts have unequal numbers of ranks, the first rank of each does
all of it for its host. So a tensor crosses the network once per host, not once per rank; in
`sum_rounded` with fewer bits for each number. A small tensor goes by messages between the first
ranks, without Gloo. All other collectives are left to Gloo.
"""

# mypy: disable-error-code="override"
# torch's stubs list overloads for callers; c10d itself calls the one that is defined here.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, ReduceOp, Store

from instep.distributed.flight_record.recorder import recorder
from instep.distributed.pending import Pending, RoundedSum
from instep.distributed.shm.exchange import Exchange
from instep.distributed.shm.host_channel import LONGEST_RESULT, HostChannel
from instep.distributed.shm.joining import place_of
from instep.distributed.shm.memory.flat import is_plain
from instep.distributed.shm.memory.reduction import (
    Reduction,
    buffer_count,
    find_reduction,
    reduce_into,
)
from instep.distributed.shm.memory.signals import CollectiveSignature, signature_of
from instep.distributed.shm.over_gloo import ProcessGroupOverGloo
from instep.distributed.shm.overloads import accept_overloads
from instep.distributed.shm.rank_connections import REASON_SECONDS
from instep.distributed.shm.work_queue import Collective, WorkQueue
from instep.process.torch_private.compiler import skip_methods
from instep.process.torch_private.distributed import AllreduceOptions, Work

_SMALL_BYTES = 16 << 10
"""Up to this size a tensor is not rounded."""
_SEGMENT_BYTES = 8 << 20
"""While one segment of a tensor is on the network, the next is reduced on the host."""


@dataclass(frozen=True)
class _HierarchicalReduce:
    """How a tensor is reduced."""

    reduction: Reduction
    """On a host."""
    opts: AllreduceOptions
    """Between the hosts, without the dtype."""
    rounded_to: torch.dtype | None
    """What is sent between the hosts; None: the tensor's own dtype."""

    @property
    def timeout(self) -> timedelta | None:
        """None: the group's."""
        return self.opts.timeout if self.opts.timeout.days >= 0 else None

    def between(self, hosts: ProcessGroup, values: Tensor) -> Pending:
        """Start to reduce `values` over the hosts into themselves."""

        def start(sent: Tensor) -> Pending:
            return hosts.allreduce([sent], self.opts)

        return RoundedSum(values, self.rounded_to, start) if self.rounded_to else start(values)


@dataclass(frozen=True)
class _Segment:
    """A range of a tensor, cut into one slice for each rank of a host."""

    values: Tensor
    padded: Tensor
    """The same memory, or a longer copy if the values cannot be divided."""
    slices: Sequence[Tensor]
    pending: Pending
    """The reduction of one slice between the hosts."""


@skip_methods
@accept_overloads
class ProcessGroupAcrossHosts(ProcessGroupOverGloo):
    """The group of `init_process_group("instep")` where the ranks of each host share memory."""

    _inter_host: ProcessGroup
    """Of the ranks with this rank on their hosts; of unequal hosts, of their first ranks only."""

    def __init__(
        self,
        store: Store,
        gloo: ProcessGroupGloo,
        name: str,
        exchange: Exchange,
        sizes: Sequence[int],
    ) -> None:
        """`exchange` joins the ranks of this host; `sizes`: how many ranks each host has. Their
        ranks are consecutive. Collective."""
        super().__init__(store, gloo, name)
        self._exchange = exchange
        self._queue = WorkQueue(self._abort, self._leave)
        group = self._recorded_as
        exchange.signals.describe = lambda: recorder.describe(group)
        host, host_rank = place_of(gloo.rank(), sizes)
        self._are_equal = len(set(sizes)) == 1
        self._sizes = sizes
        self._channel: HostChannel | None = None
        """Of the first rank of each host."""
        if host_rank == 0:
            firsts = [self._members[first] for first in (0, *accumulate(sizes[:-1]))]
            signals = exchange.signals
            self._channel = HostChannel(
                PrefixStore("channel/", store),
                host,
                firsts,
                signals.default_timeout,
                signals.describe,
            )
        if self._are_equal or host_rank == 0:
            prefix = PrefixStore(f"between{host_rank}/", store)
            between = ProcessGroupGloo(prefix, host, len(sizes), gloo.options._timeout)
            name = f"{name}/between{host_rank}"
            self._inter_host = ProcessGroupOverGloo(prefix, between, name, is_recorded=False)

    def allreduce(self, tensors: list[Tensor], opts: AllreduceOptions) -> Work:
        """all_reduce of one tensor; in the calling thread, if that waits for it."""
        if len(tensors) != 1 or tensors[0].numel() == 0:
            return super().allreduce(tensors, opts)
        if (reduction := _reduction(opts.reduceOp, tensors[0])) is None:
            return super().allreduce(tensors, opts)
        return self._issue(tensors[0], _HierarchicalReduce(reduction, opts, None))

    def sum_rounded(self, tensor: Tensor, dtype: torch.dtype) -> Work:
        """Start to sum a contiguous `tensor` of floats over all ranks into itself. What is sent
        between the hosts is rounded to `dtype`, and added up in it; small tensors are not.

        Each host's sum is rounded once, whatever the number of its ranks.
        """
        opts = _options(ReduceOp.SUM)
        if tensor.nbytes <= _SMALL_BYTES:
            return self.allreduce([tensor], opts)
        reduction = find_reduction(ReduceOp.SUM, tensor.dtype)
        assert reduction is not None
        return self._issue(tensor, _HierarchicalReduce(reduction, opts, dtype))

    def _issue(self, tensor: Tensor, how: _HierarchicalReduce) -> Work:
        def step(values: list[Tensor], *_: object) -> None:
            self._all_reduce(values[0], how)

        name = how.reduction.name
        signature = ("all_reduce", tensor.shape, tensor.dtype, self._recorded_as, None, name)
        collective = Collective(step, [tensor], signature=signature)
        return self._queue.issue(collective, "all_reduce", [tensor], how.opts.asyncOp)

    def shutdown(self) -> None:
        """Leave the group: peers that still wait for this rank get an error. Called by torch."""
        self._queue.close()
        super().shutdown()

    def _abort(self, why: str) -> None:
        self._exchange.signals.abort(why)
        if self._channel is not None:
            self._channel.abort(why)

    def _leave(self) -> None:
        self._exchange.signals.leave()
        if self._channel is not None:
            self._channel.close()

    def _all_reduce(self, whole: Tensor, how: _HierarchicalReduce) -> None:
        if whole.nbytes * self.size() <= LONGEST_RESULT:
            self._gather_and_reduce(whole, how)
        elif self._are_equal and not self._fits_channel(whole, how):
            self._reduce_by_slices(whole, how)
        else:
            self._reduce_by_first_ranks(whole, how)

    def _gather_and_reduce(self, whole: Tensor, how: _HierarchicalReduce) -> None:
        here, timeout = self._exchange, how.timeout
        signature = _signature(whole, how)
        of_host = here.all_gather_bytes(_bytes_of(whole), signature, timeout)
        if self._channel is not None:
            lengths = [size * whole.nbytes for size in self._sizes]
            of_all = self._channel.all_gather(of_host, lengths, signature, timeout)
            _reduce_parts(whole, of_all, self.size(), how.reduction)
        here.broadcast(whole, 0, self._until_all_hosts(timeout))

    def _until_all_hosts(self, timeout: timedelta | None) -> timedelta:
        """How long to wait for this host's first rank: longer than that one waits for the others,
        so that it says who did not come."""
        limit = timeout or self._exchange.signals.default_timeout()
        return limit + timedelta(seconds=2 * REASON_SECONDS)

    def _fits_channel(self, values: Tensor, how: _HierarchicalReduce) -> bool:
        """Whether the hosts' sums of `values` may be sent to all hosts."""
        return values.nbytes * len(self._sizes) <= LONGEST_RESULT and how.rounded_to is None

    def _start_between_hosts(self, values: Tensor, how: _HierarchicalReduce) -> Pending | None:
        """On the first rank of each host; None if it is over."""
        if not self._fits_channel(values, how):
            return how.between(self._inter_host, values)
        assert self._channel is not None
        lengths, signature = [values.nbytes] * len(self._sizes), _signature(values, how)
        of_all = self._channel.all_gather(_bytes_of(values), lengths, signature, how.timeout)
        _reduce_parts(values, of_all, len(self._sizes), how.reduction)
        return None

    def _reduce_by_slices(self, whole: Tensor, how: _HierarchicalReduce) -> None:
        here, timeout = self._exchange, how.timeout
        signature = _signature(whole, how)
        longest = _SEGMENT_BYTES // whole.itemsize // here.size * here.size
        segments = []
        for values in whole.split(longest):
            padded = _padded(values, here.size)
            slices = padded.view(here.size, padded.numel() // here.size).unbind()
            mine = slices[here.rank]
            here.reduce_scatter(mine, slices, how.reduction, timeout, signature)
            pending = how.between(self._inter_host, mine)
            segments.append(_Segment(values, padded, slices, pending))
        for segment in segments:
            segment.pending.wait()
            here.all_gather(segment.slices, segment.slices[here.rank], timeout, signature)
            if segment.padded is not segment.values:
                segment.values.copy_(segment.padded[: segment.values.numel()])

    def _reduce_by_first_ranks(self, whole: Tensor, how: _HierarchicalReduce) -> None:
        here, timeout, is_mean = self._exchange, how.timeout, how.reduction.is_mean
        if is_mean:  # the mean of the hosts' means is another one
            opts = _options(ReduceOp.SUM)
            opts.timeout = how.opts.timeout
            how = replace(how, reduction=replace(how.reduction, is_mean=False), opts=opts)
        started: list[tuple[Tensor, Pending | None]] = []
        for values in whole.split(_SEGMENT_BYTES // whole.itemsize):
            here.reduce(values, how.reduction, 0, timeout)
            is_first = here.rank == 0
            started.append((values, self._start_between_hosts(values, how) if is_first else None))
        for values, pending in started:
            if pending is not None:
                pending.wait()
            here.broadcast(values, 0, self._until_all_hosts(timeout))
        if is_mean:
            whole.div_(self.size())


def _signature(whole: Tensor, how: _HierarchicalReduce) -> CollectiveSignature:
    return signature_of("all_reduce", whole.dtype, whole.numel(), how.reduction.name)


def _bytes_of(flat: Tensor) -> bytes:
    return flat.view(torch.uint8).numpy().tobytes()


def _reduce_parts(out: Tensor, parts: bytearray, count: int, reduction: Reduction) -> None:
    """Write the reduction of `count` tensors, one after the other in `parts`, to `out`."""
    buffers = [torch.empty_like(out) for _ in range(buffer_count(count))]
    values = torch.frombuffer(parts, dtype=out.dtype).view(count, -1)
    reduce_into(out, values.unbind(), reduction, buffers)


def _options(op: ReduceOp.RedOpType) -> AllreduceOptions:
    opts = AllreduceOptions()
    opts.reduceOp = ReduceOp(op)
    return opts


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
