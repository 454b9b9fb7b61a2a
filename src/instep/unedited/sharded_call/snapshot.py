"""What a forward may change besides its outputs, so that it can be made twice."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from instep.training.pytree import leaves_of
from instep.training.random_streams import RNGStates, default_generators

_TORCHS_OWN = frozenset({"_parameters", "_buffers", "_modules"})


class Snapshot:
    """The state before or after a forward of `module` with these arguments."""

    def __init__(self, module: nn.Module, leaves: list[Any]) -> None:
        self._parts = list(module.modules())
        self._torch, self._others = TorchGenerators(), RNGStates.capture()
        self._buffer_versions = {
            buffer: buffer._version for buffer in module.buffers() if not buffer.is_inference()
        }
        self.buffers = {
            (k, name): (buffer, buffer.detach().clone())
            for k, part in enumerate(self._parts)
            for name, buffer in part._buffers.items()
            if buffer is not None
        }
        self._attributes = [_attributes(part) for part in self._parts]
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._versions = {
            "its input": [t._version for t in inputs if not t.is_inference()],
            "its parameters": [p._version for p in module.parameters() if not p.is_inference()],
        }

    def restore(self) -> None:
        """Make it so again (inputs and parameters are not kept: see `changed`)."""
        self._others.restore()
        self._torch.restore()
        for (k, name), (buffer, value) in self.buffers.items():
            buffer.data.copy_(value)
            self._parts[k]._buffers[name] = buffer
        # What autograd had saved is what it was again.
        torch._C._autograd._unsafe_set_version_counter(
            tuple(self._buffer_versions), tuple(self._buffer_versions.values())
        )
        for part, kept in zip(self._parts, self._attributes, strict=True):
            now = part.__dict__
            for name in [n for n in now if n not in kept and n not in _TORCHS_OWN]:
                del now[name]
            for name, (value, contents) in kept.items():
                now[name] = value
                if isinstance(value, list):
                    value[:] = contents
                elif isinstance(value, dict):
                    value.clear()
                    value.update(contents)

    def draws(self, after: Snapshot) -> bool:
        """Whether a forward in between drew from torch's generator."""
        return not self._torch.same(after._torch)

    def changed(self, after: Snapshot) -> str | None:
        """What a forward changed in between that cannot be divided, in words; None if nothing."""
        for what, versions in self._versions.items():
            if versions != after._versions[what]:
                return f"its forward changes {what} in place"
        if not self._others.equals_except_torch(after._others):
            return "its forward draws from numpy's or Python's random numbers"
        for part, was, now in zip(self._parts, self._attributes, after._attributes, strict=True):
            # Torch's own hooks for normed weights compute such an attribute anew in each forward.
            normed = {getattr(hook, "name", None) for hook in part._forward_pre_hooks.values()}
            known = {id(t) for value, _ in was.values() for t in leaves_of(value)}
            for name, (_, contents) in now.items():
                new = [
                    t for t in leaves_of(contents) if isinstance(t, Tensor) and id(t) not in known
                ]
                if new and name not in normed:
                    return f"its forward keeps tensors in {type(part).__name__}.{name}"
        return None

    def buffers_apart(self, other: Snapshot) -> float:
        """How far the buffers that two forwards have left are apart."""
        both = self.buffers.keys() & other.buffers.keys()
        return max((apart(self.buffers[k][1], other.buffers[k][1]) for k in both), default=0.0)

    def differs(self, other: Snapshot, tolerance: float) -> str | None:
        """What two forwards have left different, in words; None where it is the same."""
        if not self._torch.same(other._torch):
            return "its random numbers are not those of the whole batch"
        if not self._others.equals_except_torch(other._others):
            return "its forward draws from numpy's or Python's random numbers"
        if self.buffers.keys() != other.buffers.keys():
            return "it has other buffers"
        for key, (_, mine) in self.buffers.items():
            if not apart(mine, other.buffers[key][1]) <= tolerance:
                return f"its buffer {key[1]} differs"
        for mine_, theirs in zip(self._attributes, other._attributes, strict=True):
            if _plain(mine_) != _plain(theirs):
                return "its attributes differ"
        return None


class TorchGenerators:
    """The states of torch's global generators."""

    def __init__(self) -> None:
        self._states = [generator.get_state() for generator in default_generators()]

    def same(self, other: TorchGenerators) -> bool:
        """Whether nothing was drawn between the two."""
        pairs = zip(self._states, other._states, strict=False)  # CUDA may have started meanwhile
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)

    def restore(self) -> None:
        """Draw the same again."""
        for generator, state in zip(default_generators(), self._states, strict=False):
            generator.set_state(state)


def _attributes(part: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Of each attribute the object, and what it contains where that can change."""
    return {
        name: (value, value.copy() if isinstance(value, list | dict) else value)
        for name, value in part.__dict__.items()
        if name not in _TORCHS_OWN
    }


def _plain(attributes: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Those whose values can be compared."""
    return {
        name: value
        for name, (value, _) in attributes.items()
        if isinstance(value, bool | int | float | str | None)
    }


def apart(mine: Tensor, theirs: Tensor) -> float:
    """How far two tensors are apart: their difference over their norm; infinite where rounding
    cannot be the reason."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return math.inf
    if not (mine.is_floating_point() or mine.is_complex()):
        return 0.0 if torch.equal(mine, theirs) else math.inf
    a, b = mine.detach(), theirs.detach()
    kind = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(kind), b.to(kind)
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        return math.inf
    difference = float(torch.where(finite, a - b, 0).norm())
    size = float(torch.where(finite, b, 0).norm())
    return (difference / size if size else math.inf) if difference else 0.0
