"""Records of a run: plain values, written by each rank and read by the comparison."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.compiled_code import write_access


class Fingerprint(NamedTuple):
    """The fingerprint of a tensor."""

    norm: float
    projection: float
    """On a fixed random direction: the square of the difference of two is, on average, the square
    of the distance between the tensors."""


Fingerprints = Mapping[str, Fingerprint]
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class RunPlan:
    """What the ranks of one run write, and what is changed in them."""

    stop: int | None = None
    """The number of optimizer steps after which the script is stopped; None: at its end."""
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
    half_precision: str = ""
    """As in StepRecord: what computes in it rounds so, whatever the dtype of its parameters."""
    autocast: bool = True
    """Whether the script's autocast is in force; if not, it computes in its tensors' own dtypes."""
    without_instep: bool = False
    """Whether instep.replicate and instep.shard return what they are given."""
    bits: bool = False
    """Whether digests of all that is computed are recorded, and nothing else."""

    def write(self, folder: Path) -> None:
        """Write the plan for the ranks."""
        (folder / "plan").write_bytes(pickle.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> RunPlan:
        """Read the plan in a rank."""
        return cls(**pickle.loads((folder / "plan").read_bytes()))


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step on one rank, recorded before it changes anything."""

    losses: tuple[tuple[float, float | None], ...] = ()
    """The loss of each backward, and this rank's weight in it (None if unknown)."""
    lrs: tuple[float, ...] = ()
    """The learning rate of each group."""
    samples: int = 0
    """Rows in the module calls that led to this gradient; placeholders do not count."""
    row_hashes: tuple[int, ...] = ()
    """A hash of each of these rows."""
    computed: int | None = None
    """The number of them that this rank's modules computed; None: all."""
    whole: bool = False
    """Whether these are the samples of the whole batch, on every rank alike."""
    uses_random: bool = False
    """Whether random numbers were drawn during these calls."""
    half_precision: str = ""
    """The dtype of half precision in which these calls computed, without `torch.`, if any."""
    generator_hash: str = ""
    """A digest of the states of all global generators."""
    gradients: Fingerprints = field(default_factory=dict)
    parameters: Fingerprints = field(default_factory=dict)
    buffers: Fingerprints = field(default_factory=dict)


@dataclass(frozen=True)
class RankSummary:
    """What a rank records at its end."""

    whole: bool = True
    """Whether the script ended by itself and was not stopped."""
    indices: tuple[tuple[int, ...], ...] = ()
    """The first samples that its DataLoaders requested, batch by batch."""
    divided: int | None = None
    """The number of sharded calls of an unedited script on several ranks."""
    replicated: frozenset[str] = frozenset()
    """The parameters of models that instep.replicate was called on."""
    buffers: Fingerprints = field(default_factory=dict)
    """The buffers after training."""
    opt_out: str | None = None
    """Why the script ran on every rank as it is, if it did and names no batch of all ranks."""


@dataclass(frozen=True)
class RankRecord:
    """The record of one rank."""

    steps: tuple[StepRecord, ...]
    end: RankSummary | None = RankSummary()
    """None if the rank died before it wrote it."""


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
        """The number of steps that all ranks have made."""
        return min(len(rank.steps) for rank in self.ranks)

    @cached_property
    def half_precision(self) -> str:
        """The dtype of half precision in which some step computed; empty if none did."""
        return max((step.half_precision for step in self.ranks[0].steps), default="")

    def at(self, step: int) -> list[StepRecord]:
        """One step on all ranks."""
        return [rank.steps[step] for rank in self.ranks]

    @cached_property
    def losses(self) -> list[float | None]:
        """The loss of the global batch, step by step."""
        return [global_loss(self.at(k)) for k in range(self.steps)]

    @cached_property
    def samples_per_rank(self) -> list[int]:
        """The number of samples that each rank's modules computed in training."""
        return [
            sum(step.samples if step.computed is None else step.computed for step in rank.steps)
            for rank in self.ranks
        ]


def global_loss(steps: list[StepRecord]) -> float | None:
    """The sum over backwards; None if there was none, or if ranks differ in their number."""
    if len({len(step.losses) for step in steps}) > 1 or not steps[0].losses:
        return None
    backwards = zip(*(step.losses for step in steps), strict=True)
    return sum(_over_ranks(ranks) for ranks in backwards)


def _over_ranks(parts: Sequence[tuple[float, float | None]]) -> float:
    """The mean by the ranks' weights, a placeholder's is 0; the plain mean if one is unknown."""
    if any(share is None for _, share in parts):
        return sum(loss for loss, _ in parts) / len(parts)
    return sum(loss * share for loss, share in parts if share)


# --------------------------------------------------------------------------------- on disk


class RecordWriter:
    """Writes one rank's record step by step, so that the steps before a crash are kept."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        write_access.allow(str(folder))
        with bypass_overlay():
            self._steps = (folder / f"rank{rank}.steps").open("wb")

    def step(self, step: object) -> None:
        """Write one step."""
        pickle.dump(step, self._steps)
        self._steps.flush()

    def tensors(self, name: str, value: dict[str, Any]) -> None:
        """Write whole tensors, on rank 0 only."""
        if self._rank == 0:
            with bypass_overlay():
                torch.save(value, self._folder / f"{name}.pt")

    def end(self, end: RankSummary) -> None:
        """Write the end of the record."""
        self._steps.close()
        with bypass_overlay():
            (self._folder / f"rank{self._rank}.end").write_bytes(pickle.dumps(end))


def read_tensors(folder: Path, name: str) -> dict[str, Any]:
    """Read whole tensors; empty if none were written."""
    path = folder / f"{name}.pt"
    with bypass_overlay():
        if not path.exists():
            return {}
        value: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return value


def read_run(folder: Path, n: int, seconds: float) -> RunRecord:
    """Read the records of `n` ranks in `folder`."""
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
