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
class _ModuleKind:
    """Modules with parameters of the same shapes, whose classes have the same name."""

    compared: int = 0
    """How many of them."""
    why_whole: WholeReason | None = None
    """Of the last one."""
    was_sharded: bool = False
    whole_calls: dict[Any, Any] = field(default_factory=dict)
    """What `whole_calls` knows of those that are not compared any more."""

    @property
    def is_whole(self) -> bool:
        """Whether those that come are not compared any more."""
        return self.compared >= _COPIES and not self.was_sharded


@dataclass
class _Wrappers:
    """Modules around the same parameters, whose classes have the same name."""

    count: int = 0
    whole_calls: dict[Any, Any] = field(default_factory=dict)
    """What `whole_calls` knows of those that are not compared any more."""

    @property
    def is_whole(self) -> bool:
        """Whether those that come are not compared any more."""
        return self.count > _WRAPPERS


_wrappers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By their first parameter, and by the name of their class."""
_kinds: dict[tuple[Any, ...], _ModuleKind] = {}
_counted: WeakSet[nn.Module] = WeakSet()


def find_reason(module: nn.Module) -> WholeReason | None:
    """Why a module that was never called before is not even compared; None if it is."""
    first = next(iter(nn.Module.parameters(module)))
    wrappers: _Wrappers = _wrappers.setdefault(first, {}).setdefault(_name_of(module), _Wrappers())
    wrappers.count += 1
    if wrappers.is_whole:
        return TEMPORARY
    kind = _kinds.get(_key_of(module))
    return kind.why_whole if kind is not None and kind.is_whole else None


def find_whole_calls(module: nn.Module) -> dict[Any, Any]:
    """What is known of the calls of modules like this one, if these are not even compared; else
    nothing."""
    first = next(iter(nn.Module.parameters(module)), None)
    if first is None:
        return {}
    wrappers: _Wrappers | None = _wrappers.get(first, {}).get(_name_of(module))
    if wrappers is not None and wrappers.is_whole:
        return wrappers.whole_calls
    kind = _kinds.get(_key_of(module))
    return kind.whole_calls if kind is not None and kind.is_whole else {}


def note(module: nn.Module, why_whole: WholeReason | None) -> None:
    """Remember what a comparison has found; several of one module count once."""
    kind = _kinds.setdefault(_key_of(module), _ModuleKind())
    kind.was_sharded |= why_whole is None
    if module not in _counted:
        _counted.add(module)
        kind.compared += 1
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
