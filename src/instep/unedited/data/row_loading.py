"""Loads this rank's rows of every batch: a batch sampler asks for them in place of all indices, and
a dataset loads them, in whatever process loads samples.

Each sample draws from a random stream of its own, which depends on the random state at the start of
the pass over the data and on how many samples the loop asked for before.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from instep.distributed.communication.rank_local import rank_local
from instep.distributed.communication.transport import get_transport
from instep.distributed.watchdog.signals.rank_signals import is_from_signal
from instep.process import in_main_thread
from instep.process.failures.tracebacks import OwnFrames
from instep.training.blocks import Block
from instep.training.random_streams import GENERATORS, RNGStates, derive_seed, seed_all
from instep.unedited.data.dataset_state import DatasetState, Variable
from instep.unedited.data.exchange_policy import BatchLoading, ExchangePolicy
from instep.unedited.data.loading_effects import LoadingEffects
from instep.unedited.data.packed_samples import CannotPackError, PackedSamples, pack
from instep.unedited.data.sample_loading import SampleEffects, SampleLoader
from instep.unedited.data.sample_schema import SampleSchema, common_schema, flatten_collated

# ------------------------------------------------------------------------------- requests


@dataclass(frozen=True)
class RowRequest:
    """Some consecutive samples of a batch."""

    seed: int
    first: int
    """How many samples the loop asked for before the first of these."""
    indices: list[Any]
    is_whole: bool = field(kw_only=True)
    """Whether these are all samples of the batch, so that no rank sends any."""
    check: tuple[int, Any] | None = None
    """A sample of another rank's, by number and index: is it the same if this rank loads it?"""
    counts: bool = False
    """Whether it is found out if those that draw random numbers are small."""
    as_plain: bool = False
    """Whether they draw from the global generators as these are."""


@dataclass(frozen=True)
class LoadPlan:
    """Which rank loads which rows of a batch."""

    seed: int
    first: int
    indices: list[Any]
    block: Block
    loading: BatchLoading

    def request(self) -> RowRequest:
        """What this rank loads."""
        if not self.loading.exchanges:
            return self.whole_request()
        rows = self.indices[self.block.start : self.block.stop]
        check = self._check() if self.loading.checks else None
        return RowRequest(
            self.seed,
            self.first + self.block.start,
            rows,
            check,
            is_whole=False,
            counts=self.loading.counts,
        )

    def whole_request(self) -> RowRequest:
        """All rows of the batch."""
        return RowRequest(
            self.seed,
            self.first,
            self.indices,
            is_whole=True,
            counts=self.loading.counts,
            as_plain=self.loading.as_plain,
        )

    def checksum(self) -> int:
        """Equal on ranks that plan the same samples; 0 if the indices have no stable text."""
        has_text = set(map(type, self.indices)) <= {int, str}
        return zlib.crc32(repr(self.indices).encode()) if has_text else 0

    def _check(self) -> tuple[int, Any] | None:
        """The first sample of the next rank that has any: the one after this rank's, cyclically."""
        if not self.indices:
            return None
        position = self.block.stop % self.block.total
        return self.first + position, self.indices[position]


class RowBatchSampler:
    """A batch sampler that asks for this rank's rows of every batch of another one."""

    def __init__(
        self,
        batches: Iterable[Iterable[Any]],
        generator: torch.Generator | None,
        policy: ExchangePolicy,
    ) -> None:
        self.planned: deque[LoadPlan] = deque()
        """The batches of the latest pass that are asked for and not delivered yet."""
        self.batches = batches
        self.channel = 0
        """The number of the messages between threads that iterate over it; 0 before the first."""
        self._generator = generator or torch.default_generator
        self._policy = policy
        self._samples = 0

    def __len__(self) -> int:
        assert isinstance(self.batches, Sized)
        return len(self.batches)

    def __iter__(self) -> Iterator[RowRequest]:
        self.planned.clear()
        state = self._generator.get_state().numpy().tobytes()
        seed = int.from_bytes(blake2b(state, digest_size=7).digest(), "little")
        return self._requests(iter(self.batches), seed, is_alone=get_transport().size == 1)

    def _requests(
        self, batches: Iterator[Iterable[Any]], seed: int, *, is_alone: bool
    ) -> Iterator[RowRequest]:
        """`is_alone`: whether the pass begins while this rank makes steps alone."""
        for batch in batches:
            indices = list(batch)
            transport = get_transport()
            block = Block(transport.rank, transport.size, len(indices))
            # A rank that makes steps alone loads whole batches; the others then do the same. A
            # thread may ask for more or fewer batches until these steps end.
            is_shared = transport.size > 1 and not (is_alone and not in_main_thread())
            loading = self._policy.next_batch(is_shared=is_shared)
            plan = LoadPlan(seed, self._samples, indices, block, loading)
            self._samples += len(indices)
            self.planned.append(plan)
            yield plan.request()


# -------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class LoadedSamples:
    """The samples of a whole batch, loaded in this process and not collated yet."""

    samples: list[Any]
    are_small: bool | None = None
    """Whether those that draw random numbers are small, if any does and it was found out."""

    def checksum(self) -> bytes | None:
        """Equal for equal samples; None if they cannot be packed."""
        return _checksum(self.samples)


@dataclass(frozen=True)
class LoadedRows:
    """This rank's rows of a batch, ready to be sent."""

    count: int = 0
    seconds: float = 0.0
    """How long they took to load."""
    schema: SampleSchema | None = None
    """The schema of the samples if they have one in common and default_collate has collated them:
    then `leaves` holds its tensors and lists."""
    leaves: list[Any] = field(default_factory=list)
    packed: PackedSamples | None = None
    """The samples otherwise."""
    cannot_pack: str = ""
    """The reason if they cannot be packed."""
    first_checksum: bytes | None = None
    """Of the first sample, in a batch that is checked."""
    other_checksum: bytes | None = None
    """Of the first sample of the next rank, as loaded here."""
    generators: frozenset[str] = frozenset()
    """The names of the global generators that samples have drawn from so far."""
    effect: str = ""
    """What loading changes beside the samples, as a predicate."""
    prints: bool = False
    """Whether loading has printed anything, which only rank 0 shows."""
    are_small: bool | None = None
    """As that of LoadedSamples."""


class RowDataset(Dataset[Any]):
    """A dataset that loads the samples of a `RowRequest`, each from its own random stream."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        variables: Sequence[Variable] = (),
        effects: SampleEffects | None = None,
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._loader = SampleLoader(dataset, variables, effects or SampleEffects())
        self._restorable: DatasetState | None = None
        """What the data set held before the latest rows, if all that they have changed can be
        taken back."""

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that is spawned."""
        return vars(self) | {"_restorable": None}

    def __getitems__(self, request: RowRequest) -> Any:
        with OwnFrames(), rank_local():
            if not request.is_whole:
                return self._load_rows(request)
            samples, are_small = self._load(request)
        if get_worker_info() is None:
            return LoadedSamples(samples, are_small)
        return self.collate(samples, request)

    def load_rest(self, plan: LoadPlan, generators: frozenset[str]) -> None:
        """Load the rows of a batch that `plan.request()` leaves to other ranks, for what loading
        them changes and prints here; they draw from these generators.

        The rows of rank 0 are the first. Another rank takes back what its own have changed, if it
        can, and loads all in their order, which a list shows."""
        own, self._loader.effects.generators = plan.request(), generators
        loaded = {*range(own.first, own.first + len(own.indices))}
        loaded |= set() if own.check is None else {own.check[0]}
        if self._restorable is not None and plan.block.rank > 0:
            self._restorable.restore()
            loaded = set()
        for number, index in enumerate(plan.indices, plan.first):
            if number not in loaded:
                with rank_local():
                    self._load(RowRequest(plan.seed, number, [index], is_whole=True))

    def load_again(self, plan: LoadPlan) -> Any:
        """Load all rows of a batch of which this rank has loaded its own, or all in another way."""
        if self._restorable is not None:
            self._restorable.restore()
        return self.__getitems__(plan.whole_request())

    def collate(self, samples: list[Any], request: RowRequest) -> Any:
        """The batch of a loader with workers, which collate: from a random stream of its own."""
        with OwnFrames(), _restoring_generators():
            if in_main_thread():
                seed_all(derive_seed(request.seed, request.first, "collate"))
            return self._collate(samples)

    def _load(self, request: RowRequest) -> tuple[list[Any], bool | None]:
        """These samples, and whether those that draw are small: see LoadedSamples."""
        if request.as_plain or not in_main_thread():
            return self._loader.load_as_plain(request.indices), None
        return self._loader.load(
            request.indices, request.seed, request.first, counts=request.counts
        )

    def _load_rows(self, request: RowRequest) -> LoadedRows:
        checked = [] if request.check is None else [request.check[1]]
        is_here = get_worker_info() is None
        state = self._loader.state([*request.indices, *checked]) if is_here else None
        effects = LoadingEffects(state)
        start = perf_counter()
        with effects.watching_prints():
            samples, are_small = self._load(request)
        seconds = perf_counter() - start
        schema = common_schema(samples) if self._collate is default_collate else None
        fields: dict[str, Any]
        if schema is not None:
            leaves = list(flatten_collated(schema, default_collate(samples)))
            fields = {"schema": schema, "leaves": leaves}
        else:
            fields = _try_pack(samples)
        if request.check is not None:
            fields["first_checksum"] = _checksum(samples[0]) if samples else None
            fields["other_checksum"] = self._other_checksum(request.seed, *request.check)
        generators = self._loader.effects.generators or frozenset()
        effect, is_restorable = effects.describe(draws=bool(generators))
        self._restorable = effects.state if is_restorable else None
        fields |= {"generators": generators, "effect": effect, "are_small": are_small}
        return LoadedRows(len(samples), seconds, prints=effects.prints, **fields)

    def _other_checksum(self, seed: int, number: int, index: Any) -> bytes | None:
        with _restoring_generators():
            try:
                seeded = GENERATORS if in_main_thread() else frozenset()
                return _checksum(self._loader.load_one(index, seed, number, seeded))
            except BaseException as error:  # the data set's, raised by the sample's rank
                if is_from_signal(error):
                    raise
                return None


def _try_pack(samples: list[Any]) -> dict[str, Any]:
    try:
        return {"packed": pack(samples)}
    except CannotPackError as error:
        return {"cannot_pack": str(error)}


def _checksum(sample: Any) -> bytes | None:
    try:
        return pack(sample).checksum()
    except CannotPackError:
        return None


@contextmanager
def _restoring_generators() -> Iterator[None]:
    """Restore the global generators at the end, unless a thread of the script's may use them."""
    if not in_main_thread():
        yield
        return
    before = RNGStates.capture()
    try:
        yield
    finally:
        before.restore()


def init_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Called by torch in worker number `worker`, before it loads anything: call the user's
    worker_init_fn, which sees the user's dataset in place of one that holds it."""
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # torch freezes the attribute
    if init is not None:
        init(worker)


def no_collate(loaded: Any) -> Any:
    """A collate_fn that returns its argument."""
    return loaded
