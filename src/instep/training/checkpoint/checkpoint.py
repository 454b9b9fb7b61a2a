"""`instep.Checkpoint`: saves a training, and resumes it at any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from instep.distributed.communication.scopes import single_process_scope
from instep.distributed.communication.transport import get_transport
from instep.distributed.flight_record.recorder import phase
from instep.distributed.numbers import each_on_any_rank, on_all_ranks
from instep.process import print_line
from instep.process.exit_status import REQUEUE
from instep.training import replicas
from instep.training.checkpoint.async_writer import AsyncWriter
from instep.training.checkpoint.errors import CannotSaveError, CheckpointError, OtherModelError
from instep.training.checkpoint.folder_lock import FolderLock
from instep.training.checkpoint.on_disk import storage
from instep.training.checkpoint.on_disk.state_shards import ShardedDraft
from instep.training.checkpoint.on_disk.storage import EncodedState
from instep.training.checkpoint.random_states import gather_states, restore_states
from instep.training.checkpoint.resume_point import ResumePoint
from instep.training.checkpoint.saved_objects import (
    PendingGrads,
    each_object,
    load_state,
    metrics_of_rank,
    prepare,
    state_of,
)
from instep.training.checkpoint.time_limit import SignalFlag, expect_signals

_TRAINING = "training"
"""The entry with what belongs to no object: position, random streams."""


class Checkpoint:
    """Saves a training in a folder, and resumes it at any number of ranks.

        checkpoint = instep.Checkpoint(
            "runs/digits", model=model, optimizer=optimizer, loader=loader, every=100, keep=3
        )
        for epoch in checkpoint.epochs(20):
            for x, y in loader:
                ...
                optimizer.step()
                checkpoint.step()

    The loop begins where the last checkpoint was saved, in mid-epoch too, with the same samples in
    the same batches, the same random numbers and the same parameters: bit for bit at the same
    number of ranks, up to the rounding of sums at another. Rank 0 writes in the background, and
    all ranks where the state is large; the training waits for the copy only. A checkpoint is whole
    or absent, and what is damaged later is noticed by a checksum and passed over with a warning.

    When SIGUSR1 or SIGTERM comes (and the script does not handle it), the next `step` saves and
    ends the script with the exit code 75.

    Args:
        folder: where checkpoints are made, as `step-00000100`; on the disk of rank 0's host. One
            job at a time writes to it.
        model, optimizer, scheduler, scaler: objects with state_dict and load_state_dict, or lists
            or dicts of them. A model may be replicated, compiled or in DistributedDataParallel;
            names have no prefix.
        loader: what the training loops over: `instep.shard(loader)`, a DataLoader, or any object
            with state_dict and load_state_dict; or a list or dict of such.
        metrics: `instep.Metric`s, whose totals so far are saved; or a list or dict of them.
        every: save after so many calls of `step`. None: at the end of each epoch.
        keep: how many checkpoints are left; None: all.
        shard_bytes: a model, or another object, whose tensors have so many bytes (by default 1 GiB)
            is written by all ranks that see the folder, each its shard; a smaller one by rank 0.
        others: more objects with state_dict and load_state_dict, or generators of random numbers
            (torch's, Python's or numpy's), by names of their own.

    Raises CannotSaveError, FolderInUseError, CheckpointError, and ValueError for an `every`, `keep`
    or `shard_bytes` below 1, or a name that instep uses. Collective, as are all its methods.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        metrics: Any = None,
        every: int | None = None,
        keep: int | None = None,
        shard_bytes: int = 1 << 30,
        **others: Any,
    ) -> None:
        for name, value in (("every", every), ("keep", keep), ("shard_bytes", shard_bytes)):
            if value is not None and value < 1:
                kinds = "" if name == "shard_bytes" else "None or "
                raise ValueError(f"{name} is {kinds}a number from 1 on, not {value!r}.")
        for name in (_TRAINING, *(name for name in others if name.startswith("_"))):
            if name in others:
                raise ValueError(f"{name} cannot be the name of an object; use another one.")
        self.folder = Path(folder).absolute()
        self.every = every
        self.shard_bytes = shard_bytes
        entries = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
            **others,
            "loader": loader,
            "metrics": metrics,
        }
        self._objects = {k: prepare(v, k) for k, v in entries.items() if v is not None}
        self._pending = PendingGrads(self._objects.get("optimizer", {}))
        self._step = 0
        self._epoch = 0
        self._has_stepped = False
        """Whether `step` was called in this epoch."""
        self._has_resumed = False
        self._writer = AsyncWriter(self.folder, keep)
        self._flag: SignalFlag | None = None
        with single_process_scope() as here:
            if here:
                self._open_folder()

    # ------------------------------------------------------------------------------ the loop

    @property
    def steps(self) -> int:
        """How many times `step` was called, in the runs before too."""
        return self._step

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0."""
        return self._epoch

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs that are left of `total`, from 0 on.

        Resumes first. The first number is that of the epoch in which the checkpoint was saved; a
        training that has ended has none left. The last epoch's end is always saved.
        """
        if not self._has_resumed:
            self.resume()
        while self._epoch < total:
            yield self._epoch
            self._epoch += 1
            self._step += not self._has_stepped  # a script without `step` counts epochs
            self._has_stepped = False
            each_object(self._objects.get("loader", {}), _end_epoch)
            must_end = self._agree()
            if self.every is None or self._epoch == total or must_end:
                self.save()
            if must_end and self._epoch < total:
                self._exit()
        self.close()

    def step(self) -> None:
        """Count a step of the optimizer; save after every `every` of them.

        Raises CheckpointError, on all ranks, if a checkpoint could not be written meanwhile.
        """
        self._step += 1
        self._has_stepped = True
        must_end = self._agree()
        if must_end or (self.every is not None and self._step % self.every == 0):
            self.save()
        if must_end:
            self._exit()

    # ------------------------------------------------------------------- saving and resuming

    def save(self) -> None:
        """Save now. Returns when the state is copied; it is written while the training goes on.

        Raises CannotSaveError, CheckpointError.
        """
        with phase("checkpoint"):
            state = self._state()
            error: CheckpointError | None = None
            proposed: ShardedDraft | None = None
            transport = get_transport()
            if transport.rank == 0:
                try:
                    self._check_order()
                    self._writer.wait()
                    error = self._writer.pop_error()  # of the last one
                    encoded = EncodedState.encode(state)
                    proposed = self._propose(encoded)
                    if proposed is None:
                        self._writer.start(self._step, encoded)
                except CheckpointError as raised:
                    error = raised
            error, proposed = transport.broadcast_object((error, proposed), 0)
            if proposed is not None:
                if transport.rank != 0:
                    encoded = _encode_if_possible(state)
                self._writer.start(self._step, encoded, proposed.share(encoded))
            if error is not None:
                raise error

    def resume(self) -> bool:
        """Load the latest undamaged checkpoint; False if there is none.

        The random generators are set, too, and the next loop over the loader goes on after the
        batches that were taken. Raises OtherModelError, OtherDataError, NewerFormatError.
        """
        with phase("checkpoint"):
            expect_signals()
            self._writer.wait()
            state: dict[str, Any] | None = None
            with single_process_scope() as here:
                if here and (found := storage.read_latest(self.folder)) is not None:
                    here.value, state = found
            self._has_resumed = True
            if here.value is None:
                return False
            path: Path = here.value
            self._load(path, self._read(path, state))
        if get_transport().rank == 0:
            ResumePoint(self._step, str(path)).note()
            where = f"epoch {self._epoch}, step {self._step}"
            print_line(f"resumed from {path} ({where})")
        return True

    def latest(self) -> Path | None:
        """The latest undamaged checkpoint; None if there is none."""
        self._writer.wait()
        with single_process_scope() as here:
            if here:
                here.value = storage.latest(self.folder)
        found: Path | None = here.value
        return found

    def close(self) -> None:
        """Wait until everything is on the disk, and let other jobs use the folder.

        Raises CheckpointError.
        """
        self._release()
        self._raise_on_all_ranks(self._writer.pop_error())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self.close()
        else:  # the other ranks may be elsewhere
            self._release()

    def _release(self) -> None:
        """Wait until everything is on the disk, and leave the signals and the folder to others."""
        self._writer.wait()
        if self._flag is not None:
            self._flag.remove()
        if self._writer.lock is not None:
            self._writer.lock.release()

    # ------------------------------------------------------------------------------- the parts

    def _open_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._writer.lock = FolderLock(self.folder)
            storage.remove_drafts(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint can be written to {self.folder}: {error.strerror or error}. Give "
                "instep.Checkpoint a folder in which rank 0 may make files."
            ) from error

    def _propose(self, state: EncodedState) -> ShardedDraft | None:
        """Rank 0's proposal that all ranks write `state`; None if it writes it alone."""
        if get_transport().size == 1:
            return None
        try:
            return ShardedDraft.make(self.folder, self._step, state, self.shard_bytes)
        except OSError as error:
            path = storage.checkpoint_path(self.folder, self._step)
            raise CheckpointError.of_write(path, error) from error

    def _state(self) -> dict[str, Any]:
        """Everything as it is now; on rank 0 complete. Collective."""
        transport = get_transport()
        state = {name: state_of(each) for name, each in self._objects.items() if name != "metrics"}
        if "metrics" in self._objects:
            state["metrics"] = transport.all_gather_object(state_of(self._objects["metrics"]))
        state[_TRAINING] = {
            "step": self._step,
            "epoch": self._epoch,
            "has_stepped": self._has_stepped,
            "ranks": transport.size,
            "random": gather_states(),
            "replicas": each_object(self._objects, _streams),
            "grads": self._pending.state(),
        }
        return state

    def _read(self, path: Path, of_rank_0: dict[str, Any] | None) -> dict[str, Any]:
        """The state in a checkpoint: read by every rank that sees it, else sent by rank 0."""
        transport = get_transport()
        state = of_rank_0
        seen = transport.all_gather_object(storage.checksum(path))
        if transport.rank != 0 and seen[transport.rank] == seen[0]:
            try:
                state = storage.read(path)
            except (CheckpointError, OSError):
                state = None  # rank 0 could read it
        if on_all_ranks(state is not None, transport):
            assert state is not None
            return state
        return transport.broadcast_object(of_rank_0 or {}, 0)

    def _load(self, path: Path, state: dict[str, Any]) -> None:
        training = state.pop(_TRAINING)
        missing = [name for name in self._objects if name not in state]
        unexpected = [name for name in state if name not in self._objects]
        if missing or unexpected:
            parts = [f"it has no {name}" for name in missing]
            parts += [f"it has a {name}, which is not given" for name in unexpected]
            raise OtherModelError(
                f"{path} was saved from other objects: {', '.join(parts)}. Give instep.Checkpoint "
                "the same ones, or begin in another folder."
            )
        for name, prepared in self._objects.items():
            if name == "metrics":
                load_state(prepared, metrics_of_rank(prepared, state[name], path), name, path)
            else:
                load_state(prepared, state[name], name, path)
        self._step, self._epoch = training["step"], training["epoch"]
        self._has_stepped = training["has_stepped"]
        _load_streams(self._objects, training["replicas"])
        self._pending.load_state(training["grads"])
        restore_states(training["random"])

    def _check_order(self) -> None:
        """Raise before a training that was not resumed mixes with the one in the folder."""
        if not self._has_resumed and storage.list_checkpoints(self.folder):
            raise CheckpointError(
                f"{self.folder} has the checkpoints of a training that was not resumed. Call "
                "resume() or loop over epochs() before the first step(), or use another folder."
            )
        self._has_resumed = True

    def _agree(self) -> bool:
        """Whether a signal has come to any rank. Raises on all ranks if a write has failed."""
        if self._flag is None:
            self._flag = SignalFlag()
        flags = [self._flag.is_set, self._writer.has_failed]
        must_end, has_failed = each_on_any_rank(flags, get_transport())
        if has_failed:
            self._raise_on_all_ranks(self._writer.pop_error())
        return must_end

    def _raise_on_all_ranks(self, error: CheckpointError | None) -> None:
        """Raise rank 0's error, if there is one. Collective."""
        shared = get_transport().broadcast_object(error, 0)
        if shared is not None:
            raise shared

    def _exit(self) -> None:
        self.close()
        if get_transport().rank == 0:
            print_line(
                f"saved step {self._step} in {self.folder} on a signal; exit code "
                f"{REQUEUE} asks for the job to be queued again"
            )
        raise SystemExit(REQUEUE)


def _encode_if_possible(state: dict[str, Any]) -> EncodedState:
    """The state of a rank other than 0; empty if it cannot be saved, since rank 0 saves it too."""
    try:
        return EncodedState.encode(state)
    except CannotSaveError:
        return EncodedState({}, {})


def _end_epoch(loader: Any) -> None:
    if hasattr(loader, "end_epoch"):
        loader.end_epoch()


def _streams(value: Any) -> dict[str, tuple[int, ...]]:
    return replicas.stream_states(value) if isinstance(value, nn.Module) else {}


def _load_streams(prepared: Any, states: Any) -> None:
    if isinstance(prepared, dict):
        for key, each in prepared.items():
            _load_streams(each, states[key])
    elif isinstance(prepared, nn.Module):
        replicas.load_stream_states(prepared, states)
