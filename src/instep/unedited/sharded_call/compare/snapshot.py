"""The state that a forward may change besides its outputs, so that it can be run twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.training.pytree import leaves_of
from instep.training.random_streams import RNGStates
from instep.unedited.sharded_call.compare.rounding import relative_error
from instep.unedited.sharded_call.run.random_numbers import TorchGeneratorStates

BufferKey = tuple[int, str]
"""Which of the modules, and the buffer's name there."""


class BufferDistance(NamedTuple):
    """How far a buffer is from the one that it should be."""

    relative: float
    """Relative to its own norm."""
    to_spread: float
    """The same, but of a running mean relative to the standard deviations: a mean may be zero by
    mathematics, as behind a layer without bias whose inputs are normed, and is then all rounding.
    """


_MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


class Snapshot:
    """The state before or after a forward of `module` with these arguments."""

    def __init__(self, module: nn.Module, leaves: list[Any]) -> None:
        self._names, self._parts = zip(*module.named_modules(), strict=True)
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

    def buffer_errors(self, expected: Snapshot) -> dict[BufferKey, BufferDistance]:
        """How far the buffers are apart that two forwards have left."""
        keys = self.buffers.keys() & expected.buffers.keys()
        return {key: self._buffer_error(key, expected) for key in keys}

    def _buffer_error(self, key: BufferKey, expected: Snapshot) -> BufferDistance:
        actual, right = self.buffers[key][1], expected.buffers[key][1]
        part, name = key
        _, variance = expected.buffers.get((part, "running_var"), (None, None))
        spread = 0.0
        if name == "running_mean" and variance is not None:
            spread = float(variance.double().sqrt().norm())
        return BufferDistance(relative_error(actual, right), relative_error(actual, right, spread))

    def find_difference(self, expected: Snapshot, far: Container[BufferKey]) -> str | None:
        """Say in which state two forwards have not left the same; None if in all.

        `far`: the buffers that are further apart than rounding explains.
        """
        if not self._torch.same(expected._torch):
            return "its random numbers are not those of the whole batch"
        if not self._others.equals_except_torch(expected._others):
            return "its forward draws from numpy's or Python's random numbers"
        if others := self.buffers.keys() ^ expected.buffers.keys():
            return f"its forward makes the buffer {self._path(*min(others))}"
        for key in self.buffers:
            if key in far:
                return f"its buffer {self._path(*key)} differs"
        for k, (mine, theirs) in enumerate(
            zip(self._attributes, expected._attributes, strict=True)
        ):
            now, right = _plain(mine), _plain(theirs)
            for name in sorted(now.keys() | right.keys()):
                if name not in now or name not in right or now[name] != right[name]:
                    return f"its attribute {self._path(k, name)} depends on the rows"
        return None

    def _path(self, part: int, name: str) -> str:
        return f"{self._names[part]}.{name}".removeprefix(".")


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
