"""From every rank's rows of a batch to the whole batch on every rank."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from instep.distributed.communication.scopes import can_pickle, format_traceback
from instep.distributed.communication.transport import Pending
from instep.distributed.errors import DisagreementError
from instep.distributed.rendezvous.bootstrap import group_ranks
from instep.training.blocks import Block
from instep.unedited.data.packed_samples import PackedSamples, pack, unpack
from instep.unedited.data.row_loading import BatchPlan, LoadedRows
from instep.unedited.data.sample_schema import SampleSchema, extract_sample, unflatten_collated
from instep.unedited.errors import LoadingError

T = TypeVar("T")


class ExchangeTransport(Protocol):
    """The part of a Transport that is needed here."""

    rank: int
    size: int

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's value."""

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        """Start to overwrite a tensor with root's."""


@dataclass(frozen=True)
class RowType:
    """What the rows of a tensor are like."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class ExchangeHeader:
    """What a rank says about its rows before they travel."""

    digest: int | None = None
    """Of the batch that it means; None: it knows of none that is left."""
    count: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    kind: SampleSchema | None = None
    leaves: list[Any] = field(default_factory=list)
    """Of collated samples: what the rows of each tensor are like, and each list of texts."""
    pickled: bytes = b""
    refusal: str = ""
    first: bytes | None = None
    witness: bytes | None = None
    error: bytes = b""
    trace: str = ""


@dataclass(frozen=True)
class ExchangedBatch:
    """The whole batch, and what the ranks have learnt about it."""

    headers: list[ExchangeHeader]
    collated: Any = None
    samples: list[Any] | None = None
    """Where it is yet to be collated."""
    error: Exception | None = None
    """Where there is none: what the first rank that has one has met."""

    @property
    def refusal(self) -> str:
        """Why the rows of some rank cannot travel: each has to load the whole batch."""
        return next((header.refusal for header in self.headers if header.refusal), "")

    @property
    def proved(self) -> bool:
        """Whether the samples that two ranks have loaded came out the same."""
        for rank, header in enumerate(self.headers):
            next_with_rows = (
                other for other in self.headers[rank + 1 :] + self.headers if other.count
            )
            theirs = next((other.first for other in next_with_rows), None)
            if None not in (header.witness, theirs) and header.witness != theirs:
                return False
        return True


def share(part: LoadedRows | Exception, plan: BatchPlan, way: ExchangeTransport) -> ExchangedBatch:
    """Exchange this rank's rows, or the error that came up in loading them. Collective.

    Raises DisagreementError where the ranks mean different batches.
    """
    headers = way.all_gather_object(_header_of(part, plan, way.rank))
    check_same_batch(headers)
    shared = ExchangedBatch(headers, error=_first_error(headers, part, way.rank))
    if shared.error is not None or shared.refusal:
        return shared
    assert isinstance(part, LoadedRows)
    kind = _common_schema(headers)
    if kind is not None:
        leaves = _whole_leaves(part, headers, plan, way)
        return replace(shared, collated=unflatten_collated(kind, leaves))
    if any(header.kind is not None for header in headers):  # on some ranks only
        part = LoadedRows(part.count, part.seconds, packed=pack(_samples_of(part)))
        headers = way.all_gather_object(_header_of(part, plan, way.rank))
    return replace(shared, samples=_all_samples(part, headers, way))


def _common_schema(headers: Sequence[ExchangeHeader]) -> SampleSchema | None:
    """What all samples of a batch are, where every rank has collated its own in the same way."""
    found = {(header.kind, _layout(header)) for header in headers if header.count}
    return next(iter(found))[0] if len(found) == 1 else None


def end(way: ExchangeTransport) -> None:
    """This rank has no batch left. Raises DisagreementError where another has. Collective."""
    check_same_batch(way.all_gather_object(ExchangeHeader()))


def check_same_batch(headers: Sequence[ExchangeHeader]) -> None:
    """Raise DisagreementError unless all ranks mean the same batch."""
    seen = group_ranks([_batch_in_words(header) for header in headers])
    if len(seen) > 1:
        raise DisagreementError(
            "the samples of the next batch",
            seen,
            "Draw the order of samples from torch's, numpy's or Python's global generator, or from "
            "one with a seed of its own.",
        )


def _batch_in_words(header: ExchangeHeader) -> str:
    return "none left" if header.digest is None else f"samples with digest {header.digest:08x}"


def _header_of(part: LoadedRows | Exception, plan: BatchPlan, rank: int) -> ExchangeHeader:
    digest = plan.digest()
    if isinstance(part, Exception):
        trace = format_traceback(part)
        error = part if can_pickle(part) else LoadingError(rank, type(part).__name__, trace)
        return ExchangeHeader(digest, error=pickle.dumps(error), trace=trace)
    return ExchangeHeader(
        digest,
        part.count,
        part.seconds,
        _nbytes(part),
        part.kind,
        [_described(leaf) for leaf in part.leaves],
        part.packed.pickled if part.packed else b"",
        part.refusal,
        part.first,
        part.witness,
    )


def _nbytes(part: LoadedRows) -> int:
    tensors = [leaf for leaf in part.leaves if isinstance(leaf, Tensor)]
    tensors += [part.packed.memory] if part.packed else []
    return sum(tensor.nbytes for tensor in tensors)


def _first_error(
    headers: Sequence[ExchangeHeader], mine: LoadedRows | Exception, my_rank: int
) -> Exception | None:
    """The error of the first rank that has one: of the first sample that cannot be loaded."""
    rank = next((rank for rank, header in enumerate(headers) if header.error), None)
    if rank is None:
        return None
    if rank == my_rank and isinstance(mine, Exception):
        return mine
    error: Exception = pickle.loads(headers[rank].error)
    error.add_note(f"On rank {rank}, which loaded it:\n\n{headers[rank].trace}")
    return error


# ------------------------------------------------------------------------- rows that are collated


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    row = _rows_in_order(leaf)[0]
    return RowType(leaf.dtype, tuple(row.shape), row.stride())


def _rows_in_order(leaf: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where its rows do not lie one after the other."""
    row = leaf[0]
    dense = row.is_contiguous() or torch.empty_like(row).stride() == row.stride()
    in_order = leaf.shape[0] == 1 or leaf.stride(0) == row.numel()
    return leaf if dense and in_order else leaf.contiguous()


def _layout(header: ExchangeHeader) -> tuple[RowType | None, ...]:
    """What the leaves of two ranks must have in common to be put together."""
    return tuple(leaf if isinstance(leaf, RowType) else None for leaf in header.leaves)


def _whole_leaves(
    part: LoadedRows, headers: Sequence[ExchangeHeader], plan: BatchPlan, way: ExchangeTransport
) -> Iterator[Any]:
    """The leaves of the whole batch: rows of tensors travel, each rank's to its place."""
    given = [header.leaves for header in headers if header.count]
    for k, (first, *rest) in enumerate(zip(*given, strict=True)):
        if isinstance(first, RowType):
            yield _whole_tensor(first, part.leaves[k] if part.count else None, plan, way)
        else:
            yield sum(rest, first)


def _whole_tensor(
    row: RowType, mine: Tensor | None, plan: BatchPlan, way: ExchangeTransport
) -> Tensor:
    place, per_row = plan.place, prod(row.shape)
    if per_row == 0:
        return torch.empty((place.total, *row.shape), dtype=row.dtype)
    whole = torch.empty_strided((place.total, *row.shape), (per_row, *row.stride), dtype=row.dtype)
    if mine is not None:
        whole[place.start : place.stop] = mine
    blocks = [Block(rank, way.size, place.total) for rank in range(way.size)]
    _fill(whole, [block.start * per_row for block in blocks], way)
    return whole


def _fill(whole: Tensor, starts: Sequence[int], way: ExchangeTransport) -> None:
    """Let rank r's elements, from `starts[r]` on, be rank r's on every rank."""
    size = whole.itemsize
    memory = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
    stops = [*starts[1:], whole.numel()]
    pending = [
        way.broadcast(memory[start * size : stop * size], rank)
        for rank, (start, stop) in enumerate(zip(starts, stops, strict=True))
        if stop > start
    ]
    for work in pending:
        work.wait()


# --------------------------------------------------------------------- samples, not yet collated


def _samples_of(part: LoadedRows) -> list[Any]:
    if part.packed is not None:
        samples: list[Any] = unpack(part.packed)
        return samples
    kind = part.kind
    if kind is None:
        return []
    return [extract_sample(kind, iter(part.leaves), row) for row in range(part.count)]


def _all_samples(
    part: LoadedRows, headers: Sequence[ExchangeHeader], way: ExchangeTransport
) -> list[Any]:
    assert part.packed is not None
    sizes = [header.nbytes for header in headers]
    starts = [sum(sizes[:rank]) for rank in range(way.size)]
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    memory[starts[way.rank] :][: sizes[way.rank]] = part.packed.memory
    _fill(memory, starts, way)
    samples: list[Any] = []
    for header, start, size in zip(headers, starts, sizes, strict=True):
        samples += unpack(PackedSamples(header.pickled, memory[start : start + size]))
    return samples
