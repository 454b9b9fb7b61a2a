"""How far the script has come in its batches, which is equal on ranks that are in step.

Only what the main thread does counts, outside of a `single_process_scope`, and where nothing else
is said with gradients enabled: an evaluation changes nothing.
"""

from __future__ import annotations

import threading

import torch

from instep.distributed.communication.scopes import scope_number

_requests = 0
"""How many batches came from loaders, or from `instep.shard(tensors)`, with gradients enabled."""
_requests_at_backward = 0
_backwards = 0
"""Of several backwards of one batch, one."""
_epoch = 0
_loaded = 0
"""Of these, how many came from loaders."""
_asked: tuple[int, bool] = 0, False
"""How many batches loaders were asked for, with gradients or without, and whether one has come to
its end since then."""
_draws: dict[bool, tuple[tuple[int, ...], int]] = {}
"""The position of the last draw, and how many there were at it; inside of a scope and outside."""


def note_request() -> None:
    """A batch is requested, from a loader or by `instep.shard(tensors)`."""
    global _requests
    _requests += _counts()


def note_loaded() -> None:
    """A loop requests a batch from a loader."""
    global _loaded
    _loaded += _counts()


def note_loader_request(*, is_end: bool) -> None:
    """A loader was asked for a batch, with gradients or without: it has one, or is at its end."""
    global _asked
    if _is_followed():
        _asked = (_asked[0], True) if is_end else (_asked[0] + 1, False)


def loader_requests() -> tuple[int, bool]:
    """How many batches loaders were asked for, and whether one has come to its end since then."""
    return _asked


def set_loader_requests(count: int = 0, has_ended: int = False) -> None:
    """Go on as at a checkpoint."""
    global _asked
    _asked = count, bool(has_ended)


def next_draw_position() -> tuple[int, ...]:
    """Numbers of its own for what is drawn without a training step.

    They are the same on all ranks, those included that have skipped batches and what is drawn for
    them: how far the script has come in its batches, or in which scope it is, and how many draws
    there were since.
    """
    scope = scope_number()
    position = _asked if scope is None else (scope,)
    last, count = _draws.get(scope is None, ((), 0))
    count = count + 1 if last == position else 0
    _draws[scope is None] = position, count
    return *position, count


def note_backward() -> None:
    """A backward of a replica begins."""
    global _backwards, _requests_at_backward
    if _requests_at_backward != _requests:
        _backwards += 1
        _requests_at_backward = _requests


def note_epoch(epoch: int) -> None:
    """A loop takes a batch of this epoch of its loader."""
    global _epoch
    if _counts():
        _epoch = epoch


def count_left_out() -> int:
    """How many batches were requested and had no backward of their own."""
    return _requests - _backwards


def count_loaded() -> int:
    """How many batches came from loaders, with gradients enabled."""
    return _loaded


def last_epoch() -> int:
    """That of the last batch."""
    return _epoch


def reset() -> None:
    """Begin anew."""
    global _requests, _requests_at_backward, _backwards, _epoch, _loaded, _asked
    _requests = _requests_at_backward = _backwards = _epoch = _loaded = 0
    _asked = 0, False
    _draws.clear()


def _counts() -> bool:
    return _is_followed() and torch.is_grad_enabled()


def _is_followed() -> bool:
    """Whether all ranks do what this one does now: not in a scope, nor in a thread of its own."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and scope_number() is None
