"""How far the script has come in its batches, which is equal on ranks that are in step.

Only what the main thread does counts, and where nothing else is said with gradients enabled: an
evaluation changes nothing.
"""

from __future__ import annotations

import threading

import torch

_requests = 0
_requests_at_backward = 0
_backwards = 0
"""Of several backwards of one batch, one."""
_epoch = 0
_loaded = 0
"""How many batches loops have requested from loaders."""


def note_request() -> None:
    """A loop requests a batch."""
    global _requests
    _requests += _counts()


def note_loaded() -> None:
    """A loop requests a batch from a loader."""
    global _loaded
    _loaded += _counts()


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
    """How many batches loops have requested from loaders."""
    return _loaded


def last_epoch() -> int:
    """That of the last batch."""
    return _epoch


def reset() -> None:
    """Begin anew."""
    global _requests, _requests_at_backward, _backwards, _epoch, _loaded
    _requests = _requests_at_backward = _backwards = _epoch = _loaded = 0


def _counts() -> bool:
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and torch.is_grad_enabled()
