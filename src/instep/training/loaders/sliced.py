"""A loader of any class, of whose batches each rank keeps its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from instep.distributed.flight_record.recorder import phase, set_epoch
from instep.distributed.rendezvous import bootstrap
from instep.training.batches.loop_ends import number_loader
from instep.training.batches.registry import register, register_end, register_skipped
from instep.training.batches.trackers import BatchTracker
from instep.training.blocks import Block
from instep.training.errors import OtherDataError
from instep.training.loaders.batch_rows import BatchRows
from instep.training.loaders.block_batches import empty_block
from instep.training.loaders.generators import broadcast_states, get_states, set_states
from instep.training.loaders.position import LoaderPosition
from instep.training.loaders.same_data import FirstBatchCheck
from instep.training.random_streams import (
    RNGStates,
    SharedRandomStream,
    broadcast_seed,
    derive_seed,
)

T = TypeVar("T")


class SlicedLoader(Generic[T]):
    """Any other loader: every rank loads the whole batch and keeps its own rows.

    Attributes are the loader's own.
    """

    def __init__(self, whole: Iterable[T]) -> None:
        self._whole = whole
        broadcast_states(whole, self)
        self._seed = broadcast_seed()
        self._position = LoaderPosition()
        self._begin: list[Tensor] = []
        """The states of the loader's own generators before the epoch."""
        self._resumed: dict[str, Any] | None = None
        """The state at which the next iteration goes on."""
        self._stream: SharedRandomStream | None = None
        self._number = number_loader()
        self._check: FirstBatchCheck | None = None
        self._rows = BatchRows(whole.batch_size if isinstance(whole, DataLoader) else None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def __len__(self) -> int:
        return len(self._whole)  # type: ignore[arg-type]

    @property
    def batch_position(self) -> int:
        """How many batches of this epoch the loop has taken, before a resume too."""
        return self._position.batches

    def __iter__(self) -> Iterator[T]:
        resumed, self._resumed = self._resumed, None
        in_scope = bootstrap.is_world_of_one()  # a run-once scope: no epoch of the job's
        if in_scope:
            position = LoaderPosition(self._position.epoch)
        elif resumed is None:
            position = self._position = LoaderPosition(self._position.epoch + 1, has_ended=False)
        else:
            position = self._position
        if torch.is_grad_enabled():
            set_epoch(position.epoch)
        stream = SharedRandomStream(derive_seed(self._seed, position.epoch))
        if resumed is not None and resumed["loader"] is None:
            set_states(self._whole, resumed["generators"])
        begin = get_states(self._whole)
        with stream.activate():
            batches = iter(self._whole)
        if not in_scope:
            self._begin, self._stream = begin, stream
        if resumed is not None:
            self._skip(batches, stream, resumed)
        if self._check is None and not in_scope:
            key = f"{self._number} {self._seed} {position.epoch} {position.batches}"
            self._check = FirstBatchCheck(key)
        kind = type(getattr(self._whole, "dataset", self._whole)).__name__
        compare = self._check.compare if self._check is not None else lambda *_: None
        return SlicedIterator(
            batches,
            stream,
            empty_block(),
            position,
            lambda batch: compare(batch, kind),
            self._number,
            self._rows,
        )

    def _skip(
        self, batches: Iterator[T], stream: SharedRandomStream, state: dict[str, Any]
    ) -> None:
        """Pass over what was taken before a checkpoint, unless the loader itself has done so."""
        if state["loader"] is not None:
            stream.states = RNGStates(**state["stream"])
            set_states(self._whole, state["generators"])
            return
        seen = 0
        with stream.activate():
            for _ in range(state["batches"]):
                batch = next(batches, None)
                seen += 0 if batch is None else self._rows.count(batch)
        if seen != state["samples"]:
            raise OtherDataError.of_batches(state["samples"], seen)

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop in the data; with the loader's own state if it has one."""
        loader = self._state_of_whole()
        goes_on = loader is not None or self._position.has_ended
        return {
            "seed": self._seed,
            **self._position.state_dict(None, []),
            "loader": loader,
            "generators": get_states(self._whole) if goes_on else self._begin,
            "stream": dict(vars(self._stream.states)) if loader and self._stream else None,
        }

    def _state_of_whole(self) -> Any:
        """The loader's own state; None if it has none, or none that is of use."""
        if self._position.epoch < 0 or not hasattr(self._whole, "state_dict"):
            return None
        state = self._whole.state_dict()
        return None if self._position.has_ended and not _is_finished(state) else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on at a position. Raises OtherDataError at that iteration.

        A loader without a state of its own loads what was taken before, and it is passed over.
        """
        self._position = LoaderPosition.from_state_dict(state, None)
        self._seed = state["seed"]
        self._resumed = None if self._position.has_ended else state
        if state["loader"] is not None:
            self._whole.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            if self._resumed is None:
                # Its iterator draws from the global generators, as the one that ended did: now,
                # and not in the next epoch's stream.
                self._whole.state_dict()  # type: ignore[attr-defined]
        if self._resumed is None:
            set_states(self._whole, state["generators"])

    def end_epoch(self) -> None:
        """Let the next iteration begin a new epoch, wherever the last one was left."""
        self._position.has_ended, self._resumed = True, None


def _is_finished(state: Any) -> bool:
    """Whether torchdata's loader has come to the end of its epoch, and will begin the next one."""
    return isinstance(state, dict) and state.get("_iterator_finished") is True


class SlicedIterator(Generic[T]):
    """Yields this rank's rows of each batch."""

    def __init__(
        self,
        batches: Iterator[T],
        stream: SharedRandomStream,
        empty_block: Block,
        position: LoaderPosition,
        compare: Callable[[T | None], None],
        number: int,
        rows: BatchRows,
    ) -> None:
        """`compare` is called with each whole batch, and with None at the end; `number`: of the
        loader."""
        self._position = position
        self._compare = compare
        self._rows = rows
        self._batches = batches
        self._stream = stream
        self._empty_block = empty_block
        self._tracker = BatchTracker(self, number)

    def __iter__(self) -> SlicedIterator[T]:
        return self

    def __next__(self) -> T:
        while True:
            try:
                with phase("data"), self._stream.activate():
                    batch = next(self._batches)
            except StopIteration:
                self._compare(None)
                self._position.has_ended = True
                register_end(self._tracker)
                raise
            self._compare(batch)
            block = replace(self._empty_block, total=self._rows.count(batch))
            self._position.count(block.total)
            if self._tracker.yields(block):
                local = self._rows.slice(batch, block)
                register(local, block, self._tracker)
                return local
            register_skipped(block, self._tracker)
