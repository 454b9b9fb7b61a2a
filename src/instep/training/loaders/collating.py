"""The script's `collate_fn` on this rank's samples of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from instep.process.failures.tracebacks import root_cause
from instep.training.errors import EmptyBlockError

_EMPTY_LIST = (
    (ValueError, "not enough values to unpack (expected"),
    (RuntimeError, "expects a non-empty TensorList"),
)
"""Errors of `zip(*samples)` and of `torch.stack(samples)` without a sample."""


class BlockCollate:
    """Calls the script's `collate_fn`; says so where that has left none of this rank's samples."""

    def __init__(self, collate: Callable[[list[Any]], Any], rank: int) -> None:
        self._collate, self._rank = collate, rank

    def __call__(self, samples: list[Any]) -> Any:
        """The batch of these samples. Raises EmptyBlockError."""
        try:
            return self._collate(samples)
        except (IndexError, ValueError, RuntimeError) as error:
            if samples and _has_no_sample(error):
                raise EmptyBlockError(
                    f"the collate_fn of a loader has left out all of rank {self._rank}'s samples "
                    f"of a batch ({len(samples)}). Each rank loads its own block of every batch, "
                    "so that a whole block may be left out where one process still has samples. "
                    "Leave these samples out of the data set (torch.utils.data.Subset), or keep "
                    "them in the batch, mask them in the loss, and state how many count: "
                    "instep.weight(count)."
                ) from error
            raise


def _has_no_sample(error: Exception) -> bool:
    """Whether samples were put together, and there was none."""
    cause = root_cause(error)
    if any(isinstance(cause, kind) and text in str(cause) for kind, text in _EMPTY_LIST):
        return True
    trace = cause.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(cause, IndexError):
        return False
    frame = trace.tb_frame
    in_torch = frame.f_code.co_filename == default_collate.__code__.co_filename
    return in_torch and frame.f_locals.get("batch") == []
