"""Exchanges the rows of a batch, so that every rank gets the whole batch."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.scopes import can_pickle, format_exception
from instep.distributed.communication.tensors import is_dense
from instep.distributed.communication.thread_channel import ThreadChannel
from instep.distributed.communication.transport import Transport
from instep.distributed.errors import DisagreementError
from instep.process.exit_status import group_ranks
from instep.training.blocks import Block
from instep.unedited.data.packed_samples import PackedSamples, pack, unpack
from instep.unedited.data.row_loading import LoadedRows, LoadPlan
from instep.unedited.data.sample_schema import SampleSchema, extract_sample, unflatten_collated
from instep.unedited.errors import LoadingError

ExchangeTransport = Transport | ThreadChannel
_HEADING = "Traceback (most recent call last)"
"""In the message of an exception of a worker, which torch sends to the loader's process."""


@dataclass(frozen=True)
class RowType:
    """Dtype, shape and strides of one row of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class ExchangeHeader:
    """What a rank sends about its rows before it sends the rows."""

    plan_checksum: int | None = None
    """Of the batch that the rank loads; None if it has no batch left."""
    rows: LoadedRows = field(default_factory=LoadedRows)
    """Its rows without their memory: in `leaves` a RowType takes the place of each tensor."""
    nbytes: int = 0
    pickled: bytes = b""
    """Of packed samples."""
    error: bytes = b""
    trace: str = ""


@dataclass(frozen=True)
class ExchangedBatch:
    """The whole batch, and what the ranks have learned about it."""

    headers: list[ExchangeHeader]
    collated: Any = None
    samples: list[Any] | None = None
    """If they are not collated yet."""
    error: BaseException | None = None
    """If there is no batch: the error of the first rank that raised one."""

    @property
    def cannot_pack(self) -> str:
        """Why some rank cannot send its rows, so that each has to load the whole batch."""
        return next(filter(None, (header.rows.cannot_pack for header in self.headers)), "")

    @property
    def effect(self) -> str:
        """What loading has changed on some rank beside the samples, as a predicate."""
        return next(filter(None, (header.rows.effect for header in self.headers)), "")

    @property
    def prints(self) -> bool:
        """Whether loading has printed anything on some rank."""
        return any(header.rows.prints for header in self.headers)

    @property
    def generators(self) -> frozenset[str]:
        """The names of the global generators that samples draw from."""
        return frozenset().union(*(header.rows.generators for header in self.headers))

    @property
    def are_small(self) -> bool | None:
        """Whether samples that draw random numbers are small and loading does nothing else, if any
        of them draws and it was found out."""
        known = [header.rows.are_small for header in self.headers]
        if not any(each is not None for each in known):
            return None
        return False not in known and self.is_consistent and not (self.effect or self.prints)

    @property
    def is_consistent(self) -> bool:
        """Whether every sample that two ranks have loaded is the same on both."""
        ranks = [header.rows for header in self.headers]
        expected = next((rows.first_checksum for rows in ranks if rows.count), None)
        for rows in reversed(ranks):  # each has loaded the first sample of the next one with rows
            if None not in (rows.other_checksum, expected) and rows.other_checksum != expected:
                return False
            expected = rows.first_checksum if rows.count else expected
        return True


def exchange_rows(
    rows: LoadedRows | BaseException, plan: LoadPlan, transport: ExchangeTransport
) -> ExchangedBatch:
    """Exchange this rank's rows, or the error that was raised as it loaded them. Collective.

    Raises DisagreementError if the ranks load different batches.
    """
    headers = transport.all_gather_object(_make_header(rows, plan, transport.rank))
    check_same_batch(headers)
    batch = ExchangedBatch(headers, error=_first_error(headers, rows, transport.rank))
    if batch.error is not None or batch.cannot_pack:
        return batch
    assert isinstance(rows, LoadedRows)
    schema = _common_schema(headers)
    if schema is not None:
        leaves = _gather_leaves(rows, headers, plan, transport)
        return replace(batch, collated=unflatten_collated(schema, leaves))
    if any(header.rows.schema is not None for header in headers):  # on some ranks only
        rows = LoadedRows(rows.count, rows.seconds, packed=pack(_samples_of(rows)))
        headers = transport.all_gather_object(_make_header(rows, plan, transport.rank))
    return replace(batch, samples=_gather_samples(rows, headers, transport))


def _common_schema(headers: Sequence[ExchangeHeader]) -> SampleSchema | None:
    """The schema of all samples of a batch, if every rank has collated its rows in the same way."""
    found = {(header.rows.schema, _layout(header)) for header in headers if header.rows.count}
    return next(iter(found))[0] if len(found) == 1 else None


def finish_exchange(transport: ExchangeTransport) -> None:
    """Called without a batch left. Raises DisagreementError if a rank has one. Collective."""
    check_same_batch(transport.all_gather_object(ExchangeHeader()))


def check_same_batch(headers: Sequence[ExchangeHeader]) -> None:
    """Raise DisagreementError unless all ranks load the same batch."""
    seen = group_ranks([_describe_batch(header) for header in headers])
    if len(seen) > 1:
        raise DisagreementError(
            "the samples of the next batch",
            seen,
            "Draw the order of samples from torch's, numpy's or Python's global generator, or from "
            "one with a seed of its own.",
        )


def _describe_batch(header: ExchangeHeader) -> str:
    checksum = header.plan_checksum
    return "none left" if checksum is None else f"samples with digest {checksum:08x}"


def _make_header(rows: LoadedRows | BaseException, plan: LoadPlan, rank: int) -> ExchangeHeader:
    checksum = plan.checksum()
    if isinstance(rows, BaseException):
        trace = format_exception(rows)
        error = rows if can_pickle(rows) else LoadingError(rank, type(rows).__name__, trace)
        return ExchangeHeader(checksum, error=pickle.dumps(error), trace=trace)
    described = replace(rows, leaves=[_describe_leaf(leaf) for leaf in rows.leaves], packed=None)
    pickled = rows.packed.pickled if rows.packed else b""
    return ExchangeHeader(checksum, described, _nbytes(rows), pickled)


def _nbytes(rows: LoadedRows) -> int:
    tensors = [leaf for leaf in rows.leaves if isinstance(leaf, Tensor)]
    tensors += [rows.packed.memory] if rows.packed else []
    return sum(tensor.nbytes for tensor in tensors)


def _first_error(
    headers: Sequence[ExchangeHeader], rows: LoadedRows | BaseException, this_rank: int
) -> BaseException | None:
    """The error of the first rank that has one: of the first sample that cannot be loaded."""
    rank = next((rank for rank, header in enumerate(headers) if header.error), None)
    if rank is None:
        return None
    if rank == this_rank and isinstance(rows, BaseException):
        return rows
    error: BaseException = pickle.loads(headers[rank].error)
    if _HEADING not in str(error):
        error.add_note(f"On rank {rank}, which loaded it:\n\n{headers[rank].trace}")
    return error


# ------------------------------------------------------------------------------ collated rows


def _describe_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    row = _with_rows_in_order(leaf)[0]
    return RowType(leaf.dtype, tuple(row.shape), row.stride())


def _with_rows_in_order(leaf: Tensor) -> Tensor:
    """The tensor, or a contiguous copy unless its rows follow each other in memory."""
    row = leaf[0]
    in_order = leaf.shape[0] == 1 or leaf.stride(0) == row.numel()
    return leaf if is_dense(row) and in_order else leaf.contiguous()


def _layout(header: ExchangeHeader) -> tuple[RowType | None, ...]:
    """What the leaves of two ranks must have in common to be joined."""
    return tuple(leaf if isinstance(leaf, RowType) else None for leaf in header.rows.leaves)


def _gather_leaves(
    rows: LoadedRows,
    headers: Sequence[ExchangeHeader],
    plan: LoadPlan,
    transport: ExchangeTransport,
) -> Iterator[Any]:
    """The leaves of the whole batch. Texts are in the headers; rows of tensors are broadcast."""
    given = [header.rows.leaves for header in headers if header.rows.count]
    for k, (first, *rest) in enumerate(zip(*given, strict=True)):
        if isinstance(first, RowType):
            own = rows.leaves[k] if rows.count else None
            yield _gather_tensor(first, own, plan.block, transport)
        else:
            yield type(first)(chain(first, *rest))  # a list or a tuple


def _gather_tensor(
    row: RowType, own: Tensor | None, block: Block, transport: ExchangeTransport
) -> Tensor:
    shape, per_row = (block.total, *row.shape), prod(row.shape)
    if per_row == 0:
        return torch.empty(shape, dtype=row.dtype, device="cpu")
    whole = torch.empty_strided(shape, (per_row, *row.stride), dtype=row.dtype, device="cpu")
    if own is not None:
        whole[block.start : block.stop] = own
    blocks = [Block(rank, transport.size, block.total) for rank in range(transport.size)]
    _broadcast_parts(whole, [each.start * per_row for each in blocks], transport)
    return whole


def _broadcast_parts(whole: Tensor, starts: Sequence[int], transport: ExchangeTransport) -> None:
    """Broadcast the elements from `starts[r]` on from rank r, up to the next start."""
    size = whole.itemsize
    memory = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
    stops = [*starts[1:], whole.numel()]
    pending = [
        transport.broadcast(memory[start * size : stop * size], rank)
        for rank, (start, stop) in enumerate(zip(starts, stops, strict=True))
        if stop > start
    ]
    for work in pending:
        work.wait()


# ---------------------------------------------------------------------------- packed samples


def _samples_of(rows: LoadedRows) -> list[Any]:
    if rows.packed is not None:
        samples: list[Any] = unpack(rows.packed)
        return samples
    schema = rows.schema
    if schema is None:
        return []
    return [extract_sample(schema, iter(rows.leaves), row) for row in range(rows.count)]


def _gather_samples(
    rows: LoadedRows, headers: Sequence[ExchangeHeader], transport: ExchangeTransport
) -> list[Any]:
    assert rows.packed is not None
    sizes = [header.nbytes for header in headers]
    starts = [*accumulate(sizes, initial=0)]
    memory = torch.empty(starts.pop(), dtype=torch.uint8, device="cpu")
    memory[starts[transport.rank] :][: sizes[transport.rank]] = rows.packed.memory
    _broadcast_parts(memory, starts, transport)
    samples: list[Any] = []
    for header, start, size in zip(headers, starts, sizes, strict=True):
        samples += unpack(PackedSamples(header.pickled, memory[start : start + size]))
    return samples
