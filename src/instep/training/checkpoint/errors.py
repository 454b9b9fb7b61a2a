"""Errors of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from instep.errors import TrainingError


class CheckpointError(TrainingError):
    """A checkpoint cannot be written, read or loaded."""

    @classmethod
    def of_write(cls, path: Path, error: BaseException) -> CheckpointError:
        """A write that failed; `path`: the checkpoint that there is not."""
        why = str(error) if isinstance(error, cls) else f"{type(error).__name__}: {error}"
        return cls(f"{path} could not be written: {why}. Older checkpoints are as they were.")


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, cut off or changed."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path} is damaged: {what}.")


class NewerFormatError(CheckpointError):
    """A checkpoint of a later version of instep."""


class CannotSaveError(CheckpointError, TypeError):
    """A value that has no place in a checkpoint."""

    @classmethod
    def of_value(cls, path: str, value: object) -> CannotSaveError:
        """A value of a type that is not saved; `path`: where it is."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return cls(
            f"{path} is a {kind}, and a checkpoint holds tensors, arrays, numbers, strings, and "
            "lists, tuples and dicts of them. Convert it in state_dict()."
        )


class OtherModelError(CheckpointError):
    """A checkpoint does not fit what it is to be loaded into."""

    @classmethod
    def of_names(
        cls,
        path: Path,
        name: str,
        missing: Sequence[str],
        unexpected: Sequence[str],
        shapes: Sequence[str],
    ) -> OtherModelError:
        """A model of other parameters; `shapes`: a line for each that differs in shape."""
        parts = [
            f"{title}: {_first(names)}"
            for title, names in (
                ("it lacks", missing),
                ("only it has", unexpected),
                ("shapes differ", shapes),
            )
            if names
        ]
        return cls(
            f"{path} was saved from another {name}: {'; '.join(parts)}. Build the same {name}, or "
            "begin in another folder."
        )


class FolderInUseError(CheckpointError):
    """Another job writes to the folder."""


_SHOWN_NAMES = 5


def _first(names: Sequence[str]) -> str:
    left = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {left} more" if left > 0 else "")
