"""This rank's rows of every batch: asked for in place of the sampler's indices, loaded in whatever
process loads samples.

What is random in a sample is drawn from a stream of its own: a function of the random state in
which the pass over the data began and of how many samples the loop had asked for before.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from instep.distributed.communication.rank_local import rank_local
from instep.training.blocks import Block
from instep.training.random_streams import RNGStates, derive_seed, seed_all
from instep.unedited.data.exchange_policy import ExchangePolicy
from instep.unedited.data.packed_samples import CannotPackError, PackedSamples, pack
from instep.unedited.data.sample_schema import SampleSchema, common_schema, flatten_collated

# --------------------------------------------------------------------------- what is asked for


@dataclass(frozen=True)
class RowRequest:
    """Some consecutive samples of a batch."""

    seed: int
    first: int
    """How many samples the loop had asked for before the first of these."""
    indices: list[Any]
    whole: bool
    """Whether these are all of the batch, which is then handed over as the loop gets it."""
    witness: tuple[int, Any] | None = None
    """One more sample, another rank's, by number and index: does it come out the same here?"""


@dataclass(frozen=True)
class BatchPlan:
    """Who loads which rows of a batch."""

    seed: int
    first: int
    indices: list[Any]
    place: Block
    shared: bool
    """Whether each rank loads its own rows, or all load all."""
    proving: bool
    """Whether each rank loads one sample of another's as well."""

    def request(self) -> RowRequest:
        """What this rank loads."""
        if not self.shared:
            return self.whole()
        mine = self.indices[self.place.start : self.place.stop]
        witness = self._witness() if self.proving else None
        return RowRequest(self.seed, self.first + self.place.start, mine, False, witness)

    def whole(self) -> RowRequest:
        """All of the batch."""
        return RowRequest(self.seed, self.first, self.indices, True)

    def digest(self) -> int:
        """The same on ranks that mean the same samples; 0 where the indices do not tell."""
        telling = set(map(type, self.indices)) <= {int, str}
        return zlib.crc32(repr(self.indices).encode()) if telling else 0

    def _witness(self) -> tuple[int, Any] | None:
        """The first sample of the next rank that has any: the sample after mine, cyclically."""
        if not self.indices:
            return None
        position = self.place.stop % self.place.total
        return self.first + position, self.indices[position]


class RowBatchSampler:
    """A batch sampler that asks for this rank's rows of every batch of another one."""

    def __init__(
        self,
        batches: Iterable[Iterable[Any]],
        generator: torch.Generator | None,
        place: Block,
        policy: ExchangePolicy,
    ) -> None:
        self.planned: deque[BatchPlan] = deque()
        """The batches that were asked for and not yet delivered, in the latest pass."""
        self.batches = batches
        self._generator = generator or torch.default_generator
        self._place = place
        self._policy = policy
        self._asked = 0

    def __len__(self) -> int:
        assert isinstance(self.batches, Sized)
        return len(self.batches)

    def __iter__(self) -> Iterator[RowRequest]:
        self.planned.clear()
        state = self._generator.get_state().numpy().tobytes()
        seed = int.from_bytes(blake2b(state, digest_size=7).digest(), "little")
        return self._requests(iter(self.batches), seed)

    def _requests(self, batches: Iterator[Iterable[Any]], seed: int) -> Iterator[RowRequest]:
        for batch in batches:
            indices = list(batch)
            place = Block(self._place.rank, self._place.size, len(indices))
            plan = BatchPlan(seed, self._asked, indices, place, *self._policy.ask())
            self._asked += len(indices)
            self.planned.append(plan)
            yield plan.request()


# ------------------------------------------------------------------------------- what is loaded


@dataclass(frozen=True)
class LoadedSamples:
    """The samples of a whole batch, loaded in this process and not yet collated."""

    samples: list[Any]


@dataclass(frozen=True)
class LoadedRows:
    """This rank's rows of a batch, ready to travel."""

    count: int
    seconds: float
    """How long loading them took."""
    kind: SampleSchema | None = None
    """What each of the samples is, where they are alike and default_collate has put them
    together: then `leaves` holds its tensors and lists."""
    leaves: list[Any] = field(default_factory=list)
    packed: PackedSamples | None = None
    """The samples, where they are not."""
    refusal: str = ""
    """Why they cannot travel."""
    first: bytes | None = None
    """A digest of the first sample, when that is to be proved."""
    witness: bytes | None = None
    """A digest of a sample that another rank loads too."""


class RowDataset(Dataset[Any]):
    """A dataset that loads what a `RowRequest` asks for, each sample from its own stream."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self._collate = collate
        self._draws: bool | None = None
        """Whether samples draw from the global generators, as far as this process knows."""

    def __getitems__(self, request: RowRequest) -> Any:
        with rank_local():
            if not request.whole:
                return self._part(request)
            samples = self._samples(request)
        if get_worker_info() is None:
            return LoadedSamples(samples)
        return self.collated(samples, request)

    def collated(self, samples: list[Any], request: RowRequest) -> Any:
        """The batch, where plain Python collates in a worker: from a stream of its own."""
        with _streams_of_samples():
            _begin_stream(request.seed, request.first, "collate")
            return self._collate(samples)

    def _samples(self, request: RowRequest) -> list[Any]:
        """Each from its own stream. Seeding costs more than many a sample, so first without."""
        if not in_main_thread():
            return [self._sample(index) for index in request.indices]
        samples = None if self._draws else self._undrawn(request.indices)
        if samples is not None:
            return samples
        with _streams_of_samples():
            numbered = enumerate(request.indices, request.first)
            return [self._seeded(request.seed, number, index) for number, index in numbered]

    def _undrawn(self, indices: list[Any]) -> list[Any] | None:
        """These samples, if nothing was drawn for them; else None, and nothing has been."""
        first = 1 if self._draws is None else len(indices)  # one is enough to see that most draw
        samples: list[Any] = []
        for some in filter(None, (indices[:first], indices[first:])):
            before = RNGStates.capture()
            try:
                samples += map(self._sample, some)
            except Exception:
                if before.equals(RNGStates.capture()):
                    raise
            self._draws = not before.equals(RNGStates.capture())
            if self._draws:
                before.restore()
                return None
        return samples

    def _seeded(self, seed: int, number: int, index: Any) -> Any:
        _begin_stream(seed, number)
        return self._sample(index)

    def _sample(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"This was sample {index!r} of {type(self.dataset).__name__}.")
            raise

    def _part(self, request: RowRequest) -> LoadedRows:
        begun = perf_counter()
        samples = self._samples(request)
        seconds = perf_counter() - begun
        kind = common_schema(samples) if self._collate is default_collate else None
        if kind is not None:
            leaves = list(flatten_collated(kind, default_collate(samples)))
            made: dict[str, Any] = {"kind": kind, "leaves": leaves}
        else:
            made = _packed_samples(samples)
        if request.witness is not None:
            made["first"] = _digest(samples[0]) if samples else None
            made["witness"] = self._witness(request.seed, *request.witness)
        return LoadedRows(len(samples), seconds, **made)

    def _witness(self, seed: int, number: int, index: Any) -> bytes | None:
        with _streams_of_samples():
            try:
                return _digest(self._seeded(seed, number, index))
            except Exception:  # the rank whose sample it is says so
                return None


def _packed_samples(samples: list[Any]) -> dict[str, Any]:
    try:
        return {"packed": pack(samples)}
    except CannotPackError as why:
        return {"refusal": str(why)}


def _digest(sample: Any) -> bytes | None:
    try:
        return pack(sample).digest()
    except CannotPackError:
        return None


def in_main_thread() -> bool:
    """Whether this is the thread that the script began in, or a worker's."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _streams_of_samples() -> Iterator[None]:
    """Whatever is seeded and drawn in here, the global generators stay as they were."""
    if not in_main_thread():
        yield
        return
    before = RNGStates.capture()
    try:
        yield
    finally:
        before.restore()


def _begin_stream(*parts: object) -> None:
    """Seed the generators, unless that would disturb another thread of the script's."""
    if in_main_thread():
        seed_all(derive_seed(*parts))


class WorkerInit:
    """The user's worker_init_fn, which sees the user's dataset."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        """Called by torch in worker number `worker`, before it loads anything."""
        info = get_worker_info()
        assert info is not None
        assert isinstance(info.dataset, RowDataset)
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch has it frozen
        if self._init is not None:
            self._init(worker)


def as_they_are(loaded: Any) -> Any:
    """A collate_fn that leaves it."""
    return loaded
