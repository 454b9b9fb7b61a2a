"""`instep.shard`: this rank's block of every batch of a loader, or of one batch."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set, Sized
from dataclasses import replace
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from instep.distributed.flight_record.recorder import phase, set_epoch
from instep.distributed.flight_record.script_line import warn_at_script_line
from instep.distributed.rendezvous import bootstrap
from instep.distributed.watchdog.call_stack import script_line
from instep.process import in_main_thread, settings
from instep.process.torch_private.tensors import tree_map
from instep.training.batches.loop_ends import number_loader
from instep.training.batches.registry import is_registered, register, register_end, register_skipped
from instep.training.batches.trackers import BatchTracker
from instep.training.blocks import Block, tensor_leaves
from instep.training.ddp_averages import weight_ddp_averages
from instep.training.drift.other_models import follow_other_models
from instep.training.errors import BitwiseError, CannotShardError, ShardedTwiceError
from instep.training.loaders.batch_rows import BatchRows, may_be_batches
from instep.training.loaders.block_batches import BlockBatchSampler, empty_block
from instep.training.loaders.collating import BlockCollate
from instep.training.loaders.generators import broadcast_states, get_states, set_states
from instep.training.loaders.position import LoaderPosition
from instep.training.loaders.same_data import check_same_data
from instep.training.loaders.sliced import SlicedLoader
from instep.training.optimizer_shards.sharded_step import shard_optimizer
from instep.training.random_streams import (
    RNGStates,
    SeededDataset,
    SharedRandomStream,
    broadcast_seed,
    derive_seed,
    is_deterministic,
)

T = TypeVar("T")
_warned: set[str] = set()
"""Lines at which a list of batches may have been taken for one batch."""


@overload
def shard(what: DataLoader[T], *, bitwise: int | None = None) -> DataLoader[T]: ...
@overload
def shard(what: T, *, bitwise: int | None = None) -> T: ...
def shard(what: Any, *, bitwise: int | None = None) -> Any:
    """This rank's rows of every batch of a loader, or of one batch; or its part of the steps of an
    optimizer.

    The batch is that of the whole job: rank r of N gets the samples [r*n//N, (r+1)*n//N) of each
    batch of n, in the order in which one process would see them. No sample is padded, dropped or
    counted twice. A rank without samples gets one placeholder that leaves no trace in
    gradients or batch statistics, so that its loop runs as the others do. Where gradients are
    switched off (evaluation under torch.no_grad()) it gets nothing instead, unless the loop has
    called `gather_rows`: whatever the script adds up counts every sample once.

    Args:
        what: a DataLoader over a map-style dataset, with any sampler or batch sampler, drop_last,
            collate_fn and workers: each rank loads its own samples, and what is random in a
            sample depends on (seed, epoch, index) only. Or any other loader (an iterable dataset,
            batch_size=None, a class of its own whose iterators yield batches): each rank loads
            every batch and keeps its rows; the batches must be the same on all ranks (the first
            one is compared while the loop runs: CannotShardError). Or one batch: tensors, or
            tuples, lists, dicts or dataclasses of them, whose dimension 0 is the batch; in place of
            a tensor there may be a list that has one for each sample. Or a torch.optim.Optimizer
            of the parameters of a replicated model: from now on each rank keeps the state of, and
            updates, 1/N of them and receives the others' (ZeRO stage 1), with the numbers that the
            undivided optimizer has. For SGD, Adam, AdamW, NAdam, RAdam,
            RMSprop, Adagrad, Adadelta, Adamax, ASGD, Rprop by elements; for Adafactor and Muon by
            whole parameters; for others by their class attribute `updates_by = "element"` or
            `"parameter"`.
        bitwise: as in `replicate`.

    Returns:
        For a loader, a loader that yields blocks; `len`, `dataset`, `batch_size`, `sampler` and
        `drop_last` stay those of the whole job, `total_len` is the number of samples, and each
        epoch has an order of its own, the same on all ranks. For a batch, views of its rows. For an
        optimizer, itself: its `step()` and `state_dict()` are collective from now on, its `state`
        has no entries, and its state dict is the undivided one's, whole on every rank, which any
        number of ranks and plain PyTorch load.

    Raises ShardedTwiceError, CannotShardError, BitwiseError, and DisagreementError for a loader
    of other data than on other ranks. Collective for a loader (the ranks agree on a seed).
    """
    check_bitwise(bitwise)
    if isinstance(what, ShardedLoader | SlicedLoader):
        raise ShardedTwiceError
    if isinstance(what, Optimizer):
        shard_optimizer(what)
        return what
    if isinstance(what, Dataset):
        raise CannotShardError(
            "a data set is divided by its loader: instep.shard(DataLoader(dataset, batch_size))."
        )
    if isinstance(what, nn.Module):
        raise CannotShardError(
            "a model is not divided: instep.replicate(model) keeps it the same on all ranks."
        )
    if isinstance(what, list | tuple | dict):
        _check_entries([*what.values()] if isinstance(what, dict) else [*what])
    follow_other_models()
    weight_ddp_averages()
    if isinstance(what, DataLoader):
        check_same_data(what)
        return _shard_loader(what)
    if _is_other_loader(what):
        return SlicedLoader(what)
    return _shard_batch(what)


def _check_entries(entries: list[object]) -> None:
    """Raise CannotShardError if a list or dict has loaders, models or the like: it is no batch."""
    kinds = DataLoader, Optimizer, nn.Module, Dataset, SlicedLoader
    found = next((each for each in entries if isinstance(each, kinds)), None)
    if found is not None:
        raise CannotShardError(
            f"instep.shard takes one loader, batch or optimizer, and got {len(entries)} things, a "
            f"{type(found).__name__} among them. Call it for each: train, test = "
            "instep.shard(train), instep.shard(test); of a model it is instep.replicate(model)."
        )


# ------------------------------------------------------------------------------- one batch


def _shard_batch(batch: T) -> T:
    rows = BatchRows()
    total = rows.count(batch)
    if any(is_registered(tensor) for tensor in tensor_leaves(batch)):
        raise ShardedTwiceError
    block = replace(empty_block(), total=total)
    if block.size > 1 and may_be_batches(batch):
        _warn_of_batches(total)
    local = rows.slice(batch, block)
    register(local, block)
    return local


def _warn_of_batches(count: int) -> None:
    if (line := script_line()) not in _warned:
        _warned.add(line)
        warn_at_script_line(
            f"instep.shard takes this list for one batch of {count} samples, of which each rank "
            "gets some. If they are batches, divide each: for batch in map(instep.shard, batches)."
        )


# ------------------------------------------------------------------- a loader, by its indices


def _is_other_loader(what: object) -> bool:
    """Whether this is a loader of a class that knows nothing of DataLoader: it can be iterated
    again and again, and is neither a batch nor a data set."""
    if not isinstance(what, Iterable) or isinstance(what, Iterator | Set | Dataset):
        return False
    kind = type(what)
    return not (hasattr(kind, "__getitem__") or hasattr(kind, "to") or tensor_leaves(what))


def _shard_loader(loader: DataLoader[T]) -> DataLoader[T] | SlicedLoader[T]:
    if not loader.in_order:
        raise CannotShardError(
            "a DataLoader with in_order=False gives each rank the batches in another order; "
            "leave in_order=True."
        )
    by_index = type(loader) is DataLoader and loader.batch_sampler is not None
    if not by_index or isinstance(loader.dataset, IterableDataset):
        return SlicedLoader(loader)
    if not isinstance(loader.dataset, Sized):
        raise CannotShardError(
            f"{type(loader.dataset).__name__} has no length, so its batches have no agreed "
            "order to take blocks from. Give it __len__ and __getitem__."
        )
    return ShardedLoader(loader)


class ShardedLoader(DataLoader[T]):
    """A DataLoader that loads this rank's block of every batch of another one."""

    def __init__(
        self, whole: DataLoader[T], *, empty_block: Callable[[], Block] = empty_block
    ) -> None:
        """`empty_block` makes this rank's block of a batch without samples."""
        broadcast_states(whole, self)
        assert whole.batch_sampler is not None
        self._whole = whole
        self._seed = broadcast_seed()
        self._number = number_loader()
        self._seeded = not is_deterministic(whole.dataset)
        self._position = LoaderPosition()
        self._resumes = False
        """Whether the next iteration goes on at `_position`."""
        self._blocks = BlockBatchSampler(
            whole.batch_sampler, self._seed, seeded=self._seeded, empty_block=empty_block
        )
        super().__init__(
            whole.dataset,
            batch_sampler=self._blocks,
            num_workers=whole.num_workers,
            collate_fn=whole.collate_fn,
            pin_memory=whole.pin_memory,
            timeout=whole.timeout,
            worker_init_fn=whole.worker_init_fn,
            multiprocessing_context=whole.multiprocessing_context,
            generator=whole.generator,
            prefetch_factor=whole.prefetch_factor,
            persistent_workers=whole.persistent_workers,
        )
        # DataLoader forbids setting these after a batch sampler; they only inform the script.
        vars(self).update(
            batch_size=whole.batch_size, sampler=whole.sampler, drop_last=whole.drop_last
        )

    @property
    def total_len(self) -> int:
        """How many samples the dataset has."""
        assert isinstance(self.dataset, Sized)
        return len(self.dataset)

    @property
    def batch_position(self) -> int:
        """How many batches of this epoch the loop has taken, before a resume too."""
        return self._position.batches

    def _get_iterator(self) -> Any:
        """torch's iterator, over a dataset that draws each sample from its own stream."""
        loading = copy.copy(self)
        own = self._blocks.empty_block()
        if own.size > 1:
            vars(loading)["collate_fn"] = BlockCollate(self.collate_fn, own.rank)
        was_made = self.persistent_workers and self._blocks.epoch > 0  # before a checkpoint
        if was_made or (not in_main_thread() and self.generator is None):
            # The seed of workers: from the global generator it would come at any moment.
            seed = derive_seed(self._seed, self._blocks.epoch, "workers")
            vars(loading)["generator"] = torch.Generator().manual_seed(seed)
        if self._seeded:
            vars(loading)["dataset"] = SeededDataset(self.dataset, self._seed)
        return super(ShardedLoader, loading)._get_iterator()

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # torch promises its own class
        position, before = self._begin()
        self._blocks.epoch, self._blocks.skipped = position.epoch, position.samples
        if torch.is_grad_enabled():
            set_epoch(position.epoch)
        batches = super().__iter__()
        if before is not None:
            before.restore()
        assert self._blocks.last is not None
        # To load samples in this process seeds its generators.
        local_stream = SharedRandomStream(0) if self._seeded and self.num_workers == 0 else None
        planned = self._blocks.last.planned
        return TrackedIterator(batches, planned, local_stream, position, self._number)

    def _begin(self) -> tuple[LoaderPosition, RNGStates | None]:
        """The position of an iteration, and the generators' states after its first draws, if those
        were made before a checkpoint."""
        if bootstrap.is_world_of_one():  # a run-once scope: no epoch of the job's
            return LoaderPosition(self._position.epoch), None
        if self._resumes:
            self._resumes = False
            set_states(self._whole, self._position.generator_states)
            return self._position, RNGStates.capture()
        states = get_states(self._whole)
        self._position = LoaderPosition(
            self._position.epoch + 1, generator_states=states, has_ended=False
        )
        return self._position, None

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop in the data, at any number of ranks."""
        position = self._position.state_dict(self.total_len, get_states(self._whole))
        return {"seed": self._seed, **position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on at a position. Raises OtherDataError."""
        self._position = LoaderPosition.from_state_dict(state, self.total_len)
        self._resumes = not self._position.has_ended
        self._seed = self._blocks.seed = state["seed"]
        self._iterator = None  # persistent workers have the seed of before
        if not self._resumes:
            set_states(self._whole, state["generators"])

    def end_epoch(self) -> None:
        """Let the next iteration begin a new epoch, wherever the last one was left."""
        self._position.has_ended, self._resumes = True, False


class TrackedIterator(Generic[T]):
    """Yields batches and registers the block of each one."""

    def __init__(
        self,
        batches: Iterator[T],
        planned: deque[Block],
        local_stream: SharedRandomStream | None,
        position: LoaderPosition,
        number: int,
    ) -> None:
        """`number`: of the loader."""
        self._position = position
        self._batches = batches
        self._planned = planned
        self._local_stream = local_stream
        self._tracker = BatchTracker(self, number)
        self._last: T | None = None

    def __iter__(self) -> TrackedIterator[T]:
        return self

    def __next__(self) -> T:
        while True:
            try:
                batch = self._load()
            except StopIteration:
                self._position.has_ended = True
                register_end(self._tracker)
                raise
            self._last = batch
            block = self._planned.popleft()
            self._position.count(block.total)
            if self._tracker.yields(block):
                register(batch, block, self._tracker)
                return batch
            register_skipped(block, self._tracker)

    def _load(self) -> T:
        try:
            with phase("data"):
                if self._local_stream is None:
                    return next(self._batches)
                with self._local_stream.activate():
                    return next(self._batches)
        except StopIteration:
            raise
        except Exception:
            # Of the script's loader. The rank whose sample it is fails too; any sample keeps this
            # rank's loop running, which may still hold the last batch, so the tensors of that must
            # not become a placeholder's.
            if self._last is None or not (self._planned and self._planned[0].is_empty):
                raise
            return _copy_first_row(self._last)


def check_bitwise(asked: int | None) -> None:
    """Raise BitwiseError if `asked` or INSTEP_BITWISE is a number of virtual shards: a script that
    divides its batches itself does not have them."""
    shards = asked or int(settings.BITWISE)
    if shards:
        raise BitwiseError(
            f"the same bits at any number of ranks take `instep run --bitwise {shards} train.py`, "
            f"or INSTEP_BITWISE={shards} and `python -m instep train.py` under another launcher; "
            "this script was started otherwise."
        )


def _copy_first_row(batch: T) -> T:
    """A copy of a batch's first sample."""

    def copy_row(leaf: Any) -> Any:
        return leaf[:1].clone() if isinstance(leaf, Tensor) and leaf.dim() else leaf

    first: T = tree_map(copy_row, batch)
    return first
