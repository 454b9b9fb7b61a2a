"""The c10d backend: the methods that torch.distributed calls, in shared memory or over Gloo.

The choice between them depends only on properties that are equal on all ranks (op, dtype, layout),
never on those of one rank (strides, gradients, inference mode): otherwise some ranks would wait in
shared memory and others in Gloo.
"""

# mypy: disable-error-code="override"
# torch's stubs list overloads for callers; c10d itself calls the one that is defined here.

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, ReduceOp, Store

from instep.distributed.flight_record.recorder import recorder
from instep.distributed.shm.exchange import Exchange
from instep.distributed.shm.memory.flat import is_plain, match
from instep.distributed.shm.memory.reduction import Reduction, find_reduction
from instep.distributed.shm.memory.signals import signature_of
from instep.distributed.shm.memory_handover import open_on_all_ranks
from instep.distributed.shm.over_gloo import ProcessGroupOverGloo
from instep.distributed.shm.overloads import accept_overloads
from instep.distributed.shm.shared_buckets import Resident, SharedBucket, reduce_to_host
from instep.distributed.shm.work_queue import Collective, Signature, Step, WorkQueue
from instep.process.torch_private.compiler import skip_methods
from instep.process.torch_private.distributed import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
    Work,
)

_NUMBER_BYTES = torch.float64.itemsize


class _Options(Protocol):
    """The options of every collective."""

    timeout: timedelta
    asyncOp: bool  # noqa: N815 - torch's name


@skip_methods
@accept_overloads
class InstepProcessGroup(ProcessGroupOverGloo):
    """The group of `init_process_group("instep")` where all ranks share memory.

    `resident` and `shares_memory` are for users; `torch.distributed` calls the rest.
    """

    def __init__(self, store: Store, gloo: ProcessGroupGloo, name: str, exchange: Exchange) -> None:
        super().__init__(store, gloo, name)
        self._exchange = exchange
        self._queue = WorkQueue(exchange.signals.abort, exchange.signals.leave)
        group = self._recorded_as
        exchange.signals.describe = lambda: recorder.describe(group)

    def shares_memory(self) -> bool:
        """True."""
        return True

    def resident(self, numel: int, dtype: torch.dtype = torch.float32) -> Resident:
        """A new bucket of `numel` zeros on every rank, which is reduced in place. Collective.

        Raises SharedMemoryError on all ranks if there is not enough memory for all of them.
        """
        queue = self._queue
        bucket = queue.call(
            lambda: SharedBucket(self._exchange, numel, dtype),
            self._signature("resident", (numel,), dtype),
        )

        def all_reduce(op: ReduceOp.RedOpType, is_async: bool) -> Work:
            reduction = bucket.reduction(op)
            collective = Collective(
                lambda *_: bucket.all_reduce(reduction),
                signature=self._signature("reduce_resident", (numel,), dtype, None, op.name),
            )
            return queue.issue(collective, "reduce_resident", [bucket.mine], is_async)

        return Resident(bucket.mine, all_reduce)

    def open_memory(self, size: int) -> int:
        """The descriptor of new memory of `size` bytes or more. Every rank has it open. Collective.

        Raises SharedMemoryError on all ranks if any of them cannot have it.
        """
        signature = self._signature("open_memory", (size,), torch.uint8)
        return self._queue.call(lambda: open_on_all_ranks(self._exchange, size), signature)

    def all_reduce_now(self, tensors: list[Tensor], op: ReduceOp.RedOpType) -> None:
        """Blocking all_reduce of each of several tensors of one dtype, without torch's dispatcher.

        The dispatcher takes longer than the reduction of a small tensor.
        """
        if (reduction := _reduction(op, tensors)) is None:
            opts = AllreduceCoalescedOptions()
            opts.reduceOp, opts.asyncOp = ReduceOp(op), False
            super().allreduce_coalesced(tensors, opts).wait()
            return
        exchange, chosen = self._exchange, reduction

        def step(values: list[Tensor], _: list[Tensor], timeout: timedelta | None) -> None:
            exchange.all_reduce_each(values, chosen, timeout)

        shape = tensors[0].shape if len(tensors) == 1 else (sum(t.numel() for t in tensors),)
        signature = ("all_reduce", shape, tensors[0].dtype, self._recorded_as, None, reduction.name)
        self._queue.run(Collective(step, tensors, signature=signature), "all_reduce", tensors)

    def all_reduce_to_host_now(
        self, tensors: list[Tensor], results: list[Tensor], op: ReduceOp.RedOpType
    ) -> None:
        """As `all_reduce_now`, into `results`: 1-D tensors in memory that all ranks share."""
        reduction = _reduction(op, tensors)
        assert reduction is not None
        exchange, chosen = self._exchange, reduction

        def step(_: list[Tensor], values: list[Tensor], timeout: timedelta | None) -> None:
            reduce_to_host(exchange, values, results, chosen, timeout)

        numel = sum(tensor.numel() for tensor in tensors)
        signature = self._signature("all_reduce", (numel,), tensors[0].dtype, None, chosen.name)
        self._queue.run(Collective(step, (), tensors, signature=signature), "all_reduce", results)

    def all_gather_now(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor, without torch's dispatcher."""
        opts = AllgatherOptions()
        opts.asyncOp = False
        outputs = [torch.empty_like(mine) for _ in range(self.size())]
        self.allgather([outputs], [mine], opts).wait()
        return outputs

    def all_gather_bytes_now(self, mine: bytes) -> bytes:
        """Every rank's few float64 numbers, as bytes, one rank's after another's."""
        exchange = self._exchange
        count = len(mine) // _NUMBER_BYTES
        if len(mine) > exchange.part_bytes:
            own = torch.frombuffer(bytearray(mine), dtype=torch.float64)
            return torch.cat(self.all_gather_now(own)).numpy().tobytes()
        signature = signature_of("all_gather", torch.float64, count)
        return self._queue.call(
            lambda: exchange.all_gather_bytes(mine, signature, None),
            ("all_gather", (count,), torch.float64, self._recorded_as, None, ""),
        )

    def all_gather_each_now(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Overwrite the 1-D tensors `parts[r]`, of one dtype, with those of rank r, for each r."""
        written = [t for rank, each in enumerate(parts) if rank != self.rank() for t in each]
        numel = sum(tensor.numel() for each in parts for tensor in each)
        if numel == 0:
            return
        exchange = self._exchange
        dtype = next(tensor.dtype for each in parts for tensor in each)
        signature = self._signature("all_gather_each", (numel,), dtype)
        collective = Collective(
            lambda *args: exchange.all_gather_each(parts, args[2]), signature=signature
        )
        self._queue.run(collective, "all_gather_each", written)

    def allreduce(self, tensors: list[Tensor], opts: AllreduceOptions) -> Work:
        """all_reduce of one tensor."""
        if len(tensors) != 1 or (reduction := _reduction(_op_type(opts.reduceOp), tensors)) is None:
            return super().allreduce(tensors, opts)
        exchange, chosen = self._exchange, reduction

        def step(values: list[Tensor], _: list[Tensor], timeout: timedelta | None) -> None:
            exchange.all_reduce(values[0], chosen, timeout)

        return self._issue("all_reduce", tensors, step, opts, reduction=reduction.name)

    def allreduce_coalesced(
        self, tensors: list[Tensor], opts: AllreduceOptions | None = None
    ) -> Work:
        """all_reduce of each of several tensors of one dtype."""
        opts = opts or AllreduceCoalescedOptions()
        if (reduction := _reduction(_op_type(opts.reduceOp), tensors)) is None:
            return super().allreduce_coalesced(tensors, opts)
        exchange, chosen = self._exchange, reduction

        def step(values: list[Tensor], _: list[Tensor], timeout: timedelta | None) -> None:
            exchange.all_reduce_each(values, chosen, timeout)

        return self._issue("all_reduce_coalesced", tensors, step, opts, reduction=reduction.name)

    def reduce(self, tensors: list[Tensor], opts: ReduceOptions) -> Work:
        """Reduce to `opts.rootRank`; the tensors of other ranks stay as they are."""
        if len(tensors) != 1 or (reduction := _reduction(_op_type(opts.reduceOp), tensors)) is None:
            return super().reduce(tensors, opts)
        exchange, root, chosen = self._exchange, opts.rootRank, reduction
        if root not in range(self.size()) or opts.rootTensor != 0:
            return super().reduce(tensors, opts)

        def step(values: list[Tensor], _: list[Tensor], timeout: timedelta | None) -> None:
            exchange.reduce(values[0], chosen, root, timeout)

        return self._issue("reduce", tensors, step, opts, (), root, reduction.name)

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions) -> Work:
        """Broadcast from `opts.rootRank`."""
        exchange, root = self._exchange, opts.rootRank
        fits = len(tensors) == 1 and root in range(self.size()) and opts.rootTensor == 0
        if not fits or not is_plain(tensors[0]):
            return super().broadcast(tensors, opts)

        def step(values: list[Tensor], _: list[Tensor], timeout: timedelta | None) -> None:
            exchange.broadcast(values[0], root, timeout)

        return self._issue("broadcast", tensors, step, opts, (), root)

    def allgather(
        self,
        outputs: list[list[Tensor]],
        inputs: list[Tensor],
        opts: AllgatherOptions,
    ) -> Work:
        """Gather one tensor of every rank into a list."""
        fits = len(inputs) == len(outputs) == 1 and len(outputs[0]) == self.size()
        if not fits or not match(outputs[0], inputs[0]):
            return super().allgather(outputs, inputs, opts)
        exchange = self._exchange

        def step(values: list[Tensor], mine: list[Tensor], timeout: timedelta | None) -> None:
            exchange.all_gather(values, mine[0], timeout)

        return self._issue("all_gather", outputs[0], step, opts, inputs)

    def all_gather_single(
        self, output: Tensor, mine: Tensor, opts: AllgatherOptions | None = None
    ) -> Work:
        """Gather one tensor of every rank into one, one after the other."""
        return self.all_gather_single_coalesced([output], [mine], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        """all_gather_single for each of several pairs."""
        opts = opts or AllgatherOptions()
        if not _are_split(outputs, inputs, self.size()):
            return super().all_gather_single_coalesced(outputs, inputs, opts)
        exchange = self._exchange

        def step(wholes: list[Tensor], parts: list[Tensor], timeout: timedelta | None) -> None:
            for whole, mine in zip(wholes, parts, strict=True):
                exchange.all_gather(_rows(whole, exchange.size), mine, timeout)

        return self._issue("all_gather", outputs, step, opts, inputs)

    def reduce_scatter(
        self,
        outputs: list[Tensor],
        inputs: list[list[Tensor]],
        opts: ReduceScatterOptions,
    ) -> Work:
        """Reduce a list of tensors, one for each rank."""
        fits = len(outputs) == len(inputs) == 1 and len(inputs[0]) == self.size()
        same_layout = fits and match(inputs[0], outputs[0])
        if not same_layout or (reduction := _reduction(_op_type(opts.reduceOp), outputs)) is None:
            return super().reduce_scatter(outputs, inputs, opts)
        exchange, chosen = self._exchange, reduction

        def step(values: list[Tensor], parts: list[Tensor], timeout: timedelta | None) -> None:
            exchange.reduce_scatter(values[0], parts, chosen, timeout)

        return self._issue(
            "reduce_scatter", outputs, step, opts, inputs[0], reduction=reduction.name
        )

    def reduce_scatter_single(
        self, output: Tensor, whole: Tensor, opts: ReduceScatterOptions | None = None
    ) -> Work:
        """Reduce a tensor and keep this rank's part of it."""
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        """reduce_scatter_single for each of several pairs."""
        opts = opts or ReduceScatterOptions()
        fits = _are_split(inputs, outputs, self.size())
        if not fits or (reduction := _reduction(_op_type(opts.reduceOp), outputs)) is None:
            return super().reduce_scatter_single_coalesced(outputs, inputs, opts)
        exchange, chosen = self._exchange, reduction

        def step(parts: list[Tensor], wholes: list[Tensor], timeout: timedelta | None) -> None:
            for out, whole in zip(parts, wholes, strict=True):
                exchange.reduce_scatter(out, _rows(whole, exchange.size), chosen, timeout)

        return self._issue("reduce_scatter", outputs, step, opts, inputs, reduction=reduction.name)

    def barrier(self, opts: BarrierOptions) -> Work:
        """Wait for all ranks."""
        exchange = self._exchange
        return self._issue("barrier", [], lambda *args: exchange.barrier(args[2]), opts)

    def shutdown(self) -> None:
        """Leave the group: peers that still wait for this rank get an error. Called by torch."""
        self._queue.close()
        super().shutdown()

    _allgather_base = all_gather_single  # the names before torch 2.12
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _issue(
        self,
        text: str,
        written: list[Tensor],
        step: Step,
        opts: _Options,
        read: Sequence[Tensor] = (),
        root: int | None = None,
        reduction: str = "",
    ) -> Work:
        """Queue `step` for the flat memory of the tensors that it writes and reads."""
        limit = opts.timeout
        mine = read if text == "all_gather" else written
        shape: tuple[int, ...] | None = mine[0].shape if mine else None
        if len(mine) > 1:
            shape = (sum(tensor.numel() for tensor in mine),)
        dtype = mine[0].dtype if mine else None
        signature = self._signature(text, shape, dtype, root, reduction)
        collective = Collective(step, written, read, limit if limit.days >= 0 else None, signature)
        return self._queue.issue(collective, text, written, opts.asyncOp)

    def _signature(
        self,
        op: str,
        shape: tuple[int, ...] | None,
        dtype: torch.dtype | None = None,
        root: int | None = None,
        reduction: str = "",
    ) -> Signature:
        """For the flight record; `root` is a group rank."""
        return op, shape, dtype, self._recorded_as, self._global_rank(root), reduction


def _op_type(op: ReduceOp) -> ReduceOp.RedOpType:
    op_type: ReduceOp.RedOpType = op.op  # type: ignore[attr-defined]
    return op_type


def _reduction(op: ReduceOp.RedOpType, tensors: Sequence[Tensor]) -> Reduction | None:
    """The reduction of these tensors in shared memory, or None to leave it to Gloo."""
    if not tensors:
        return None
    first = tensors[0]
    if not is_plain(first) or (len(tensors) > 1 and {t.dtype for t in tensors} != {first.dtype}):
        return None
    return find_reduction(op, first.dtype)


def _rows(whole: Tensor, size: int) -> Sequence[Tensor]:
    """A flat tensor cut into `size` equal parts."""
    return whole.view(size, whole.numel() // size).unbind()


def _are_split(wholes: Sequence[Tensor], parts: Sequence[Tensor], size: int) -> bool:
    """Whether each whole has `size` times as many elements as its part."""
    return len(wholes) == len(parts) and all(
        is_plain(whole)
        and is_plain(part)
        and whole.dtype == part.dtype
        and whole.numel() == part.numel() * size
        for whole, part in zip(wholes, parts, strict=True)
    )
