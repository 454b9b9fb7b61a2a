"""The state that a forward may change besides its outputs, so that it can be run twice."""

from __future__ import annotations

from collections import OrderedDict
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from instep.training.pytree import leaves_of
from instep.training.random_streams import RNGStates
from instep.unedited.sharded_call.compare.rounding import relative_error
from instep.unedited.sharded_call.run.random_numbers import TorchGeneratorStates

_MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


class Snapshot:
    """The state before or after a forward of `module` with these arguments."""

    def __init__(self, module: nn.Module, leaves: list[Any]) -> None:
        self._parts = list(module.modules())
        self._torch, self._others = TorchGeneratorStates(), RNGStates.capture()
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
            "its parameters": [
                p._version for p in nn.Module.parameters(module) if not p.is_inference()
            ],
        }

    def restore(self) -> None:
        """Set everything back, except inputs and parameters (see `find_change`)."""
        self._others.restore()
        self._torch.restore()
        for (k, name), (buffer, value) in self.buffers.items():
            if buffer.shape != value.shape:  # an observer of quantization makes room for channels
                with torch.no_grad():
                    buffer.resize_(value.shape)
            buffer.data.copy_(value)
            self._parts[k]._buffers[name] = buffer
        # What autograd had saved is what it was again.
        torch._C._autograd._unsafe_set_version_counter(
            tuple(self._buffer_versions), tuple(self._buffer_versions.values())
        )
        for part, kept in zip(self._parts, self._attributes, strict=True):
            now = part.__dict__
            for name in [n for n in now if n not in kept and n not in _MODULE_TABLES]:
                del now[name]
            for name, (value, contents) in kept.items():
                now[name] = value
                if isinstance(value, list | dict) and not _is_same(_contents(value), contents):
                    _set_contents(value, contents)

    def is_random(self, after: Snapshot) -> bool:
        """Whether a forward in between drew from torch's generator."""
        return not self._torch.same(after._torch)

    def find_change(self, after: Snapshot) -> str | None:
        """Say what a forward in between changed that rules out sharding; None if nothing."""
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

    def buffer_error(self, expected: Snapshot) -> float:
        """The largest relative error of the buffers that two forwards have left."""
        keys = self.buffers.keys() & expected.buffers.keys()
        errors = [relative_error(self.buffers[k][1], expected.buffers[k][1]) for k in keys]
        return max(errors, default=0.0)

    def find_difference(self, expected: Snapshot, tolerance: float) -> str | None:
        """Say in which state two forwards have not left the same; None if in all."""
        if not self._torch.same(expected._torch):
            return "its random numbers are not those of the whole batch"
        if not self._others.equals_except_torch(expected._others):
            return "its forward draws from numpy's or Python's random numbers"
        if self.buffers.keys() != expected.buffers.keys():
            return "it has other buffers"
        for key, (_, actual) in self.buffers.items():
            if not relative_error(actual, expected.buffers[key][1]) <= tolerance:
                return f"its buffer {key[1]} differs"
        for actual_, expected_ in zip(self._attributes, expected._attributes, strict=True):
            if _plain(actual_) != _plain(expected_):
                return "its attributes differ"
        return None


def _attributes(part: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Of each attribute the object, and what it contains where that can change."""
    return {
        name: (value, _contents(value) if isinstance(value, list | dict) else value)
        for name, value in part.__dict__.items()
        if name not in _MODULE_TABLES
    }


# The methods of the built-in types: a subclass may refuse to be changed, or count its changes.


def _base(value: dict[Any, Any]) -> Any:
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _contents(value: Any) -> Any:
    if isinstance(value, list):
        return list.copy(value)
    return dict(_base(value).items(value))


def _is_same(now: Any, before: Any) -> bool:
    """Whether two contents are the same objects in the same order."""
    left, right = ([*x.keys(), *x.values()] if isinstance(x, dict) else x for x in (now, before))
    return len(left) == len(right) and all(map(is_, left, right))


def _set_contents(value: Any, contents: Any) -> None:
    if isinstance(value, list):
        list.__setitem__(value, slice(None), contents)
        return
    base = _base(value)
    base.clear(value)
    for key, item in contents.items():
        base.__setitem__(value, key, item)


def _plain(attributes: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Those whose values can be compared."""
    return {
        name: value
        for name, (value, _) in attributes.items()
        if isinstance(value, bool | int | float | str | None)
    }
