"""Calls that are known to be computed whole, which costs them a few microseconds.

They are found by their tensors' shapes. A whole call has the right numbers whatever else is among
its arguments, so all that needs to be equal is what the decision depends on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from instep.unedited.sharded_call.plan.call_tuner import CallTuner
from instep.unedited.sharded_call.plan.module_state import temporary_modules

_MAX_KEYS = 64


@dataclass(eq=False, slots=True)
class WholeCall:
    """What is known of calls with one key."""

    rows: int
    """With gradients; else 0."""
    elements: int
    tuner: CallTuner | None
    """What has chosen it; None: they cannot be sharded."""
    by_parts: bool
    """Whether any of the module's parts may be sharded."""
    is_on_accelerator: bool


@dataclass(slots=True)
class DecisionCounts:
    """How many calls were decided in which way so far."""

    undecided: int = 0
    """Those that are not known, or not for good, to be computed whole."""
    trials: int = 0
    """Those that were compared or timed."""
    watched: int = 0
    """Those of a module's first calls that were watched, which takes longer."""

    @property
    def slow(self) -> int:
        """How many calls took longer than later ones will."""
        return self.trials + self.watched


decision_counts = DecisionCounts()
_known: WeakKeyDictionary[nn.Module, dict[Any, WholeCall]] = WeakKeyDictionary()
"""By key; modules that the script makes anew in each step share theirs."""


def find(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WholeCall | None:
    """What is known of calls with these arguments, if they are to be computed whole."""
    known = _known.get(module)
    if known is None:
        known = _known[module] = temporary_modules.find_whole_calls(module)
    call = known.get(_key_of(module, args, kwargs))
    if call is None or (call.tuner is not None and not call.tuner.has_chosen_whole):
        return None
    return call


def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: WholeCall) -> None:
    """Find such calls from now on."""
    key = _key_of(module, args, kwargs)
    if key is None:
        return
    known = _known.setdefault(module, {})
    if len(known) >= _MAX_KEYS:
        known.clear()
    known[key] = call


def clear() -> None:
    """Forget them all."""
    _known.clear()


def _key_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """None: they are not such that a short look is enough."""
    # torch.jit.freeze leaves no `training`.
    key: list[Any] = [getattr(module, "training", False), torch.is_grad_enabled()]
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is nn.Parameter:
            if arg.is_nested:
                return None
            key.append((arg.shape, arg.dtype, arg.requires_grad, arg.device))
        elif kind is np.ndarray:
            key.append((kind, arg.shape, arg.dtype))
        elif kind is int or kind is float:
            key.append(kind)
        elif arg is None or kind is bool or kind is str or isinstance(arg, Enum):
            key.append(arg)
        else:
            return None
    if kwargs:
        values = tuple(kwargs.values())
        inner = _key_of(module, values, {})
        if inner is None:
            return None
        key += (*kwargs, inner)
    return tuple(key)
