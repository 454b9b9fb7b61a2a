"""How far the script has come in its batches, which is equal on ranks that are in step.

Only what the main thread does counts, outside of a `single_process_scope`, and where nothing else
is said with gradients enabled: an evaluation changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from instep.distributed.communication.scopes import scope_number
from instep.process import in_main_thread


@dataclass
class BatchProgress:
    """What was requested, loaded and used since the start."""

    requested: int = 0
    """How many batches came from loaders, or from `instep.shard(tensors)`, with gradients
    enabled."""
    loaded: int = 0
    """Of these, how many came from loaders."""
    requested_at_backward: int = 0
    backwards: int = 0
    """Of several backwards of one batch, one."""
    epoch: int = 0
    """That of the last batch."""
    loader_requests: tuple[int, bool] = 0, False
    """How many batches loaders were asked for, with gradients or without, and whether one has come
    to its end since then."""
    draws: dict[bool, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    """The position of the last draw, and how many there were at it; inside of a scope and
    outside."""

    def note_request(self) -> None:
        """A batch is requested, from a loader or by `instep.shard(tensors)`."""
        self.requested += _counts()

    def note_loaded(self) -> None:
        """A loop requests a batch from a loader."""
        self.loaded += _counts()

    def note_loader_request(self, *, is_end: bool) -> None:
        """A loader was asked for a batch, with gradients or without: it has one, or is at its
        end."""
        if is_followed():
            count = self.loader_requests[0]
            self.loader_requests = (count, True) if is_end else (count + 1, False)

    def set_loader_requests(self, count: int = 0, has_ended: int = False) -> None:
        """Go on as at a checkpoint."""
        self.loader_requests = count, bool(has_ended)

    def next_draw_position(self) -> tuple[int, ...]:
        """Numbers of its own for what is drawn without a training step.

        They are the same on all ranks, those included that have skipped batches and what is drawn
        for them: how far the script has come in its batches, or in which scope it is, and how many
        draws there were since.
        """
        scope = scope_number()
        position = self.loader_requests if scope is None else (scope,)
        last, count = self.draws.get(scope is None, ((), 0))
        count = count + 1 if last == position else 0
        self.draws[scope is None] = position, count
        return *position, count

    def note_backward(self) -> None:
        """A backward of a replica begins."""
        if self.requested_at_backward != self.requested:
            self.backwards += 1
            self.requested_at_backward = self.requested

    def note_epoch(self, epoch: int) -> None:
        """A loop takes a batch of this epoch of its loader."""
        if _counts():
            self.epoch = epoch

    def reset(self) -> None:
        """Begin anew."""
        vars(self).update(vars(BatchProgress()))

    def counts(self) -> tuple[int, int]:
        """How many batches were requested, and how many of them had no backward of their own."""
        return self.requested, self.requested - self.backwards


current = BatchProgress()


def _counts() -> bool:
    return is_followed() and torch.is_grad_enabled()


def is_followed() -> bool:
    """Whether all ranks do what this one does now: not in a scope, nor in a thread of its own."""
    return in_main_thread() and scope_number() is None
