"""From every rank's rows of a batch to the whole batch on every rank."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from instep.distributed.communication.scopes import arrives, traceback_of
from instep.distributed.communication.transport import Pending
from instep.distributed.errors import DisagreementError
from instep.distributed.rendezvous.bootstrap import ranks_by
from instep.training.blocks import Block
from instep.unedited.data.packed_samples import Parcel, pack, unpack
from instep.unedited.data.row_loading import Part, Plan
from instep.unedited.data.sample_schema import Kind, collated_of, sample_of
from instep.unedited.errors import LoadingError

T = TypeVar("T")


class Way(Protocol):
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
class Letter:
    """What a rank says about its rows before they travel."""

    digest: int | None = None
    """Of the batch that it means; None: it knows of none that is left."""
    count: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    kind: Kind | None = None
    leaves: list[Any] = field(default_factory=list)
    """Of collated samples: what the rows of each tensor are like, and each list of texts."""
    pickled: bytes = b""
    refusal: str = ""
    first: bytes | None = None
    witness: bytes | None = None
    error: bytes = b""
    trace: str = ""


@dataclass(frozen=True)
class Shared:
    """The whole batch, and what the ranks have learnt about it."""

    letters: list[Letter]
    collated: Any = None
    samples: list[Any] | None = None
    """Where it is yet to be collated."""
    error: Exception | None = None
    """Where there is none: what the first rank that has one has met."""

    @property
    def refusal(self) -> str:
        """Why the rows of some rank cannot travel: each has to load the whole batch."""
        return next((letter.refusal for letter in self.letters if letter.refusal), "")

    @property
    def proved(self) -> bool:
        """Whether the samples that two ranks have loaded came out the same."""
        for rank, letter in enumerate(self.letters):
            next_with_rows = (
                other for other in self.letters[rank + 1 :] + self.letters if other.count
            )
            theirs = next((other.first for other in next_with_rows), None)
            if None not in (letter.witness, theirs) and letter.witness != theirs:
                return False
        return True


def share(part: Part | Exception, plan: Plan, way: Way) -> Shared:
    """Exchange this rank's rows, or the error that came up in loading them. Collective.

    Raises DisagreementError where the ranks mean different batches.
    """
    letters = way.all_gather_object(_letter_of(part, plan, way.rank))
    check_same_batch(letters)
    shared = Shared(letters, error=_first_error(letters, part, way.rank))
    if shared.error is not None or shared.refusal:
        return shared
    assert isinstance(part, Part)
    kind = _common_kind(letters)
    if kind is not None:
        leaves = _whole_leaves(part, letters, plan, way)
        return replace(shared, collated=collated_of(kind, leaves))
    if any(letter.kind is not None for letter in letters):  # on some ranks only
        part = Part(part.count, part.seconds, parcel=pack(_samples_of(part)))
        letters = way.all_gather_object(_letter_of(part, plan, way.rank))
    return replace(shared, samples=_all_samples(part, letters, way))


def _common_kind(letters: Sequence[Letter]) -> Kind | None:
    """What all samples of a batch are, where every rank has collated its own in the same way."""
    found = {(letter.kind, _layout(letter)) for letter in letters if letter.count}
    return next(iter(found))[0] if len(found) == 1 else None


def end(way: Way) -> None:
    """This rank has no batch left. Raises DisagreementError where another has. Collective."""
    check_same_batch(way.all_gather_object(Letter()))


def check_same_batch(letters: Sequence[Letter]) -> None:
    """Raise DisagreementError unless all ranks mean the same batch."""
    seen = ranks_by([_batch_in_words(letter) for letter in letters])
    if len(seen) > 1:
        raise DisagreementError(
            "the samples of the next batch",
            seen,
            "Draw the order of samples from torch's, numpy's or Python's global generator, or from "
            "one with a seed of its own.",
        )


def _batch_in_words(letter: Letter) -> str:
    return "none left" if letter.digest is None else f"samples with digest {letter.digest:08x}"


def _letter_of(part: Part | Exception, plan: Plan, rank: int) -> Letter:
    digest = plan.digest()
    if isinstance(part, Exception):
        trace = traceback_of(part)
        error = part if arrives(part) else LoadingError(rank, type(part).__name__, trace)
        return Letter(digest, error=pickle.dumps(error), trace=trace)
    return Letter(
        digest,
        part.count,
        part.seconds,
        _nbytes(part),
        part.kind,
        [_described(leaf) for leaf in part.leaves],
        part.parcel.pickled if part.parcel else b"",
        part.refusal,
        part.first,
        part.witness,
    )


def _nbytes(part: Part) -> int:
    tensors = [leaf for leaf in part.leaves if isinstance(leaf, Tensor)]
    tensors += [part.parcel.memory] if part.parcel else []
    return sum(tensor.nbytes for tensor in tensors)


def _first_error(
    letters: Sequence[Letter], mine: Part | Exception, my_rank: int
) -> Exception | None:
    """The error of the first rank that has one: of the first sample that cannot be loaded."""
    rank = next((rank for rank, letter in enumerate(letters) if letter.error), None)
    if rank is None:
        return None
    if rank == my_rank and isinstance(mine, Exception):
        return mine
    error: Exception = pickle.loads(letters[rank].error)
    error.add_note(f"On rank {rank}, which loaded it:\n\n{letters[rank].trace}")
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


def _layout(letter: Letter) -> tuple[RowType | None, ...]:
    """What the leaves of two ranks must have in common to be put together."""
    return tuple(leaf if isinstance(leaf, RowType) else None for leaf in letter.leaves)


def _whole_leaves(part: Part, letters: Sequence[Letter], plan: Plan, way: Way) -> Iterator[Any]:
    """The leaves of the whole batch: rows of tensors travel, each rank's to its place."""
    given = [letter.leaves for letter in letters if letter.count]
    for k, (first, *rest) in enumerate(zip(*given, strict=True)):
        if isinstance(first, RowType):
            yield _whole_tensor(first, part.leaves[k] if part.count else None, plan, way)
        else:
            yield sum(rest, first)


def _whole_tensor(row: RowType, mine: Tensor | None, plan: Plan, way: Way) -> Tensor:
    place, per_row = plan.place, prod(row.shape)
    if per_row == 0:
        return torch.empty((place.total, *row.shape), dtype=row.dtype)
    whole = torch.empty_strided((place.total, *row.shape), (per_row, *row.stride), dtype=row.dtype)
    if mine is not None:
        whole[place.start : place.stop] = mine
    blocks = [Block(rank, way.size, place.total) for rank in range(way.size)]
    _fill(whole, [block.start * per_row for block in blocks], way)
    return whole


def _fill(whole: Tensor, starts: Sequence[int], way: Way) -> None:
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


def _samples_of(part: Part) -> list[Any]:
    if part.parcel is not None:
        samples: list[Any] = unpack(part.parcel)
        return samples
    kind = part.kind
    if kind is None:
        return []
    return [sample_of(kind, iter(part.leaves), row) for row in range(part.count)]


def _all_samples(part: Part, letters: Sequence[Letter], way: Way) -> list[Any]:
    assert part.parcel is not None
    sizes = [letter.nbytes for letter in letters]
    starts = [sum(sizes[:rank]) for rank in range(way.size)]
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    memory[starts[way.rank] :][: sizes[way.rank]] = part.parcel.memory
    _fill(memory, starts, way)
    samples: list[Any] = []
    for letter, start, size in zip(letters, starts, sizes, strict=True):
        samples += unpack(Parcel(letter.pickled, memory[start : start + size]))
    return samples
