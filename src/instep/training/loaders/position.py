"""How far a loop has come in a loader, in numbers that do not depend on the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from instep.training.batches import progress
from instep.training.errors import OtherDataError


@dataclass(eq=False)
class LoaderPosition:
    """The position in one epoch of a loader, counted when the loop takes a batch."""

    epoch: int = -1
    batches: int = 0
    samples: int = 0
    """Of the whole batches: those of all ranks."""
    has_ended: bool = field(default=True, kw_only=True)
    """Whether the loop has come to the end of the epoch, or none has begun."""
    generator_states: list[Tensor] = field(default_factory=list)
    """Of the loader's own generators, before the epoch."""

    def count(self, samples: int) -> None:
        """The loop has taken a batch."""
        progress.current.note_epoch(self.epoch)
        self.batches += 1
        self.samples += samples

    def state_dict(self, length: int | None, generator_states: list[Tensor]) -> dict[str, Any]:
        """The position as values for a checkpoint. `length`: how many samples the data set has.
        `generator_states`: those of the loader's own generators now."""
        return {
            "epoch": self.epoch,
            "batches": 0 if self.has_ended else self.batches,
            "samples": 0 if self.has_ended else self.samples,
            "has_ended": self.has_ended,
            "length": length,
            "generators": generator_states if self.has_ended else self.generator_states,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], length: int | None) -> LoaderPosition:
        """The position in a checkpoint. Raises OtherDataError for another length in mid-epoch."""
        if not state["has_ended"] and length != state["length"]:
            raise OtherDataError(
                f"the checkpoint was saved after {state['samples']} samples of an epoch over "
                f"{state['length']} samples; the data set has {length} now, so the rest of that "
                "epoch is not known. Use the same data, or resume from a checkpoint at the end of "
                "an epoch."
            )
        return cls(
            state["epoch"],
            state["batches"],
            state["samples"],
            has_ended=state["has_ended"],
            generator_states=state["generators"],
        )
