"""What is known of a run: plain values, written by each rank, read by whoever compares."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.unedited.files import write_access
from instep.unedited.files.bypass import bypass_overlay


class Fingerprint(NamedTuple):
    """A tensor's fingerprint."""

    norm: float
    projection: float
    """On a fixed random direction: the square of the difference of two is, on average, the square
    of the distance between the tensors."""


Fingerprints = Mapping[str, Fingerprint]
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class RunPlan:
    """What one run is for: what its ranks write and what is changed in them."""

    stop: int | None = None
    """After how many optimizer steps the script is ended; None: it ends by itself."""
    keep: tuple[int, ...] = ()
    """The steps, from 0, of which rank 0 writes whole gradients."""
    states: bool = False
    """Whether rank 0 writes, before each of these, all that a pinned run needs."""
    final: bool = False
    """Whether rank 0 writes the parameters and buffers that training ends with."""
    pin: str | None = None
    """Folder of the run whose states are put in place before each step that has one."""
    reverse: bool = False
    """Whether each batch of a DataLoader has its samples in reverse order."""
    rounding: int = 0
    """Seed of the rounding errors by which parameters are changed before they are first used, and
    after each state that is put in place; 0: none."""
    without_instep: bool = False
    """Whether instep.replicate and instep.shard return what they are given."""

    def write(self, folder: Path) -> None:
        """Leave it for the ranks."""
        (folder / "plan").write_bytes(pickle.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> RunPlan:
        """As a rank finds it."""
        return cls(**pickle.loads((folder / "plan").read_bytes()))


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step as one rank saw it, before it changed anything."""

    losses: tuple[tuple[float, float | None], ...] = ()
    """What each backward started from, and this rank's fraction of the batch (None where nobody
    knows of a division)."""
    lrs: tuple[float, ...] = ()
    """The learning rate of each group."""
    samples: int = 0
    """Rows in the module calls that this gradient came from; ghosts do not count."""
    row_hashes: tuple[int, ...] = ()
    """A hash of each of these rows."""
    computed: int | None = None
    """How many of them went through this rank's modules; None: all."""
    whole: bool = False
    """Whether these are the samples of the whole batch, on every rank alike."""
    uses_random: bool = False
    """Whether random numbers were drawn during these calls."""
    half_precision: bool = False
    """Whether they computed in half precision."""
    generator_hash: str = ""
    """A digest of the states of all global generators."""
    gradients: Fingerprints = field(default_factory=dict)
    parameters: Fingerprints = field(default_factory=dict)
    buffers: Fingerprints = field(default_factory=dict)


@dataclass(frozen=True)
class RankSummary:
    """What a rank knew in the end."""

    whole: bool = True
    """Whether the script came to its own end (and was not stopped)."""
    indices: tuple[tuple[int, ...], ...] = ()
    """The samples that its DataLoaders asked for, batch by batch; the first ones."""
    divided: int | None = None
    """Of an unedited script on several ranks: how many calls of modules were divided."""


@dataclass(frozen=True)
class RankRecord:
    """All that one rank recorded."""

    steps: tuple[StepRecord, ...]
    end: RankSummary | None = RankSummary()
    """None where the rank did not live to write it."""


@dataclass(frozen=True)
class RunRecord:
    """One run of the script on `n` ranks."""

    n: int
    ranks: tuple[RankRecord, ...]
    seconds: float = 0.0
    gradients: Mapping[int, Tensors] = field(default_factory=dict)
    """Rank 0's whole gradients of some steps."""
    initial: Tensors = field(default_factory=dict)
    """Rank 0's parameters before training."""
    parameters: Tensors = field(default_factory=dict)
    """Rank 0's parameters after training."""
    buffers: Tensors = field(default_factory=dict)
    """Rank 0's buffers after training."""

    @cached_property
    def steps(self) -> int:
        """How many steps all ranks have made."""
        return min(len(rank.steps) for rank in self.ranks)

    def at(self, step: int) -> list[StepRecord]:
        """One step on all ranks."""
        return [rank.steps[step] for rank in self.ranks]

    @cached_property
    def losses(self) -> list[float | None]:
        """The loss of the global batch, step by step."""
        return [global_loss(self.at(k)) for k in range(self.steps)]

    @cached_property
    def samples_per_rank(self) -> list[int]:
        """How many samples went through each rank's modules, in training."""
        return [
            sum(step.samples if step.computed is None else step.computed for step in rank.steps)
            for rank in self.ranks
        ]


def global_loss(steps: list[StepRecord]) -> float | None:
    """The sum over backwards; None where there was none, or not on all ranks alike."""
    if len({len(step.losses) for step in steps}) > 1 or not steps[0].losses:
        return None
    backwards = zip(*(step.losses for step in steps), strict=True)
    return sum(_over_ranks(ranks) for ranks in backwards)


def _over_ranks(parts: Sequence[tuple[float, float | None]]) -> float:
    """Weighted by shares where they are known, else the mean; a ghost has no part in it."""
    if any(share is None for _, share in parts):
        return sum(loss for loss, _ in parts) / len(parts)
    return sum(loss * share for loss, share in parts if share)


# --------------------------------------------------------------------------------- on disk


class RecordWriter:
    """Writes one rank's record, step by step, so that a rank that dies leaves what it had."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        write_access.allow(str(folder))
        with bypass_overlay():
            self._steps = (folder / f"rank{rank}.steps").open("wb")

    def step(self, step: StepRecord) -> None:
        """One more step."""
        pickle.dump(step, self._steps)
        self._steps.flush()

    def tensors(self, name: str, value: dict[str, Any]) -> None:
        """Whole tensors, of rank 0 only."""
        if self._rank == 0:
            with bypass_overlay():
                torch.save(value, self._folder / f"{name}.pt")

    def end(self, end: RankSummary) -> None:
        """There will be no more."""
        self._steps.close()
        with bypass_overlay():
            (self._folder / f"rank{self._rank}.end").write_bytes(pickle.dumps(end))


def read_tensors(folder: Path, name: str) -> dict[str, Any]:
    """Whole tensors as written; empty where there are none."""
    path = folder / f"{name}.pt"
    with bypass_overlay():
        if not path.exists():
            return {}
        value: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return value


def read_run(folder: Path, n: int, seconds: float) -> RunRecord:
    """What `n` ranks have left in `folder`."""
    plan = RunPlan.read(folder)
    final = read_tensors(folder, "final")
    return RunRecord(
        n,
        tuple(_read_rank(folder, rank) for rank in range(n)),
        seconds,
        gradients={k: g for k in plan.keep if (g := read_tensors(folder, f"gradients{k}"))},
        initial=final.get("initial", {}),
        parameters=final.get("parameters", {}),
        buffers=final.get("buffers", {}),
    )


def _read_rank(folder: Path, rank: int) -> RankRecord:
    steps: list[StepRecord] = []
    written = folder / f"rank{rank}.steps"
    if written.exists():
        with written.open("rb") as file:
            while True:
                try:
                    steps.append(pickle.load(file))
                except (EOFError, pickle.UnpicklingError):  # killed while it wrote
                    break
    end = folder / f"rank{rank}.end"
    return RankRecord(tuple(steps), pickle.loads(end.read_bytes()) if end.exists() else None)
