"""Modules that a script makes anew in each step, as odeint wraps its function and higher copies a
network: to compare each one's calls would cost more than sharding them can gain.

All ranks make the same modules in the same order, so they decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from instep.unedited.sharded_call.plan.whole_reasons import WholeReason

TEMPORARY = WholeReason("the script makes a new one in each step")
_WRAPPERS, _COPIES = 2, 4
"""After so many others around the same parameters, or with others of the same shapes that were
found to be whole, a module is not compared any more."""


@dataclass
class _ModuleGroup:
    """Modules around the same parameters, or with parameters of the same shapes, whose classes have
    the same name."""

    most: int
    """After so many those that come are not compared any more."""
    why_whole: WholeReason | None = None
    """Of the last one that was compared."""
    count: int = 0
    was_sharded: bool = False
    whole_calls: dict[Any, Any] = field(default_factory=dict)
    """What `whole_calls` knows of those that are not compared any more."""

    @property
    def is_whole(self) -> bool:
        """Whether those that come are not compared any more."""
        return self.count >= self.most and not self.was_sharded


_wrappers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Those around the same parameters, by the first of these, and by the name of their class."""
_kinds: dict[tuple[Any, ...], _ModuleGroup] = {}
"""Those with other parameters."""
_counted: WeakSet[nn.Module] = WeakSet()


def find_reason(module: nn.Module) -> WholeReason | None:
    """Why a module that was never called before is not even compared; None if it is."""
    first = next(iter(nn.Module.parameters(module)))
    wrappers: _ModuleGroup = _wrappers.setdefault(first, {}).setdefault(
        _name_of(module), _ModuleGroup(_WRAPPERS + 1, TEMPORARY)
    )
    wrappers.count += 1
    found = _find_whole(module)
    return None if found is None else found.why_whole


def find_whole_calls(module: nn.Module) -> dict[Any, Any]:
    """What is known of the calls of modules like this one, if these are not even compared; else
    nothing."""
    found = _find_whole(module)
    return {} if found is None else found.whole_calls


def _find_whole(module: nn.Module) -> _ModuleGroup | None:
    """The modules like this one, if it is not even compared."""
    first = next(iter(nn.Module.parameters(module)), None)
    if first is None:
        return None
    found: _ModuleGroup | None = _wrappers.get(first, {}).get(_name_of(module))
    if found is None or not found.is_whole:
        found = _kinds.get(_key_of(module))
    return found if found is not None and found.is_whole else None


def note(module: nn.Module, why_whole: WholeReason | None) -> None:
    """Remember what a comparison has found; several of one module count once."""
    kind = _kinds.setdefault(_key_of(module), _ModuleGroup(_COPIES))
    kind.was_sharded |= why_whole is None
    if module not in _counted:
        _counted.add(module)
        kind.count += 1
        kind.why_whole = why_whole


def clear() -> None:
    """Forget them all."""
    _wrappers.clear()
    _kinds.clear()
    _counted.clear()


def _name_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _key_of(module: nn.Module) -> tuple[Any, ...]:
    shapes = (None if is_lazy(p) else tuple(p.shape) for p in nn.Module.parameters(module))
    return _name_of(module), *shapes
